"""The internal link, version 1."""
