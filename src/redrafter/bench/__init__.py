"""Benchmarks: contenders answer the same prompts on the same machine, taking turns, and their texts are compared."""
