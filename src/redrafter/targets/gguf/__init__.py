"""Models in GGUF files: the file itself, its block formats, the model's configuration and its tokenizer."""
