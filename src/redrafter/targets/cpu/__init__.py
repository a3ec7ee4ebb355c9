"""Faster passes of known models on a CPU."""
