"""Attention to listed blocks of keys for NVIDIA's sm_90, in 16 bits: a persistent, warp-specialised kernel.

One program per SM. Its five roles run concurrently and communicate through shared memory only:

                 work items                     q                      +---------------------+
    schedule  -------------->  all others   -------------------------->| consume A (4 warps) |
    (1 warp)                                                           |  rows   0 to  63    |---> out, lse
    load keys     (1 warp)  ---- ring of STAGES tiles of keys -------->| consume B (4 warps) |
    load values   (1 warp)  ---- ring of STAGES tiles of values ------>|  rows  64 to 127    |---> out, lse
                                                                       +---------------------+

A work item is 128 positions of one head: 64 for consumer A and the 64 after them for B, each of one row of the layout
or, where its blocks are smaller, of several. The loaders, or for small blocks the scheduler, merge their lists and
gather a tile from pieces of blocks; a header says whether a consumer sees a tile whole, masks what its rows do not
list, or skips it.

Each buffer has a full and an empty barrier (memory.py). Where to change what:

- the size of a tile: ``BLOCK_N`` and ``STAGES`` come from plan.py; 64 rows are those of a warpgroup's WGMMA;
- a dtype: ``COLUMNS`` in memory.py are 128 bytes of 16-bit elements, and BYTES in producers.py counts two for each;
- Blackwell: tcgen05 takes the place of WGMMA, so that consumers.py changes, and its accumulators move to tensor memory;
  memory.py, producers.py and the softmax can stay.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse_attn.kernels.groups import Batch, Layout, OutputStrides
from blocksparse_attn.kernels.hopper.consumers import Results, consume
from blocksparse_attn.kernels.hopper.memory import make_channels
from blocksparse_attn.kernels.hopper.producers import load, schedule


@gluon.jit(
    do_not_specialize=[
        "rows", "sequences", "keys", "num_pages", "s_table", "s_crow", "s_col", "layout_rows", "entries", "slots",
        "num_splits", "s_lse_sequence", "s_lse_head", "left",
    ]
)  # fmt: skip
def attend(
    d_q, d_k, d_v, lists, p_table, bounds, p_sinks, outputs, rows, sequences, keys, num_pages, s_table, s_crow, s_col,
    layout_rows, entries, slots, num_splits, s_lse_sequence, s_lse_head, scores, left, strides, config: gl.constexpr,
):  # fmt: skip
    """``portable.attend_lists``, by any number of programs.

    Queries, keys and values are TMA descriptors over (sequence, or 0, or page; head; slot; element), in boxes of 64
    columns and 64 slots; of pages, BOX slots. The strides of q, k and v are theirs.
    """
    batch = Batch(bounds, sequences, rows, keys)
    layout = Layout(lists, s_crow, s_col, layout_rows, entries)
    channels = make_channels(d_k.dtype, scores[0], config)
    strides = OutputStrides(strides.out, (s_lse_sequence, s_lse_head, strides.lse))
    results = Results(p_sinks, outputs, strides, num_splits)
    i_half = gl.program_id(0) * 0
    # Registers of a thread: an SM has 65536, of which a warpgroup of producers needs few.
    gl.warp_specialize([
        (consume, (channels, i_half, scores[1], left, results, config)),
        (consume, (channels, i_half + 1, scores[1], left, results, config)),
        (load, (d_k, channels, batch, layout, p_table, s_table, num_pages, left, config, False)),
        (load, (d_v, channels, batch, layout, p_table, s_table, num_pages, left, config, True)),
        (schedule, (d_q, channels, batch, layout, slots, num_splits, left, config)),
    ], [4, 1, 1, 1], [232, 40, 40, 40])  # fmt: skip
