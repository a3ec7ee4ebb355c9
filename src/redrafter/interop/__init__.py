"""Other people's formats and engines, one file each."""
