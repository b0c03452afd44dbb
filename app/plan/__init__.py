"""Is a bigger machine or a second node worth it? A prediction from a step and a network.

model     the mathematics, with its sources
measure   a step and the gradients of a model, measured here
command   `python -m app plan`
"""
