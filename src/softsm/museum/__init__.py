"""The exhibits of `softsm museum`: bugs that cost days on a GPU, each in a small kernel with its corrected twin."""
