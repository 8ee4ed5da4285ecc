"""What the demo runs for prefix-prefill: 2048 new tokens behind 32k older ones, as in Llama-3-70B and gpt-oss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernel_reference.attention import attention
from kernel_reference.bench.demo import INTERPRETED_KERNEL, Row, error_of_rows, median_ms, plain_ms, ran_on
from kernel_reference.models import GPT_OSS, LLAMA3_70B, SoftmaxAttention
from kernel_reference.paging import PagedCache, cumulative, paged_cache
from prefix_prefill import context_attention_fwd, merge_attention_states, prefix_prefill

PREFIX, CHUNK, PAGE = 32768, 2048, 16
# Llama-3-70B's prefix where there is no GPU: what it costs grows with it, unlike under gpt-oss's window.
PREFIX_ON_CPU = 4096
CHUNK_ON_CPU = 512
SAMPLE = 16
DTYPE = torch.bfloat16
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
LIMIT = torch.finfo(DTYPE).eps
NOTE = "error relative to a row's largest value"
SAMPLED = f"{NOTE}; of a sample of rows, all heads"


@dataclass
class Prompt:
    """Sequences of (older, new) tokens: queries, and all keys and values, dense and in a paged cache, elsewhere NaN."""

    lengths: Sequence[tuple[int, int]]
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sinks: torch.Tensor | None
    paged: PagedCache[torch.Tensor]
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor

    @property
    def max_seqlen_q(self) -> int:
        return max(new for _, new in self.lengths)

    @property
    def own(self) -> torch.Tensor:
        """Where the new tokens are among all."""
        ends = self.cu_seqlens_k.tolist()[1:]
        return torch.cat([torch.arange(end - new, end) for end, (_, new) in zip(ends, self.lengths, strict=True)])


def real_size(device: torch.device) -> Iterator[Row]:
    """One rank's share of Llama-3-70B, all of gpt-oss, and an engine's call: GPU kernels or the CPU implementation."""
    on_gpu = device.type == "cuda"
    how = ran_on(device)

    prefix, chunk = (PREFIX, CHUNK) if on_gpu else (PREFIX_ON_CPU, CHUNK_ON_CPU)
    remark = "" if on_gpu else f"; {CHUNK} behind {PREFIX} on a GPU"
    for model, ctx in ((LLAMA3_70B.tensor_parallel(8), prefix), (GPT_OSS, PREFIX)):
        prompt = make_prompt(model, [(ctx, chunk)], device)

        def call(prompt: Prompt = prompt, window: tuple[int, int] | None = model.window) -> torch.Tensor:
            return prefill(prompt, window)

        rows = sampled(chunk)
        error = error_of_rows(call()[rows], exact(prompt, model.window, rows))
        duration = median_ms(call, device, 3 if on_gpu else 1, f"prefill {model.name}")
        shape = f"{described(model)}, {chunk} tokens behind {ctx}, {DTYPE_NAME}"
        plain = plain_ms(lambda prompt=prompt, model=model: exact(prompt, model.window, None, torch.float32), device)
        note = f"{SAMPLED}{remark}"
        yield Row("prefix_prefill", *how, shape, error, duration, note, limit=LIMIT, plain_ms=plain)

    model = LLAMA3_70B.tensor_parallel(8)
    prompt = make_prompt(model, [(1000, 500), (2000, 1), (4000, 1)], device, page_layout="x-packed")
    rows = torch.cat([sampled(500), torch.tensor([500, 501])])
    own = prompt.own.to(device)
    k, v, out = prompt.keys[own], prompt.values[own], torch.empty_like(prompt.q)
    paged, one = prompt.paged, torch.ones(1, device=device)

    def by_engines_signature() -> None:
        context_attention_fwd(
            prompt.q, k, v, out, "auto", paged.k_cache, paged.v_cache, paged.block_table, prompt.cu_seqlens_q,
            paged.seqlens_k, 4001, 500, one, one,
        )  # fmt: skip

    by_engines_signature()
    error = error_of_rows(out[rows], exact(prompt, None, rows))
    duration = median_ms(by_engines_signature, device, 3, "context_attention_fwd")
    shape = f"{model.name}, 500 tokens behind 1000, 1 behind 2000, 1 behind 4000, {DTYPE_NAME}"
    plain = plain_ms(lambda: exact(prompt, None, None, torch.float32), device)
    yield Row("context_attention_fwd", *how, shape, error, duration, SAMPLED, limit=LIMIT, plain_ms=plain)

    parts = [torch.randn(CHUNK, LLAMA3_70B.num_heads_q, 128, device=device).to(DTYPE) for _ in range(2)]
    weights = [torch.randn(LLAMA3_70B.num_heads_q, CHUNK, device=device) for _ in range(2)]

    def merge() -> torch.Tensor:
        return merge_attention_states(parts[0], weights[0], parts[1], weights[1]).out

    error = error_of_rows(merge(), merged(parts, weights))
    duration = median_ms(merge, device, 3, "merge")
    shape = f"{LLAMA3_70B.name}, {CHUNK} tokens, {DTYPE_NAME}"
    plain = plain_ms(lambda: merged(parts, weights, torch.float32), device)
    yield Row("merge_attention_states", *how, shape, error, duration, NOTE, limit=LIMIT, plain_ms=plain)


def interpreted() -> Iterator[Row]:
    """The kernels themselves at a small size, in Triton's interpreter, launched as they would be on a GPU."""
    from prefix_prefill import launch
    from prefix_prefill.arguments import MergeTensors, PrefillNumbers, PrefillTensors, check_prefill
    from prefix_prefill.plan import PrefillPlan

    device = torch.device("cpu")
    model = SoftmaxAttention("4/2 heads of 64", 4, 2, 64, window=(31, 0), sinks=True)
    lengths = [(100, 20), (70, 1)]
    rows = torch.arange(21)
    for window, splits in ((None, 1), (model.window, 1), (None, 2)):
        prompt = make_prompt(model, lengths, device, sinks=window is not None)
        left, right = window or (-1, 0)
        numbers = PrefillNumbers(20, "NHD", model.head_dim**-0.5, left, right, 0.0, False, 1.0, 1.0, 1.0, 0)
        out = torch.empty_like(prompt.q)
        cache = (prompt.paged.k_cache, prompt.paged.v_cache, prompt.paged.block_table)
        lengths_of = (prompt.cu_seqlens_q, prompt.paged.seqlens_k)
        tensors = PrefillTensors(
            prompt.q, None, None, *cache, *lengths_of, None, prompt.sinks, None, None, None, out, None
        )
        problem = check_prefill(tensors, numbers)
        run = launch.prepare_prefill(problem, PrefillPlan(32, 32, splits, 4, 1), tensors)
        run(*tensors)
        error = error_of_rows(out, exact(prompt, window, rows))
        duration = median_ms(lambda run=run, tensors=tensors: run(*tensors), device, 1, "prefill, interpreted")
        how = f"window {window[0] + 1} and sinks" if window else f"keys in {splits} parts" if splits > 1 else "causal"
        shape = f"{model.name}, 20 tokens behind 100 and 1 behind 70, {how}, {DTYPE_NAME}"
        yield Row("prefix_prefill", INTERPRETED_KERNEL, "cpu", shape, error, duration, NOTE, limit=LIMIT)

    parts = [torch.randn(21, 4, 64).to(DTYPE) for _ in range(2)]
    weights = [torch.randn(4, 21) for _ in range(2)]
    out, lse = torch.empty_like(parts[0]), torch.empty_like(weights[0])
    six = MergeTensors(parts[0], weights[0], parts[1], weights[1], out, lse)
    merge = launch.prepare_merge(six)
    merge(*six)
    duration = median_ms(lambda: merge(*six), device, 1, "merge, interpreted")
    shape = f"{model.name}, 21 tokens, {DTYPE_NAME}"
    error = error_of_rows(out, merged(parts, weights))
    yield Row("merge_attention_states", INTERPRETED_KERNEL, "cpu", shape, error, duration, NOTE, limit=LIMIT)


def described(model: SoftmaxAttention) -> str:
    window = f", window {model.window[0] + 1}" if model.window else ""
    return f"{model.name}{window}{' and sinks' if model.sinks else ''}"


def make_prompt(
    model: SoftmaxAttention, lengths: Sequence[tuple[int, int]], device: torch.device, *, page_layout: str = "NHD",
    sinks: bool | None = None,
) -> Prompt:  # fmt: skip
    """Random tokens; ``sinks`` None: as the model has them."""
    new, total = sum(n for _, n in lengths), sum(ctx + n for ctx, n in lengths)
    q, keys, values = (
        torch.randn(rows, heads, model.head_dim, device=device).to(DTYPE)
        for rows, heads in ((new, model.num_heads_q), (total, model.num_heads_kv), (total, model.num_heads_kv))
    )
    cu_seqlens_q = cumulative(torch.tensor([n for _, n in lengths])).to(device)
    cu_seqlens_k = cumulative(torch.tensor([ctx + n for ctx, n in lengths])).to(device)
    paged = paged_cache(keys, values, cu_seqlens_k, PAGE, page_layout)
    wanted = model.sinks if sinks is None else sinks
    logits = torch.randn(model.num_heads_q, device=device) if wanted else None
    return Prompt(lengths, q, keys, values, logits, paged, cu_seqlens_q, cu_seqlens_k)


def prefill(prompt: Prompt, window: tuple[int, int] | None) -> torch.Tensor:
    paged = prompt.paged
    return prefix_prefill(
        prompt.q, None, None, paged.k_cache, paged.v_cache, paged.block_table, prompt.cu_seqlens_q, paged.seqlens_k,
        max_seqlen_q=prompt.max_seqlen_q, window=window, sinks=prompt.sinks,
    )  # fmt: skip


def sampled(rows: int) -> torch.Tensor:
    """The first, the last and some between."""
    return torch.cat([torch.tensor([0, rows - 1]), torch.randint(rows, (SAMPLE - 2,))]).unique()


def exact(
    prompt: Prompt,
    window: tuple[int, int] | None,
    rows: torch.Tensor | None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """These rows, or all, in float64 unless told otherwise."""
    return attention(
        prompt.q, prompt.keys, prompt.values, cu_seqlens_q=prompt.cu_seqlens_q, cu_seqlens_k=prompt.cu_seqlens_k,
        causal=True, window=window, sinks=prompt.sinks, rows=rows, compute_dtype=compute_dtype,
    ).out  # fmt: skip


def merged(
    parts: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], compute_dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    from kernel_reference.attention import merge_attention_states as reference

    return reference(parts[0], weights[0], parts[1], weights[1], compute_dtype=compute_dtype).out
