"""Train image classifiers with data parallelism, from one device to many nodes, by changing flags.

`cli` turns flags into a run; `networks` and `modules` hold the models, `data` the images, `parallel` the
strategies; `callbacks` and `tracking` watch and record a run; `errors` holds what a user did wrong.
"""

__version__ = "0.1.0"
