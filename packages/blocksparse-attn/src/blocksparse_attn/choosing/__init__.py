"""Choosing blocks on the device, by scores: the rooms of ``select_blocks`` and ``BlockLayout.from_scores``."""
