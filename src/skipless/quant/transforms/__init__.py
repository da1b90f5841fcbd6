"""Changes of a model that leave its function as it is, on which most methods stand (Q5).

session.py      scaling and rotating what layers read, chosen on calibration data
tracing.py      which layers read one tensor
sources.py      into which module before them a factor can be folded
streams.py      who reads and who writes the residual stream
rotation.py     Hadamard matrices of any width
orthogonal.py   orthogonal matrices that learn
turning.py      weights as functions of learned rotations
changes.py      parameters and inputs that were changed, and how to undo it
"""
