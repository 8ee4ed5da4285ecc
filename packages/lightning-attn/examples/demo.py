"""What the demo runs for lightning-attn: MiniMax-01's 64 heads, a prompt of 8192 tokens and 32 more decoded from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator

import torch

from kernel_reference.bench.demo import INTERPRETED_KERNEL, Row, median_ms, plain_ms, ran_on, shown
from kernel_reference.models import MINIMAX_01, LinearAttention
from kernel_reference.recurrence import linear_attention_chunked
from lightning_attn import lightning_attention, lightning_decode, slopes

PROMPT, NEW = 8192, 32
PROMPT_ON_CPU = 1024
LIMIT = torch.finfo(torch.bfloat16).eps


def real_size(device: torch.device) -> Iterator[Row]:
    """A prompt in one call, then token by token from the state it leaves: GPU kernels or the CPU implementation."""
    model = MINIMAX_01
    on_gpu = device.type == "cuda"
    how, length = ran_on(device), PROMPT if on_gpu else PROMPT_ON_CPU
    # The first head, one a third of the way and the last: from the fastest decay to the slowest.
    heads = [0, model.num_heads // 3, model.num_heads - 1]
    note = f"error relative to the largest value; of heads {', '.join(map(str, heads))}, all tokens"
    decays = slopes(model.num_heads).to(device)
    q, k, v = _projections(model, length + NEW, device)
    prompt = [x[:, :, :length] for x in (q, k, v)]
    exact, _ = _oracle([x[:, heads] for x in (q, k, v)], decays[heads])

    out, kv = lightning_attention(*prompt, decays)
    duration = median_ms(lambda: lightning_attention(*prompt, decays), device, 5 if on_gpu else 1, "prefill")
    error = _error(out[:, heads], exact[:, :, :length])
    plain = plain_ms(lambda: _oracle(prompt, decays, torch.float32), device)
    shape = f"{model.name}, {length} tokens, bfloat16"
    remark = "" if on_gpu else f"; {PROMPT} tokens on a GPU"
    yield Row("lightning_attention", *how, shape, error, duration, note + remark, limit=LIMIT, plain_ms=plain)

    pool, slots = kv[:, :, -1].clone(), torch.zeros(1, dtype=torch.int32, device=device)
    steps = [[x[:, :, t] for x in (q, k, v)] for t in range(length, length + NEW)]
    decoded = [lightning_decode(*step, pool, slots, decays) for step in shown(steps, "decode")]
    error = _error(torch.stack(decoded, dim=2)[:, heads], exact[:, :, length:])
    duration = median_ms(lambda: lightning_decode(*steps[-1], pool, slots, decays), device, 5, "decode again")
    shape = f"{model.name}, {NEW} tokens after those, one a call, bfloat16"
    yield Row("lightning_decode", *how, shape, error, duration, note, limit=LIMIT)


def interpreted() -> Iterator[Row]:
    """The kernels themselves at a small size, in Triton's interpreter, launched as they would be on a GPU."""
    from lightning_attn import arguments, launch
    from lightning_attn.plan import DeviceLimits, Heads, plan_decode, plan_prefill
    from lightning_attn.tensors import Attention, Decode

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
    tensors = Attention(*prompt, decays, None, out, kv)
    problem = arguments.check_attention(tensors, 1.0)
    run = launch.prepare_attention(problem, plan_prefill(heads, "bfloat16", a_gpu), tensors)
    run(tensors)
    duration = median_ms(lambda: run(tensors), device, 2, "prefill, interpreted")
    error = _error(out, exact[:, :, :tokens])
    shape = f"{model.name}, {tokens} tokens, bfloat16"
    yield Row("lightning_attention", INTERPRETED_KERNEL, "cpu", shape, error, duration, note, limit=LIMIT)

    pool, slots = kv[:, :, -1].clone(), torch.zeros(1, dtype=torch.int32)
    decoded = torch.empty_like(v[:, :, :new])
    times = []
    for t in shown(range(new), "decode, interpreted"):
        step = Decode(*(x[:, :, tokens + t] for x in (q, k, v)), pool, slots, decays, decoded[:, :, t])
        decode = launch.prepare_decode(arguments.check_decode(step, 1.0), plan_decode(heads, a_gpu), step)
        started = time.perf_counter()
        decode(step)
        times.append(1e3 * (time.perf_counter() - started))
    error = _error(decoded, exact[:, :, tokens:])
    shape = f"{model.name}, {new} tokens after those, one a call, bfloat16"
    yield Row("lightning_decode", INTERPRETED_KERNEL, "cpu", shape, error, statistics.median(times), note, limit=LIMIT)


def _projections(model: LinearAttention, tokens: int, device: torch.device) -> list[torch.Tensor]:
    """q, k, v [1, heads, tokens, elements]."""
    sizes = (model.head_qk, model.head_qk, model.head_v)
    return [torch.randn(1, model.num_heads, tokens, size, device=device).to(torch.bfloat16) for size in sizes]


def _oracle(
    qkv: Iterable[torch.Tensor], decays: torch.Tensor, compute_dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [1, heads, tokens, elements] and states, in float64 unless told otherwise."""
    out, state = linear_attention_chunked(*(x[0].transpose(0, 1) for x in qkv), decays, compute_dtype=compute_dtype)
    return out.transpose(0, 1)[None], state


def _error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference of a head from float64, over its largest value; of the worst head."""
    difference, size = ((x[0].flatten(1).abs().amax(1)) for x in (out.double() - exact, exact))
    return float((difference / size).max())
