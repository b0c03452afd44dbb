"""Prediction of the gain of a bigger machine or a second node, from a step and a network.

cost_model   the formulas, with their sources
measure      a step and the gradients of a model, measured here
command      `python -m app plan`
"""
