"""A trained classifier: load and predict in Python, export for other runtimes."""
