"""The merge kernel of split-KV: partial results of all splits into outputs and lse."""

from typing import NamedTuple

import triton
import triton.language as tl

from blocksparse_attn.kernels.groups import Batch
from blocksparse_attn.kernels.softmax import LOG2_E, finite, log_sum_exp, normalised, power, with_sink
from blocksparse_attn.kernels.tiles import locate_row, split_row, wide


class MergeConfig(NamedTuple):
    """What ``merge`` is compiled for.

    TOGETHER: splits that are loaded at once. DEPENDENT: it may start before the kernel ahead of it has ended; AHEAD:
    and the kernel behind it before it has.
    """

    KIND: int
    H: int
    DV: int
    BLOCK_DV: int
    TOGETHER: int
    WIDE: bool
    DEPENDENT: bool
    AHEAD: bool


@triton.jit(
    do_not_specialize=[
        "rows", "sequences", "keys", "tokens", "slack", "num_splits", "s_lse_sequence", "s_lse_head",
        "s_lse_token",
    ]
)  # fmt: skip
def merge(
    bounds, p_sinks, outputs, rows, sequences, keys, tokens, slack, num_splits, s_lse_sequence, s_lse_head,
    s_lse_token, s_out, config: tl.constexpr,
):  # fmt: skip
    """Combine partial results, see ``Outputs``, of one row of one head. Rows of no tile have none.

    Tiles are of ``tokens``, with ``slack`` slots more for a sequence: 1 where they begin with its queries, and 2 where
    they lie at multiples of their size in its positions. With 0, each row is a tile.
    """
    H: tl.constexpr = config.H
    BLOCK_DV: tl.constexpr = config.BLOCK_DV
    # A result of 16 bits does not show how its weights are rounded: one sequence 6.60 us for 6.77.
    NATURAL: tl.constexpr = outputs.out.dtype.element_ty == tl.float32
    UNIT: tl.constexpr = 1.0 if NATURAL else LOG2_E
    batch = Batch(bounds, sequences, rows, keys)
    pid = tl.program_id(0).to(tl.int64)
    i_h = pid % H
    begin = pid * 0
    has_tile = pid >= 0
    if slack > 0:
        begin, has_tile = locate_row(batch, pid // H, tokens, slack, config.KIND)
    if config.DEPENDENT:
        # In every program: were all to end before it, the next kernel could start before the one ahead has ended.
        tl.extra.cuda.gdc_wait()
        if config.AHEAD:
            tl.extra.cuda.gdc_launch_dependents()
    if has_tile:
        row = pid // H + tl.arange(0, 1)
        m_row = row >= 0
        i_b, token, all_rows = split_row(batch, begin, row, config.KIND)
        o_d = tl.arange(0, config.BLOCK_DV)
        o_s = tl.arange(0, config.TOGETHER)
        m_tile = m_row[:, None] & (o_d < config.DV)[None, :]
        acc = tl.zeros([1, BLOCK_DV], tl.float32)
        running_max = tl.full([1], float("-inf"), tl.float32)
        row_sum = tl.zeros([1], tl.float32)
        # Read after the loop, as all splits agree; Triton wants it to be there before.
        possible = m_row
        # One split after the other would wait for memory as often; a thread adds up its own columns.
        for i_split in range(0, num_splits, config.TOGETHER):
            split = i_split + o_s
            m_split = split < num_splits
            p_part = outputs.part + ((split * all_rows + row) * H + i_h)[:, None] * config.DV + o_d[None, :]
            b_part = tl.load(p_part, mask=m_split[:, None] & (o_d < config.DV)[None, :], other=0.0)
            b_lse = tl.load(outputs.part_lse + (split * H + i_h) * all_rows + row, mask=m_split, other=float("-inf"))
            possible = tl.zeros([1], tl.float32) + tl.max(b_lse, 0) != float("inf")
            b_lse = tl.where(b_lse == float("inf"), float("-inf"), b_lse)
            new_max = tl.maximum(running_max, tl.max(b_lse, 0))
            rescale = power((running_max - finite(new_max)) * UNIT, NATURAL)
            weight = power((b_lse - finite(new_max)) * UNIT, NATURAL)
            # A split that saw nothing may have left anything.
            b_part = tl.where((b_lse == float("-inf"))[:, None], 0.0, b_part)
            acc = acc * rescale[:, None] + tl.sum(b_part * weight[:, None], 0)[None, :]
            row_sum = row_sum * rescale + tl.sum(weight, 0)
            running_max = new_max
        if p_sinks is not None:
            b_sink = tl.zeros([1], tl.float32) + tl.load(p_sinks + i_h).to(tl.float32)
            acc, running_max, row_sum = with_sink(acc, running_max, row_sum, tl.where(possible, b_sink, float("-inf")))
        o_d_out = wide(o_d, config.WIDE)
        off_out = i_b * s_out[0] + token * s_out[1] + i_h * s_out[2]
        p_tile = outputs.out + off_out[:, None] + (o_d_out * s_out[3])[None, :]
        tl.store(p_tile, normalised(acc, row_sum).to(outputs.out.dtype.element_ty), mask=m_tile)
        if outputs.lse is not None:
            off_lse = i_b * s_lse_sequence + i_h * s_lse_head + token * s_lse_token
            tl.store(outputs.lse + off_lse, log_sum_exp(running_max, row_sum), mask=m_row)
