"""Attention of tree nodes over the cache and themselves."""
