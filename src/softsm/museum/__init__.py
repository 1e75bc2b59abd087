"""Bugs that cost days on a GPU, each small, with its corrected twin: `softsm museum`."""
