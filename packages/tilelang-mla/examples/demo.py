"""What the demo runs for tilelang-mla: decoding and a prompt at DeepSeek-V3's sizes, and the kernels' own text in C."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from kernel_reference.attention import attention, mla_decode
from kernel_reference.bench.demo import CPU_TARGET_KERNEL, Row, Skip, error_of_rows, median_ms, plain_ms, ran_on
from kernel_reference.models import DEEPSEEK_V3, LatentAttention
from tilelang_mla import DecodePlan, PrefillPlan, flash_mla_varlen_func, flash_mla_with_kvcache, plan_decode

DTYPE = torch.bfloat16
PAGE = 64
# Sequences that decode and the most keys of one, and tokens of a prompt; of each, where there is no GPU, fewer.
SEQUENCES, LONGEST, PROMPT = 64, 8192, 4096
SEQUENCES_ON_CPU, LONGEST_ON_CPU, PROMPT_ON_CPU = 8, 2048, 512
SAMPLE = 16
LIMIT, LIMIT_IN_C = torch.finfo(DTYPE).eps, 1e-5
NOTE = "error relative to a row's largest value"
SAMPLED = f"{NOTE}; of a sample of rows, all heads"
IN_C = f"{NOTE}; the kernel's text as C for one thread in float32"


class Batch(NamedTuple):
    """Sequences of many lengths in a paged latent cache, as the public function takes them."""

    q: torch.Tensor
    kv: torch.Tensor
    seqlens_k: torch.Tensor
    block_table: torch.Tensor


def real_size(device: torch.device) -> Iterator[Row]:
    """A token of every sequence with one GPU's heads of eight, and a prompt: GPU kernels or the CPU implementation."""
    on_gpu = device.type == "cuda"
    how = ran_on(device)
    model = DEEPSEEK_V3.tensor_parallel(8)
    scale = model.head_qk**-0.5

    sequences, longest = (SEQUENCES, LONGEST) if on_gpu else (SEQUENCES_ON_CPU, LONGEST_ON_CPU)
    batch = make_batch(model, torch.randint(1, longest + 1, (sequences,)), 1, device, DTYPE)
    plan = plan_decode(batch.seqlens_k, model.num_heads, max_seqlen_k=longest)

    def decode() -> torch.Tensor:
        out = flash_mla_with_kvcache(*batch, model.latent, scale, causal=True, plan=plan)
        return out

    error = error_of_rows(decode(), mla_decode(*batch, model.latent, softmax_scale=scale).out)
    shape = f"{model.name}, {sequences} sequences of 1 to {longest} keys, bfloat16"
    remark = "" if on_gpu else f"; {SEQUENCES} of up to {LONGEST} on a GPU"
    note = f"{NOTE}; all rows and heads{remark}"
    duration = median_ms(decode, device)
    in_float32 = {"softmax_scale": scale, "compute_dtype": torch.float32}
    plain = plain_ms(lambda: mla_decode(*batch, model.latent, **in_float32), device)
    yield Row("flash_mla_with_kvcache", *how, shape, error, duration, note, limit=LIMIT, plain_ms=plain)

    tokens = PROMPT if on_gpu else PROMPT_ON_CPU
    sizes = (model.head_qk, model.head_qk, model.head_v)
    q, k, v = (torch.randn(tokens, model.num_heads, size, device=device).to(DTYPE) for size in sizes)
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=device)

    def prefill() -> torch.Tensor:
        out = flash_mla_varlen_func(q, k, v, bounds, bounds, tokens, tokens, scale, causal=True)
        return out

    rows = torch.cat([torch.tensor([0, tokens - 1]), torch.randint(tokens, (SAMPLE - 2,))]).unique()
    wanted = attention(
        q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, softmax_scale=scale, causal=True, rows=rows
    ).out  # fmt: skip
    error = error_of_rows(prefill()[rows.to(device)], wanted)
    shape = f"{model.name}, a prompt of {tokens} tokens, bfloat16"
    remark = "" if on_gpu else f"; {PROMPT} tokens on a GPU"
    note = f"{SAMPLED}{remark}"
    duration = median_ms(prefill, device)
    packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "causal": True}
    plain = plain_ms(lambda: attention(q, k, v, **packed, **in_float32), device)
    yield Row("flash_mla_varlen_func", *how, shape, error, duration, note, limit=LIMIT, plain_ms=plain)


def interpreted() -> Iterator[Row]:
    """The kernels themselves at a small size, through TileLang's C target, launched as they would be on a GPU."""
    from tilelang_mla.kernels import c

    if not (os.environ.get("CXX") or os.environ.get("CC") or any(map(shutil.which, ("g++", "clang++", "c++")))):
        raise Skip("the kernels' text as C needs a C++ compiler, and there is no g++ or clang++ on PATH")

    device, log2_e = torch.device("cpu"), math.log2(math.e)
    model = LatentAttention("4 heads of 64 + 32", 4, 64, 32, 64, 64)
    scale = model.head_qk**-0.5

    lengths = torch.tensor([300, 65, 0, 130])
    batch = make_batch(model, lengths, 2, device, torch.float32)
    plan = plan_decode(
        batch.seqlens_k, model.num_heads, 2, num_splits=2, dim_nope=model.latent, dim_rope=model.rope
    )  # fmt: skip
    attend = c.kernel(
        "decode", dim_nope=model.latent, dim_rope=model.rope, block_n=plan.tiles.block_n,
        num_stages=plan.tiles.num_stages, gather=False,
    )  # fmt: skip
    merge = c.kernel("merge", dim_nope=model.latent)

    def decode() -> torch.Tensor:
        return decode_in_c(attend, merge, batch, model, plan, scale * log2_e)

    error = error_of_rows(decode(), mla_decode(*batch, model.latent, softmax_scale=scale).out)
    shape = f"{model.name}, 2 tokens of 4 sequences of 0 to 300 keys, in 2 parts, float32"
    yield Row(
        "flash_mla_with_kvcache",
        CPU_TARGET_KERNEL,
        "cpu",
        shape,
        error,
        median_ms(decode, device),
        IN_C,
        limit=LIMIT_IN_C,
    )

    blocks, tokens = PrefillPlan(64, 64, 2), [70, 0, 130]
    bounds = torch.tensor([0, *tokens]).cumsum(0).int()
    q, k, v = (torch.randn(sum(tokens), 4, size) for size in (model.head_qk, model.head_qk, model.head_v))
    attend_prompts = c.kernel(
        "prefill", head_dim=model.head_qk, head_dim_v=model.head_v, block_m=blocks.block_m, block_n=blocks.block_n,
        num_stages=blocks.num_stages,
    )  # fmt: skip

    def prefill() -> torch.Tensor:
        out, lse = torch.empty(sum(tokens), 4, model.head_v), torch.empty(4, sum(tokens))
        places, taken = sum(tokens) // blocks.block_m + len(tokens) + 2, torch.zeros(1, dtype=torch.int32)
        wants_lse, programs, heads_each = 1, 3, 4
        numbers = (scale * log2_e, True, places, wants_lse, programs, heads_each)
        attend_prompts(q, k, v, bounds, bounds, out, lse, taken, *numbers)
        return out

    wanted = attention(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, softmax_scale=scale, causal=True).out
    error = error_of_rows(prefill(), wanted)
    shape = f"4 heads of {model.head_qk} and {model.head_v}, prompts of 70, 0 and 130 tokens, float32"
    yield Row(
        "flash_mla_varlen_func",
        CPU_TARGET_KERNEL,
        "cpu",
        shape,
        error,
        median_ms(prefill, device),
        IN_C,
        limit=LIMIT_IN_C,
    )


def decode_in_c(
    attend: Callable[..., None], merge: Callable[..., None], batch: Batch, model: LatentAttention, plan: DecodePlan,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Both launches of a plan of several parts, as three programs would have it that share the work."""
    count, tokens, heads, width = batch.q.shape
    rows, num_parts, num_programs, rows_each, pieces = tokens * heads, plan.tiles.num_parts(count), 3, 8, 2
    out, lse = torch.empty(count, rows, model.latent), torch.empty(count, heads, tokens)
    parts, part_lse = torch.empty(num_parts, rows, model.latent), torch.empty(num_parts, rows)
    # Of a plan, no program writes where it has cut a sequence.
    unused = torch.empty(2 * count, dtype=torch.int32)
    attend(
        batch.q.view(count, rows, width), batch.kv.squeeze(2), batch.seqlens_k, batch.block_table, plan.first_part,
        plan.order, out, lse, parts, part_lse, unused, scale, heads, True, num_parts, plan.tiles.num_splits, 1, 1, 1,
        num_programs,
    )  # fmt: skip
    merge(plan.first_part, out, lse, parts, part_lse, heads, plan.tiles.num_splits, rows_each, pieces, 1, 1)
    return out.view(count, tokens, heads, model.latent)


def make_batch(
    model: LatentAttention, lengths: torch.Tensor, tokens: int, device: torch.device, dtype: torch.dtype
) -> Batch:
    """Pages in random order."""
    columns = -(-int(lengths.max()) // PAGE)
    pages = len(lengths) * columns
    block_table = torch.randperm(pages, device=device).int().view(-1, columns)
    width = model.latent + model.rope
    q = torch.randn(len(lengths), tokens, model.num_heads, width, device=device).to(dtype)
    kv = torch.randn(pages, PAGE, 1, width, device=device).to(dtype)
    return Batch(q, kv, lengths.int().to(device), block_table)
