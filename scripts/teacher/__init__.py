"""Trains a small Gated DeltaNet that retrieves inside its training length: `python -m scripts.teacher -h`.

`corpus` turns books into token ids once, `rows` makes training rows, `levels` says which rows follow which,
`model` is the start, `step` one optimiser step, `measure` what a model can do, `train` the whole.
"""
