"""The inputs of a chunked delta rule and their gradients: the rooms of ``gdn_prefill_inputs``."""
