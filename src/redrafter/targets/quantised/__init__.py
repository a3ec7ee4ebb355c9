"""Quantised checkpoints as they are published: a file per format. And checkpoints that redrafter quantises."""
