"""Start, rendezvous, agreement and end of a run's processes."""
