"""The command `redrafter-mlx`: one file for each verb."""
