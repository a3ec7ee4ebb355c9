"""Speculative decoding with a recurrent drafter, for mlx-lm's models."""
