"""Engines that run these kernels, a module each."""
