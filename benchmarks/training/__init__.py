"""Training of experimental drafters: a draft model made of target layers, and drafters for speech."""
