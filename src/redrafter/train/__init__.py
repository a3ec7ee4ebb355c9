"""Making drafters: data from the target, training, and how well a drafter guesses."""
