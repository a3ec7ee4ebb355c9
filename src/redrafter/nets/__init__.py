"""The drafters' networks: weights and their arithmetic. Drafting and training call the same functions."""
