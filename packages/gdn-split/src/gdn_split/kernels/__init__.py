"""Device code: the split and its inverse, with the convolution's update (split.py); the whole decode step (step.py)."""
