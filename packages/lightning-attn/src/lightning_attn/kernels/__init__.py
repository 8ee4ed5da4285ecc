"""Device code: prefill in chunks (chunked.py; on sm_90 hopper.py), token by token (recurrent.py), shared parts."""
