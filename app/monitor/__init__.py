"""Observers of one run: its record, the times of a step, its loggers, the summary at its end."""
