"""Compares configurations on this machine: runs each of them with `fit`, measures all alike, and reports.

experiment   what is compared: variants, grids, and the commands that they mean
runner       runs each command in a process of its own, repeats in turn, and records the outcome
results      the figures of each variant, from its runs' records
advice       what the figures mean, as sentences
figures      what they look like
report       all of it as Markdown, HTML, CSV and JSON
command      `python -m app compare`
"""
