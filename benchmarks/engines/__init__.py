"""Other projects' engines on a GPU machine without a network, for benchmarks/engines_gpu.py."""
