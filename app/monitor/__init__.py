"""Observers of one run: record, step times, loggers, and summary."""
