"""Attention to listed blocks of keys for NVIDIA's sm_90, in 16 bits: a persistent, warp-specialised kernel.

One program per SM. Its five roles run concurrently and communicate through shared memory only:

                 work items                     q                      +---------------------+
    schedule  -------------->  all others   -------------------------->| consume A (4 warps) |
    (1 warp)                                                           |  rows   0 to  63    |---> out, lse
    load keys     (1 warp)  ---- ring of STAGES tiles of keys -------->| consume B (4 warps) |
    load values   (1 warp)  ---- ring of STAGES tiles of values ------>|  rows  64 to 127    |---> out, lse
                                                                       +---------------------+

A work item is 128 positions of one head: 64 for consumer A and the 64 after them for B, each of one row of the layout.
The loaders merge the two lists, and a header says which consumer wants which half of a tile. Both consumers take all
tiles and mask what they did not list: neighbouring rows of a layout mostly list the same.

Each buffer has a full and an empty barrier (memory.py). Where to change what:

- the size of a tile: ``BLOCK_N`` and ``STAGES`` come from plan.py; 64 rows are those of a warpgroup's WGMMA;
- a dtype: ``COLUMNS`` in memory.py are 128 bytes of 16-bit elements, and BYTES in producers.py counts two for each;
- Blackwell: tcgen05 takes the place of WGMMA, so that consumers.py changes, and its accumulators move to tensor memory;
  memory.py, producers.py and the softmax can stay.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocksparse_attn.kernels.groups import Batch, Layout
from blocksparse_attn.kernels.hopper.consumers import consume
from blocksparse_attn.kernels.hopper.memory import make_channels
from blocksparse_attn.kernels.hopper.producers import load, schedule


@gluon.jit(
    do_not_specialize=[
        "rows", "sequences", "keys", "num_pages", "s_table", "s_crow", "s_col", "layout_rows", "entries", "slots",
        "left",
    ]
)  # fmt: skip
def attend(
    d_q, d_k, d_v, lists, p_table, bounds, p_sinks, outputs, rows, sequences, keys, num_pages, s_table, s_crow, s_col,
    layout_rows, entries, slots, scale, softcap, left, strides, config: gl.constexpr,
):  # fmt: skip
    """``portable.attend_lists`` without a window, by any number of programs.

    Queries, keys and values are TMA descriptors over (sequence, or 0, or page; head; slot; element), in boxes of 64
    columns and 64 slots; of pages, BOX slots. The strides of q, k and v are theirs.
    """
    batch = Batch(bounds, sequences, rows, keys)
    layout = Layout(lists, s_crow, s_col, layout_rows, entries)
    channels = make_channels(d_k.dtype, scale, config)
    pid = gl.program_id(0)
    i_half = pid * 0
    # Registers of a thread: an SM has 65536, and warps that issue copies need few.
    gl.warp_specialize([
        (consume, (channels, i_half, p_sinks, outputs, softcap, strides, config)),
        (consume, (channels, i_half + 1, p_sinks, outputs, softcap, strides, config)),
        (load, (d_k, channels, batch, layout, p_table, s_table, num_pages, config, False)),
        (load, (d_v, channels, batch, layout, p_table, s_table, num_pages, config, True)),
        (schedule, (d_q, channels, batch, layout, slots, config)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
