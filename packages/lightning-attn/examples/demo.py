"""What the demo runs for lightning-attn: MiniMax-01's 64 heads, a prompt of 8192 tokens and 32 more decoded from it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from kernel_reference.bench.demo import CPU_IMPLEMENTATION, GPU_KERNEL, INTERPRETED_KERNEL, Row
from kernel_reference.models import MINIMAX_01, LinearAttention
from kernel_reference.recurrence import linear_attention_chunked
from lightning_attn import lightning_attention, lightning_decode, slopes

PROMPT, NEW = 8192, 32


def real_size(device: torch.device) -> Iterator[Row]:
    """A prompt in one call, then token by token from the state it leaves: GPU kernels or the CPU implementation."""
    model = MINIMAX_01
    on_gpu = device.type == "cuda"
    how = (GPU_KERNEL, torch.cuda.get_device_name(device)) if on_gpu else (CPU_IMPLEMENTATION, "cpu")
    # The first head, one a third of the way and the last: from the fastest decay to the slowest.
    heads = [0, model.num_heads // 3, model.num_heads - 1]
    note = f"error relative to the largest value; of heads {', '.join(map(str, heads))}, all tokens"
    decays = slopes(model.num_heads).to(device)
    q, k, v = _projections(model, PROMPT + NEW, device)
    prompt = [x[:, :, :PROMPT] for x in (q, k, v)]
    exact, _ = _oracle([x[:, heads] for x in (q, k, v)], decays[heads])

    out, kv = lightning_attention(*prompt, decays)
    duration = _median_ms(lambda: lightning_attention(*prompt, decays), device, 5 if on_gpu else 2, "prefill")
    error = _error(out[:, heads], exact[:, :, :PROMPT])
    yield Row("lightning_attention", *how, f"{model.name}, {PROMPT} tokens, bfloat16", error, duration, note)

    pool, slots = kv[:, :, -1].clone(), torch.zeros(1, dtype=torch.int32, device=device)
    steps = [[x[:, :, t] for x in (q, k, v)] for t in range(PROMPT, PROMPT + NEW)]
    decoded = [lightning_decode(*step, pool, slots, decays) for step in _shown(steps, "decode")]
    error = _error(torch.stack(decoded, dim=2)[:, heads], exact[:, :, PROMPT:])
    duration = _median_ms(lambda: lightning_decode(*steps[-1], pool, slots, decays), device, 5, "decode again")
    shape = f"{model.name}, {NEW} tokens after those, one a call, bfloat16"
    yield Row("lightning_decode", *how, shape, error, duration, note)


def interpreted() -> Iterator[Row]:
    """The kernels themselves at a small size, in Triton's interpreter, launched as they would be on a GPU."""
    from lightning_attn import launch
    from lightning_attn.plan import DeviceLimits, Heads, plan_decode, plan_prefill

    model = LinearAttention("2 heads of 64", 2, 64, 64)
    heads = Heads(model.num_heads, model.num_heads, model.head_qk, model.head_v)
    a_gpu = DeviceLimits(cores=132, shared_memory=227 * 1024)
    device = torch.device("cpu")
    note = "error relative to the largest value"
    tokens, new = 150, 4
    decays = torch.tensor([0.9, 0.01])
    q, k, v = _projections(model, tokens + new, device)
    exact, _ = _oracle([q, k, v], decays)

    prompt = [x[:, :, :tokens].contiguous() for x in (q, k, v)]
    out, kv = torch.empty_like(prompt[2]), torch.empty(1, model.num_heads, 1, model.head_qk, model.head_v)
    run = launch.prepare_attention(*prompt, decays, None, out, kv, 1.0, plan_prefill(heads, True, a_gpu))
    run(*prompt, decays, None, out, kv)
    duration = _median_ms(lambda: run(*prompt, decays, None, out, kv), device, 2, "prefill, interpreted")
    error = _error(out, exact[:, :, :tokens])
    shape = f"{model.name}, {tokens} tokens, bfloat16"
    yield Row("lightning_attention", INTERPRETED_KERNEL, "cpu", shape, error, duration, note)

    pool, slots = kv[:, :, -1].clone(), torch.zeros(1, dtype=torch.int32)
    decoded = torch.empty_like(v[:, :, :new])
    times = []
    for t in _shown(range(new), "decode, interpreted"):
        step = [*(x[:, :, tokens + t] for x in (q, k, v)), pool, slots, decays, decoded[:, :, t]]
        run = launch.prepare_decode(*step, 1.0, plan_decode(heads, a_gpu))
        started = time.perf_counter()
        run(*step)
        times.append(1e3 * (time.perf_counter() - started))
    error = _error(decoded, exact[:, :, tokens:])
    shape = f"{model.name}, {new} tokens after those, one a call, bfloat16"
    yield Row("lightning_decode", INTERPRETED_KERNEL, "cpu", shape, error, statistics.median(times), note)


def _projections(model: LinearAttention, tokens: int, device: torch.device) -> list[torch.Tensor]:
    """q, k, v [1, heads, tokens, elements]."""
    sizes = (model.head_qk, model.head_qk, model.head_v)
    return [torch.randn(1, model.num_heads, tokens, size, device=device).to(torch.bfloat16) for size in sizes]


def _oracle(qkv: Iterable[torch.Tensor], decays: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [1, heads, tokens, elements] and states in float64."""
    out, state = linear_attention_chunked(*(x[0].transpose(0, 1) for x in qkv), decays)
    return out.transpose(0, 1)[None], state


def _error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference of a head from float64, over its largest value; of the worst head."""
    difference, size = ((x[0].flatten(1).abs().amax(1)) for x in (out.double() - exact, exact))
    return float((difference / size).max())


def _median_ms(call: Callable[[], object], device: torch.device, repeats: int, what: str) -> float:
    """The median of ``repeats`` runs, of one call each or on a GPU of 20; whoever asks has called it before."""
    times = []
    calls = 20 if device.type == "cuda" else 1
    for _ in _shown(range(repeats), what):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - started) / calls)
    return statistics.median(times)


def _shown(items: Iterable[Any], what: str) -> Iterator[Any]:
    """``items`` with a bar of how many are done, where somebody watches."""
    items = list(items)
    for number, item in enumerate(items, start=1):
        yield item
        if sys.stderr.isatty():
            bar = ("#" * (30 * number // len(items))).ljust(30)
            print(f"\r{what} [{bar}] {number}/{len(items)}", end="\n" if number == len(items) else "", file=sys.stderr)
