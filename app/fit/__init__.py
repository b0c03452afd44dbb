"""`fit`, `validate`, `test` and `predict`: from a command line to a run."""
