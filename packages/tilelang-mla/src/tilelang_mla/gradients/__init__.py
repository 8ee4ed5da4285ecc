"""Gradients of ``flash_mla_varlen_func``: their rooms, as those around them."""
