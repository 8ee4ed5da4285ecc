"""Device code: the only modules that import a kernel language."""
