"""Comparison of configurations on this machine: runs each with `fit`, and reports the measurements.

experiment   variants and grids
runner       runs the variants in turn, several times each, and records the outcomes
results      figures of each variant, from its runs' records
advice       recommendation, in sentences
figures      plots
report       the report as Markdown, HTML, CSV and JSON
command      `python -m app compare`
"""
