"""Device code in TileLang, and nothing else: functions that build a kernel for given constants, and its macros."""
