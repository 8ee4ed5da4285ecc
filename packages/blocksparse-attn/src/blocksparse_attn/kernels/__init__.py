"""Device code only; what is launched, and how, is decided in launch.py and plan.py."""
