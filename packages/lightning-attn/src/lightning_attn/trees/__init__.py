"""Drafts that branch: the rooms of ``parents=`` and ``path=``, as those around them."""
