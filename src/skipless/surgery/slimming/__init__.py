"""Trained models made smaller: sublayers dropped, gains folded away. See docs/surgery.md.

pruning.py     `prune`: what is dropped, and what it costs
shares.py      how much each sublayer adds to the stream
trials.py      the loss without some sublayers
removal.py     sublayers and layers taken out
folding.py     `fold`: on a copy, compared
own_folding.py, patched_folding.py     of our Transformer, and of patched models
scaling.py     gains multiplied into a linear layer
stock.py       `to_stock`: our decoder as a class of transformers
opening.py     a run or a folder, with text to measure it on
folders.py     one folder in, another out; for the command line
"""
