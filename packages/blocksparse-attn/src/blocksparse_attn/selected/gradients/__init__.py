"""Gradients of ``selected_attention``."""
