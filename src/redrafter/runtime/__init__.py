"""The running batch: rows open, are read, step together and close; steps run eagerly or as recorded CUDA graphs."""
