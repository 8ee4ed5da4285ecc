"""The kernels: device code in TileLang, and nothing else. Each file's functions build one for given constants."""
