"""What training and prefill on several GPUs are timed on, beside one GPU.

From the package's folder: ``torchrun --nproc-per-node 2 benchmarks/parallel.py --out benchmarks/results``

MiniMax-01's heads, one sequence of 131072 and of 1048576 tokens: forward, and forward and backward. fla's pass over a
rank's own tokens runs twice beside ours, which is what context parallelism costs where a state is made by a whole pass
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import distributed

from kernel_reference.bench.ranks import ONE, Call, RanksCase, main
from kernel_reference.models import MINIMAX_01
from kernel_reference.sharding import Contiguous
from lightning_attn import lightning_attention, slopes
from lightning_attn.parallel import lightning_attention_cp

Tensor = torch.Tensor
# A layer in the middle: slow heads remember more than a rank has.
LAYERS = {"first layer": (0, 80), "middle layer": (40, 80)}


def make(
    tokens: int, layer: str, backward: bool, heads: int, device: torch.device, rank: int, world: int
) -> Mapping[str, Call]:
    """One sequence; the same values on every rank."""
    torch.manual_seed(0)
    size = MINIMAX_01.head_qk
    whole = [torch.randn(1, heads, tokens, size, device=device, dtype=torch.bfloat16) for _ in range(3)]
    rates = slopes(MINIMAX_01.num_heads, *LAYERS[layer])[-heads:].to(device)
    rows = Contiguous(world, rank).tokens(tokens)
    own_rows = slice(int(rows[0]), int(rows[-1]) + 1)
    own = [x[:, :, own_rows] for x in whole]
    group = distributed.group.WORLD

    def timed(attend: Callable[..., Tensor], given: list[Tensor]) -> Callable[[], Tensor]:
        """The outputs, or the gradient of q: as large, and made last."""
        if not backward:
            return lambda: attend(*given)
        leaves = [x.detach().requires_grad_() for x in given]
        cotangent = given[0].detach()

        def run() -> Tensor:
            return torch.autograd.grad(attend(*leaves), leaves, cotangent)[0]

        return run

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lightning_attention(q, k, v, rates).out

    def shared(exact: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lightning_attention_cp(q, k, v, rates, group=group, exact=exact).out

    calls = {ONE: Call(timed(plain, whole))}
    for label, exact in (("context parallel", False), ("context parallel, exact", True)):
        calls[label] = Call(timed(partial(shared, exact), own), lambda out: out[:, :, own_rows])
    two_passes = fla_twice(own, rates, backward)
    if two_passes is not None:
        # Only timed: its result is that of a rank's own tokens alone.
        result = timed(plain, whole)()[:, :, own_rows].detach().clone()

        def run() -> Tensor:
            two_passes()
            return result

        calls["fla, two passes"] = Call(run, lambda out: out[:, :, own_rows])
    return calls


def fla_twice(own: list[Tensor], rates: Tensor, backward: bool) -> Callable[[], Any] | None:
    """fla's pass over a rank's tokens, in its own layout, twice; None where there is none."""
    if own[0].device.type != "cuda":
        return None
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return None
    q, k, v = (x.transpose(1, 2).contiguous().requires_grad_(backward) for x in own)
    decays = -rates

    def run() -> None:
        for _ in range(2):
            out, _ = chunk_simple_gla(q, k, v, g_gamma=decays, scale=1.0, output_final_state=True)
            if backward:
                torch.autograd.grad(out, [q, k, v], out.detach())

    return run


def cases(dry: bool) -> Iterator[RanksCase]:
    """Forward, then forward and backward."""
    heads = 2 if dry else MINIMAX_01.num_heads
    for tokens in (400,) if dry else (2**17, 2**20):
        for layer in LAYERS:
            for backward in (False, True):
                name = f"{'forward and backward' if backward else 'forward'} {tokens}, {layer}"
                owed = 0.95 if backward else 0.9
                # What one GPU holds: with gradients, half of the heads of a million tokens.
                own_heads = heads // 2 if backward and tokens > 2**17 else heads
                yield RanksCase(
                    name=name, shape={"tokens": tokens, "heads": own_heads, "layer": layer},
                    make=partial(make, tokens, layer, backward, own_heads),
                    efficiency={} if dry else {"context parallel": owed},
                )  # fmt: skip
    if not dry:
        # Where is one GPU faster?
        for tokens in (2**12, 2**13, 2**14, 2**15, 2**16):
            yield RanksCase(
                name=f"forward {tokens}, first layer", shape={"tokens": tokens, "heads": heads, "layer": "first layer"},
                make=partial(make, tokens, "first layer", False, heads),
            )  # fmt: skip


if __name__ == "__main__":
    main(cases)
