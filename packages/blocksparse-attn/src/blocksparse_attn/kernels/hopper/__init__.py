"""The kernel for NVIDIA's sm_90. Read kernel.py first, then producers.py and consumers.py; the others are shared."""
