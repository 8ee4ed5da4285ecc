"""Decode steps and drafts: the rooms of ``gdn_decode_step``, ``gdn_verify`` and ``gdn_commit``."""
