"""The scripts here import packages of another environment, so pytest must not."""

collect_ignore_glob = ["*_client.py"]
