"""Benchmark scripts and the code that only they use: widened models and experimental drafters."""
