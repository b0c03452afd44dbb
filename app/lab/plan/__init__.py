"""Prediction of the speed-up on more devices or nodes, from a measured step and the links.

cost_model   formulas, with their sources
measure      measurement of a step and its gradients
report       recommendation, table and plots
command      `python -m app plan`
"""
