"""Gradients of a batch of sequences of one length: the rooms of that, as those around them."""
