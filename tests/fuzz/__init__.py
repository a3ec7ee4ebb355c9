"""Damaged files and hostile input, at random from a fixed seed. `make test-fuzz` runs these; the suite does not."""
