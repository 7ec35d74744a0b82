"""The sub-commands of `python -m router`, one file each."""
