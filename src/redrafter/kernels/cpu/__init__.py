"""Products of few tokens with large matrices on a CPU, and what stands between them in a layer."""
