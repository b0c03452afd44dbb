"""Commands `fit`, `validate`, `test` and `predict`: one command line, resolved, its ranks, its Trainer, its outcome."""
