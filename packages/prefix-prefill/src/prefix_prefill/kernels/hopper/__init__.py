"""Attention over a paged cache for NVIDIA's sm_90, in 16 bits: TMA, WGMMA and warp specialisation.

Persistent programs, one an SM, take tiles of queries, or pieces of their keys, one after another: ``balance`` says
which. Their warps have roles: one issues the TMA loads of keys, one those of values, a page or a part of one at a time,
into ring buffers of STAGES tiles, and runs ahead into the next tile of queries; one or two consumer warpgroups of 64
rows each multiply the same tiles; of an 8-bit cache two pairs of warps widen the tiles in between, if
``kernels.widen`` has not widened it all before.

    load k  --full-->  consume  --empty-->  load k        likewise v
    load k  --full-->  convert  --full-->  consume        with an 8-bit cache
                                                          (keys as they are with 8-bit queries)

=========  =====================================================================
kernel     setup of a program and its warps, their register budgets: begin here
items      what a program works on, looked up ahead by a warp of its own
config     constants and the groups of values that the warps share
memory     ring buffers, full and empty barriers, layouts of shared memory
producers  TMA loads; 8 bits to 16
consumers  the main loop: two products in flight, softmax between
softmax    the online softmax of a tile of scores
drafts     masks of tree drafts
epilogue   results, or partial results
levels     cascades: partial results of levels, added to those of the last one
rows       what a consumer has of its rows: tokens and heads, addresses, accumulators
merging    another kernel: pieces of tiles into results
=========  =====================================================================

A head's columns are one tile or two, each a power of two: 96 are 64 and 32. Each has its memory, its TMA loads and its
WGMMAs, so that nothing is padded but values of 65 to 127 beside two consumers: see ``tiles.value_tiles``.

To change tile sizes, stages or programs: ``plan.py`` alone chooses them, and ``fits_hopper`` says what is covered. To
add a dtype of the cache: ``memory.boxes_of`` and ``producers.convert``, and the checks in ``arguments.py``. To port to
another architecture: ``consumers`` and ``softmax`` hold WGMMA and its register layouts, ``memory`` and ``producers``
TMA and mbarriers, which sm_100 keeps.
"""

from prefix_prefill.kernels.hopper.kernel import (
    Config,
    Numbers,
    Scores,
    Strides,
    attend,
)

__all__ = ["Config", "Numbers", "Scores", "Strides", "attend"]
