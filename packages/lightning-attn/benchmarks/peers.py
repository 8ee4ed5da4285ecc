"""The peers that lightning-attn is timed beside, each as a function of tensors; for cases.py and map.py.

A function of this module imports its peer when it is called, and returns what calls it: where the import fails, a run
goes on without that peer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch

Tensor = torch.Tensor
Attended = tuple[Tensor, Tensor]

FLA, VLLM = "fla-core", "vLLM"
# vLLM's prefill does not follow the recurrence (see the README), and its label says so in every table and figure.
VLLM_PREFILL = "vLLM (decay off by one)"


def has_peer(name: str) -> bool:
    """Whether inputs for this peer are worth their memory."""
    return importlib.util.find_spec(name) is not None


def fla(configurations: Literal["all", "few", "one"] = "all") -> Callable[..., Attended]:
    """fla's chunk_simple_gla: q, k, v [sequences, tokens, heads, elements] and log decays; outputs and final states.

    configurations: of each kernel, see :func:`_leave_configurations`.
    """
    from fla.ops.simple_gla import chunk_simple_gla

    if configurations != "all":
        _leave_configurations(configurations)

    def call(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **more: Any) -> Attended:
        out, state = chunk_simple_gla(q, k, v, g_gamma=log_decay, scale=1.0, **more)
        return out, state

    return call


@cache
def _leave_configurations(configurations: Literal["few", "one"]) -> None:
    """Leave fla's kernels fewer configurations to choose from, or one.

    The 48 of its state kernels, tried anew for every size, dtype and kind of batch, take half a minute to compile each
    time: a map would have nothing else. Left are four warps and three stages, of all tiles, each timed for a moment; or
    of tiles of 64 alone.
    """
    from fla.ops.common.chunk_h import chunk_bwd_kernel_dh, chunk_fwd_kernel_h
    from fla.ops.common.chunk_o import chunk_bwd_kernel_dqkwg, chunk_bwd_kernel_dv, chunk_fwd_kernel_o

    of_backward = (chunk_bwd_kernel_dh, chunk_bwd_kernel_dqkwg, chunk_bwd_kernel_dv)
    for kernel in (chunk_fwd_kernel_h, chunk_fwd_kernel_o, *of_backward):
        tuner: Any = kernel
        while tuner is not None and not hasattr(tuner, "configs"):
            tuner = getattr(tuner, "fn", None)
        if tuner is None:
            continue
        tuner._do_bench = _briefly
        # What was chosen while many processes shared the device is not to be chosen again.
        tuner.cache_results = False
        if len(tuner.configs) > 4:
            few = [one for one in tuner.configs if (one.num_warps, one.num_stages) == (4, 3)]
            tuner.configs = few or tuner.configs[:4]
        if configurations == "one":
            tuner.configs = sorted(tuner.configs, key=lambda each: sum(abs(n - 64) for n in each.kwargs.values()))[:1]


def _briefly(call: Callable[[], object], quantiles: Sequence[float]) -> Any:
    from triton.testing import do_bench

    return do_bench(call, warmup=2, rep=10, quantiles=quantiles)


def vllm_prefill() -> Callable[..., Attended]:
    """vLLM's lightning_attention: q, k, v [sequences, heads, tokens, elements] in float32, as its layer gives them.

    Returns outputs [sequences, heads, tokens, elements] and final states.
    """
    from vllm.model_executor.layers.lightning_attn import lightning_attention

    def call(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, *rest: Any) -> Attended:
        out, kv = lightning_attention(q, k, v, slopes, *rest)
        return out, kv[:, :, -1]

    return call


def vllm_decode() -> Callable[..., Tensor]:
    """vLLM's linear_decode_forward_triton: q, k, v [sequences, heads, 1, elements], pool, slopes, slots."""
    from vllm.model_executor.layers.lightning_attn import linear_decode_forward_triton

    def call(q: Tensor, k: Tensor, v: Tensor, pool: Tensor, slopes: Tensor, slots: Tensor) -> Tensor:
        out: Tensor = linear_decode_forward_triton(q, k, v, pool, slopes, slots)
        return out.view(*q.shape[:2], v.shape[3])

    return call
