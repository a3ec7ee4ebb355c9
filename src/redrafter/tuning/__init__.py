"""Tuning: what a decoding step costs on this machine, and which tree shape is the fastest."""
