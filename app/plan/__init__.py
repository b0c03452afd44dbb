"""Predicts what a bigger machine or a second node would gain, from a step and a network.

cost_model   the mathematics, with its sources
measure      a step and the gradients of a model, measured here
command      `python -m app plan`
"""
