"""A trained residual model towards fewer skips, taught by the original. See docs/convert.md.

settings.py    what a conversion is told
results.py     what it finds: a row a stage, and convert.json
converting.py  `convert`: what is given, checked and made ready
stages.py      the work, stage by stage
keeping.py     the folder: the record, checkpoints, going on after an interruption
skips.py       joins whose skip can be taken away; the control without training
fitting.py     a branch that takes over what its skip carried
distilling.py  how far a model is from the original
folders.py     a folder and a text in, a folder out; for the command line
"""
