"""Commands `fit`, `validate`, `test` and `predict`: command line, ranks, Trainer and outcome."""
