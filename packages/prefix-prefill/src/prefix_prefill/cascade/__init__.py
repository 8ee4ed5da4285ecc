"""Attention over keys that groups of sequences share, level by level: the rooms of ``cascade_attention``."""
