"""Attention to blocks that a model selects for every token: the rooms of ``selected_attention``, as those around it."""
