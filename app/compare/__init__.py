"""Finding out which way of running is best here: many runs of `fit`, measured alike, and a report on them.

experiment   what is compared: variants, grids, and the commands that they mean
runner       runs each command in a process of its own, repeats in turn, and keeps what became of it
results      the figures of each variant, from its runs' records
advice       what the figures mean, in words
figures      what they look like
report       all of it as Markdown, HTML, CSV and JSON
command      `python -m app compare`
"""
