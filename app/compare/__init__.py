"""Comparison of configurations on this machine: runs each with `fit`, measures all alike, and reports.

experiment   variants and grids
runner       runs each variant, repeats in turn, and records the outcome
results      figures of each variant, from its runs' records
advice       sentences about the figures
figures      pictures of the figures
report       the report as Markdown, HTML, CSV and JSON
command      `python -m app compare`
"""
