"""A whole pass of a decoder-only model on a CPU, over quantised or float weights, in one C++ call."""
