"""What parallel.py is timed beside, where it imports: torch's context_parallel, and a ring of FlashAttention-3.

Layouts are those of ours: of 2 x world runs of the tokens a rank has the r-th and the r-th from behind.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import distributed

from kernel_reference.bench.ranks import Call
from prefix_prefill import merge_attention_states

Tensor = torch.Tensor


def prefill(
    own: tuple[Tensor, ...], whole: tuple[Tensor, ...], rows: Tensor, scale: float, device: torch.device
) -> Mapping[str, Call]:
    """Calls by label. own: q, k, v of this rank [rows, heads, D]; whole: of all tokens."""
    if device.type != "cuda":
        return {}
    calls = {}
    if importlib.util.find_spec("vllm") is not None:
        calls["FA3, one GPU"] = Call(lambda: attend(*whole, scale, causal=True)[0], part=True)
        calls["FA3, ring"] = Call(lambda: ring(*own, scale), lambda out: out[rows])
    for backend in ("cuDNN", "flash"):
        calls[f"torch context_parallel, {backend}"] = Call(of_torch(own, scale, backend, device), lambda out: out[rows])
    return calls


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """FlashAttention-3 as vLLM ships it, one sequence: out [rows, heads, D] and lse [heads, rows]."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    bounds = [_bounds(len(x), q.device) for x in (q, k)]
    out, lse, *_ = flash_attn_varlen_func(
        q, k, v, len(q), bounds[0], len(k), bounds[1], softmax_scale=scale, causal=causal, return_softmax_lse=True,
        fa_version=3,
    )  # fmt: skip
    return out, lse


@lru_cache
def _bounds(rows: int, device: torch.device) -> Tensor:
    return torch.tensor([0, rows], dtype=torch.int32, device=device)


def ring(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Ring attention (arXiv 2310.01889) in zigzag order: keys travel while those that are here are attended to."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    half = len(q) // 2
    own = torch.stack([k, v])
    result = None
    for step in range(world):
        coming = torch.empty_like(own)
        works = []
        if step + 1 < world:
            sent = distributed.P2POp(distributed.isend, own, (rank + 1) % world)
            received = distributed.P2POp(distributed.irecv, coming, (rank - 1) % world)
            works = distributed.batch_isend_irecv([sent, received])
        peer = (rank - step) % world
        if result is None:
            result = attend(q, *own.unbind(), scale, causal=True)
        elif peer < rank:
            # Its first run lies before both of this rank's, its second one behind them.
            found = attend(q, *own[:, :half].unbind(), scale, causal=False)
            result = tuple(merge_attention_states(*result, *found))
        else:
            # Both of its runs lie between this rank's two.
            found = attend(q[half:], *own.unbind(), scale, causal=False)
            late = merge_attention_states(result[0][half:], result[1][:, half:].contiguous(), *found)
            result = torch.cat([result[0][:half], late.out]), torch.cat([result[1][:, :half], late.lse], 1)
        for work in works:
            work.wait()
        own = coming
    return result[0]  # type: ignore[index]


def of_torch(own: tuple[Tensor, ...], scale: float, backend: str, device: torch.device) -> Callable[[], Tensor]:
    """torch's context_parallel over scaled_dot_product_attention, balanced; it takes keys of as many heads as q has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import attention, functional

    world = distributed.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    heads = own[0].shape[1]
    q, k, v = (x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)[None].contiguous() for x in own)
    kind = {"cuDNN": attention.SDPBackend.CUDNN_ATTENTION, "flash": attention.SDPBackend.FLASH_ATTENTION}[backend]

    def run() -> Tensor:
        # It cuts its buffers in place; q, k and v are cut already.
        buffer = torch.empty(2 * world, device=device)
        how = {"buffers": [buffer], "buffer_seq_dims": [0], "no_restore_buffers": {buffer}}
        with attention.sdpa_kernel(kind), context_parallel(mesh, **how):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return out[0].transpose(0, 1)

    return run
