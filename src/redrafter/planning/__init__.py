"""How much to guess: what a step costs, how likely its guesses are, and which of them pay for their time."""
