"""Words of the report for a reader who knows none of them: one sentence a number.

Read by html.
"""

from __future__ import annotations

INTRODUCTION = (
    "Inside a transformer every layer normally adds its result to what came in, a shortcut called "
    "a residual or skip connection; “residual-free” models drop that addition, so each layer "
    "replaces the signal instead.",
    "This report trains small language models both ways with several optimisers, and "
    "measures how well each predicts text that it has never seen (the held-out loss, lower is "
    "better).",
    "Skips are said to breed a few huge numbers that spoil rounding to few bits, which is what "
    "makes models small and fast; so the question is what giving up the skip costs at full "
    "precision, and whether it pays once the numbers are rounded.",
)

GLOSSARY = {
    "Held-out loss": "Average surprise about the next token of unseen text, in nats: 0.1 lower "
    "means about 10 % more probability on the right token.",
    "± (standard error)": "How far the number could be off by chance: over seeds where a row has "
    "several, else only over the choice of held-out text.",
    "Perplexity": "exp(loss): the number of equally likely tokens that the model hesitates "
    "between.",
    "Bits per byte": "The same loss as bits for each byte of text, comparable between tokenizers.",
    "Gap": "Held-out loss relative to the best residual row with the same optimiser at equal "
    "tokens; positive is worse.",
    "Learning rate": "The step size for the hidden matrices; the note of a row and its "
    "configuration say where it comes from.",
    "W8A6, W4A4, …": "Weights rounded to 8 (4) bits and activations to 6 (4), one scale a tensor "
    "taken from its largest value; embedding and output head stay exact.",
    "Linear and block scope": "Linear rounds what enters each matrix; block also rounds what each "
    "sublayer gives out and the stream between layers, which is the harder test.",
    "Loss increase": "Loss after rounding minus loss at full precision, in nats.",
    "Excess kurtosis g": "How heavy the tails are, pooled over all tokens and channels: 0 for a "
    "bell curve, thousands when single channels are huge; the table averages |g| of the blocks' "
    "outputs over the middle third of the layers.",
    "SQNR": "Signal to rounding noise of one tensor in decibels; higher is better, and 6 dB is "
    "about one bit.",
    "Gaussian yardstick, gap (dB)": "The SQNR that a bell-curved tensor with its best clip reaches "
    "at this width, and how far a tensor stays below it.",
    "R_l and R_N": "How far rounding has moved the stream after layer l (after the last layer N), "
    "as a share of the stream's length.",
    "Attention entropy": "How widely a head spreads its attention, divided by the most it could: "
    "1 is everywhere equally, 0 is a single token.",
    "First-token mass": "The share of attention that lands on the very first token, a parking "
    "place called a sink.",
    "Gradient norm": "How strongly the training signal reaches the weights of a layer.",
    "Weights a and b": "A join computes a × stream + b × branch: 1, 1 is a residual connection, "
    "0, 1 is none, and annealing takes a from 1 to 0.",
}
