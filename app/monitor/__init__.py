"""Observers of one run: record, step times, loggers, and summary."""

from app.monitor.batch_shapes import BatchShapes

__all__ = ["BatchShapes"]
