"""Universal interpolation (C8) inside transformers' layers, which see padding and caches.

causality.py  whether a stack of layers looks ahead, read off the model
contexts.py   what a layer is handed, told to its connections
states.py     what connections remember, kept on transformers' cache
"""
