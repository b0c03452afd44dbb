"""Train image classifiers with data parallelism, from one device to many nodes, by changing flags.

`cli` routes a command line, `commands` turns flags into a run, `beginning` settles what all ranks share, `run` says how
it ended; `networks` and `modules` hold the models, `data` the images, `parallel` the strategies and how ranks meet;
`callbacks`, `record`, `profiling` and `tracking` watch and record a run. `compare` measures
many runs, `plan` predicts them from a step and a `network`, `doctor` says what this machine can run. `errors` holds
what a user did wrong, `settings` what a command line means.
"""

import warnings

__version__ = "0.1.0"


# Not for users to act on; set here because spawned processes import this, too.
warnings.filterwarnings("ignore", ".*LeafSpec")  # Lightning 2.6 with newer torch
# these metrics are synchronised before they are logged
warnings.filterwarnings("ignore", r".*'(train|val|test)_(loss|acc|loss_step)'.*sync_dist=True")
warnings.filterwarnings("ignore", "The number of training batches")  # epochs are logged, too, however short
warnings.filterwarnings("ignore", "Experiment logs directory")  # the tracker's folder is there first
