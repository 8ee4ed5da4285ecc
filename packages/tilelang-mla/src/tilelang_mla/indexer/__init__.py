"""The lightning indexer: rooms of ``index_scores`` and ``index_topk``, as those around it, and its cache of keys."""
