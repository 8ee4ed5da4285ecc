"""The kernel for sm_90, as calls reach it: see ``prefix_prefill.kernels.hopper``."""
