"""Device code: the split and its inverse, with the convolution's update (split.py); a layer's tokens (layer.py) in
decode steps (step.py) and drafts that branch (trees.py); the inputs of prefill (prefill.py).
"""
