"""What the demo runs for blocksparse-attn: a prompt of 16384 tokens through Phi-3-small's layer, then decoding."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from blocksparse_attn import BlockLayout, LocalStridedBlockSparseAttn, blocksparse_attention
from kernel_reference import blocks
from kernel_reference.attention import attention
from kernel_reference.bench.demo import INTERPRETED_KERNEL, Row, error_of_rows, median_ms, plain_ms, ran_on
from kernel_reference.models import PHI3_SMALL, BlockSparseAttention
from kernel_reference.paging import cumulative

PROMPT, SEQUENCES = 16384, 4
# Of the prompt, where there is no GPU, the last ones only.
LAST_ON_CPU = 128
SEQUENCES_ON_CPU = 1
# Tokens of the model's longest context.
LONGEST = 131072
SAMPLE = 16
DTYPE = torch.bfloat16
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
LIMIT = torch.finfo(DTYPE).eps
NOTE = "error relative to a row's largest value"
SAMPLED = f"{NOTE}; of a sample of rows, all heads"


class Batch(NamedTuple):
    """Sequences of (older, new) tokens: queries of the new ones, keys and values of all."""

    lengths: list[tuple[int, int]]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


def real_size(device: torch.device) -> Iterator[Row]:
    """The layout of the longest context, a prompt, and a token of each of four sequences: GPU kernels or the CPU's."""
    on_gpu = device.type == "cuda"
    how = ran_on(device)
    model = PHI3_SMALL
    numbers = (model.num_heads_q, LONGEST, model.local_blocks, model.vert_stride, model.block_size)

    # Warm up: what a device does once, at its first use.
    BlockLayout.local_strided(1, model.block_size, 1, 2, model.block_size, device=device)
    started = time.perf_counter()
    layout = BlockLayout.local_strided(*numbers, device=device)
    # The first use, which waits for the device.
    int(layout.col[-1, -1])
    duration = 1e3 * (time.perf_counter() - started)
    wrong = layout.to_mask() != blocks.local_strided(*numbers).to(device)
    # Layouts are built by torch operations, on a GPU too.
    shape = f"{model.name}, {LONGEST} tokens, {model.num_heads_q} heads"
    note = f"density {layout.density():.3f}; error: the share of wrong blocks; time to the first use"
    yield Row("BlockLayout.local_strided", *how, shape, float(wrong.sum()) / wrong.numel(), duration, note)

    new = PROMPT if on_gpu else LAST_ON_CPU
    prompt = make_batch(model, [(PROMPT - new, new)], device)

    def prefill() -> torch.Tensor:
        return attend(prompt, layout)

    rows = sampled(new)
    error = error_of_rows(prefill()[rows], exact(model, prompt, rows))
    duration = median_ms(prefill, device, 3 if on_gpu else 1, "prefill")
    tokens = f"{PROMPT} tokens" if on_gpu else f"the last {new} of {PROMPT} tokens"
    remark = "" if on_gpu else "; all of the prompt on a GPU"
    plain = plain_ms(lambda: exact(model, prompt, None, torch.float32), device)
    shape = f"{model.name}, {tokens}, {DTYPE_NAME}"
    note = f"{SAMPLED}{remark}"
    yield Row("blocksparse_attention", *how, shape, error, duration, note, limit=LIMIT, plain_ms=plain)

    sequences = SEQUENCES if on_gpu else SEQUENCES_ON_CPU
    decoding = make_batch(model, [(PROMPT - 1, 1)] * sequences, device)
    layer = LocalStridedBlockSparseAttn(*numbers, device=device)

    def decode() -> torch.Tensor:
        out: torch.Tensor = layer(decoding.q, decoding.k, decoding.v, decoding.cu_seqlens_k)
        return out

    error = error_of_rows(decode(), exact(model, decoding, torch.arange(sequences)))
    duration = median_ms(decode, device, 3 if on_gpu else 1, "decode")
    shape = f"{model.name}, the next token of {sequences} of {SEQUENCES} sequences, behind {PROMPT - 1}, {DTYPE_NAME}"
    note = f"{NOTE}; all rows and heads"
    plain = plain_ms(lambda: exact(model, decoding, None, torch.float32), device)
    yield Row("LocalStridedBlockSparseAttn", *how, shape, error, duration, note, limit=LIMIT, plain_ms=plain)


def interpreted() -> Iterator[Row]:
    """The kernels themselves at a small size, in Triton's interpreter, launched as they would be on a GPU."""
    from blocksparse_attn import launch
    from blocksparse_attn.arguments import Options, Tensors, check_attend
    from blocksparse_attn.plan import AttentionPlan

    device = torch.device("cpu")
    model = BlockSparseAttention("4/2 heads of 64, blocks of 32", 4, 2, 64, 32, 2, 3)
    prompt, decoding = [(0, 150), (90, 40)], [(200, 1), (70, 1)]
    for lengths, plan, how in (
        (prompt, AttentionPlan(32, 32, 1, 4, 1), "150 tokens, and 40 after 90"),
        (decoding, AttentionPlan(16, 32, 1, 4, 1, packed=1), "1 token after 200 and 1 after 70"),
        (decoding, AttentionPlan(16, 16, 2, 4, 1, packed=1), "the same, 2 splits"),
    ):
        batch = make_batch(model, lengths, device)
        layout = BlockLayout.local_strided(4, 256, model.local_blocks, model.vert_stride, model.block_size)
        out = torch.empty_like(batch.q)
        # A ragged batch without sinks: what belongs to the others is None.
        tensors = Tensors(
            batch.q, batch.k, batch.v, layout.crow, layout.col, batch.cu_seqlens_q, batch.cu_seqlens_k,
            *[None] * 7, out, None,
        )  # fmt: skip
        longest = max(new for _, new in lengths)
        options = Options(longest, model.block_size, model.block_size, "NHD", model.head_dim**-0.5, -1, 0, 0.0, 0)
        run = launch.prepare_attend(check_attend(tensors, options), plan, tensors)
        run(*tensors)
        error = error_of_rows(out, exact(model, batch, torch.arange(len(out))))
        duration = median_ms(lambda run=run, tensors=tensors: run(*tensors), device, 1, f"{how}, interpreted")
        shape = f"{model.name}, {how}, {DTYPE_NAME}"
        yield Row("blocksparse_attention", INTERPRETED_KERNEL, "cpu", shape, error, duration, NOTE, limit=LIMIT)


def make_batch(model: BlockSparseAttention, lengths: list[tuple[int, int]], device: torch.device) -> Batch:
    new, total = [n for _, n in lengths], [ctx + n for ctx, n in lengths]
    q, k, v = (
        torch.randn(rows, heads, model.head_dim, device=device).to(DTYPE)
        for rows, heads in ((sum(new), model.num_heads_q), *[(sum(total), model.num_heads_kv)] * 2)
    )
    return Batch(lengths, q, k, v, *(cumulative(torch.tensor(sizes)).to(device) for sizes in (new, total)))


def attend(batch: Batch, layout: BlockLayout) -> torch.Tensor:
    return blocksparse_attention(
        batch.q, batch.k, batch.v, layout, cu_seqlens_q=batch.cu_seqlens_q, cu_seqlens_k=batch.cu_seqlens_k,
        max_seqlen_q=max(new for _, new in batch.lengths),
    )  # fmt: skip


def sampled(rows: int) -> torch.Tensor:
    """The first, the last and some between."""
    return torch.cat([torch.tensor([0, rows - 1]), torch.randint(rows, (SAMPLE - 2,))]).unique()


def exact(
    model: BlockSparseAttention, batch: Batch, rows: torch.Tensor | None, compute_dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """These rows, or all, in float64 unless told otherwise, under the reference's mask and not the layout's lists."""
    longest = max(ctx + new for ctx, new in batch.lengths)
    pattern = (model.num_heads_q, longest, model.local_blocks, model.vert_stride, model.block_size)
    mask = blocks.local_strided(*pattern).to(batch.q.device)
    return attention(
        batch.q, batch.k, batch.v, cu_seqlens_q=batch.cu_seqlens_q, cu_seqlens_k=batch.cu_seqlens_k, causal=True,
        mask=blocks.mask_function(mask, model.block_size, model.block_size), rows=rows,
        compute_dtype=compute_dtype,
    ).out  # fmt: skip
