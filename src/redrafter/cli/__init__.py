"""The command line: one file per verb; the only place that prints."""
