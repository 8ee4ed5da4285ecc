"""Gradients of ``blocksparse_attention``."""
