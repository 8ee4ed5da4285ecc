"""Device code, one file a way of walking: in chunks (portable, and for Hopper), and token by token."""
