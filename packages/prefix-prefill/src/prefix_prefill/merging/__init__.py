"""Merging partial results: of tiles in pieces, of splits, and of two results."""
