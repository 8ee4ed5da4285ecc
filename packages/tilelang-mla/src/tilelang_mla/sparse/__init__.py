"""Attention to lists of keys: what is its own beside the rooms around it, which decode such lists too."""
