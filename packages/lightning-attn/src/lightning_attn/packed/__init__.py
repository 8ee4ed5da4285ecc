"""Packed sequences without a pool, and states alone: the rooms of these functions, as those around them."""
