"""The merge kernel of split-KV: partial results of all splits into outputs and lse."""

import triton
import triton.language as tl

from blocksparse_attn.kernels.softmax import exponential, finite, log_sum_exp, normalised, with_sink
from blocksparse_attn.kernels.tiles import wide


@triton.jit(do_not_specialize=["rows", "length"])
def merge(
    p_sinks, outputs, rows, length, strides, H: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Combine partial results, see ``Outputs``; in a padded batch there are ``length`` rows for each sequence."""
    pid = tl.program_id(0)
    i_h = (pid % H).to(tl.int64)
    row = (pid // H).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    o_d = tl.arange(0, BLOCK_DV)
    m_row = row < rows
    m_tile = m_row[:, None] & (o_d < DV)[None, :]
    acc = tl.zeros([TOKENS, BLOCK_DV], tl.float32)
    running_max = tl.full([TOKENS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TOKENS], tl.float32)
    # Read from the last split after the loop, as all splits agree; Triton wants it to be there before.
    possible = m_row
    for i_split in range(SPLITS):
        split = row * 0 + i_split
        p_part = outputs.part + ((split * rows + row) * H + i_h)[:, None] * DV + o_d[None, :]
        b_part = tl.load(p_part, mask=m_tile, other=0.0)
        b_lse = tl.load(outputs.part_lse + (split * H + i_h) * rows + row, mask=m_row, other=float("inf"))
        possible = b_lse != float("inf")
        b_lse = tl.where(possible, b_lse, float("-inf"))
        new_max = tl.maximum(running_max, b_lse)
        rescale = exponential(running_max - finite(new_max))
        weight = exponential(b_lse - finite(new_max))
        # A split that saw nothing may have left anything.
        b_part = tl.where((b_lse == float("-inf"))[:, None], 0.0, b_part)
        acc = acc * rescale[:, None] + b_part * weight[:, None]
        row_sum = row_sum * rescale + weight
        running_max = new_max
    if p_sinks is not None:
        b_sink = tl.zeros([TOKENS], tl.float32) + tl.load(p_sinks + i_h).to(tl.float32)
        acc, running_max, row_sum = with_sink(acc, running_max, row_sum, tl.where(possible, b_sink, float("-inf")))
    i_n = row * 0
    token = row
    if PADDED:
        i_n = row // length
        token = row % length
    o_d_out = wide(o_d, WIDE)
    s_out, s_lse = strides.out, strides.lse
    p_tile = outputs.out + (i_n * s_out[0] + token * s_out[1] + i_h * s_out[2])[:, None] + (o_d_out * s_out[3])[None, :]
    tl.store(p_tile, normalised(acc, row_sum).to(outputs.out.dtype.element_ty), mask=m_tile)
    if outputs.lse is not None:
        p_lse = outputs.lse + i_n * s_lse[0] + i_h * s_lse[1] + token * s_lse[2]
        tl.store(p_lse, log_sum_exp(running_max, row_sum), mask=m_row)
