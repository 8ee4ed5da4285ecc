"""What training and prefill on several GPUs are timed on, beside one GPU.

From the package's folder: ``torchrun --nproc-per-node 2 benchmarks/parallel.py --out benchmarks/results``

MiniMax-01's heads, as many as one GPU holds with all that is compared, one sequence of 131072 and of 1048576 tokens:
forward, and forward and backward. fla's pass over a rank's own tokens runs twice beside ours, which is what context
parallelism costs where a state is made by a whole pass first. A rank's share of larger worlds runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import distributed

from kernel_reference.bench.ranks import ONE, Call, RanksCase, main, memory_bytes
from kernel_reference.models import MINIMAX_01
from kernel_reference.sharding import Contiguous
from lightning_attn import lightning_attention, slopes
from lightning_attn.parallel import lightning_attention_cp

Tensor = torch.Tensor
# A layer in the middle: slow heads remember more than a rank has.
LAYERS = {"first layer": (0, 80), "middle layer": (40, 80)}
WORLDS = (2, 4, 8)
# Tensors of all tokens that a case holds at once: inputs, results, what is compared, and fla's copies and states; with
# gradients also these.
HELD, HELD_BACKWARD = 8, 11


def make(
    tokens: int, layer: str, backward: bool, heads: int, with_fla: bool, device: torch.device, rank: int, world: int
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

    def shared(how: Mapping[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lightning_attention_cp(q, k, v, rates, group=group, **how).out

    # A state and the length, and its gradient.
    of_state = 4 * heads * size * size
    sends = {w: (w - 1) * (of_state + (4 if w > 2 else 0) + (of_state if backward else 0)) for w in WORLDS}
    calls = {ONE: Call(timed(plain, whole))}
    ways: dict[str, dict[str, Any]] = {"context parallel": {}, "context parallel, exact": {"exact": True}}
    if device.type == "cuda":
        ways["context parallel, symmetric"] = {"exchange": "symmetric"}
    for label, how in ways.items():
        calls[label] = Call(timed(partial(shared, how), own), lambda out: out[:, :, own_rows], sends=sends)
    two_passes = fla_twice(own, rates, backward) if with_fla else None
    if two_passes is not None:
        # Only timed: its result is that of a rank's own tokens alone.
        calls["fla, two passes"] = Call(two_passes, checked=False)
    for w in WORLDS:
        calls[f"share of {w}"] = Call(timed(plain, [x[:, :, : tokens // w] for x in whole]), share=w)
    return calls


def heads_of(tokens: int, backward: bool, dry: bool) -> int:
    """As many as fit, of MiniMax-01's."""
    of_head = tokens * MINIMAX_01.head_qk * 2 * (HELD_BACKWARD if backward else HELD)
    most = min(2 if dry else MINIMAX_01.num_heads, int(0.9 * memory_bytes(dry)) // of_head)
    return 1 << (max(1, most).bit_length() - 1)


def fla_twice(own: list[Tensor], rates: Tensor, backward: bool) -> Callable[[], Tensor] | None:
    """fla's pass over a rank's tokens, in its own layout, twice; None where there is none."""
    if own[0].device.type != "cuda":
        return None
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return None
    q, k, v = (x.transpose(1, 2).contiguous().requires_grad_(backward) for x in own)
    decays = -rates

    def run() -> Tensor:
        for _ in range(2):
            out, _ = chunk_simple_gla(q, k, v, g_gamma=decays, scale=1.0, output_final_state=True)
            if backward:
                torch.autograd.grad(out, [q, k, v], out.detach())
        return out.detach()  # type: ignore[no-any-return]

    return run


def cases(dry: bool) -> Iterator[RanksCase]:
    """Forward, and forward and backward; then from which length on several GPUs are faster."""
    points = [(tokens, layer, backward) for layer in LAYERS for tokens in (2**17, 2**20) for backward in (False, True)]
    shorter = [(2**n, "first layer", backward) for backward in (False, True) for n in range(16, 10, -1)]
    if dry:
        points, shorter = [(400, layer, backward) for layer in LAYERS for backward in (False, True)], []
    for ahead, some in ((True, [*points, *shorter]), (False, shorter)):
        for tokens, layer, backward in some:
            passes = "forward and backward" if backward else "forward"
            heads = heads_of(tokens, backward, dry)
            labels = ("context parallel", "context parallel, symmetric")
            targets = dict.fromkeys(() if dry or tokens < 2**17 else labels, 0.95 if backward else 0.9)
            with_fla = bool(targets) and layer == "first layer" and not backward
            yield RanksCase(
                name=f"{passes} {tokens}, {layer}" + ("" if ahead else ", on an idle GPU"), ahead=ahead,
                shape={"tokens": tokens, "heads": heads, "layer": layer, "passes": passes},
                make=partial(make, tokens, layer, backward, heads, with_fla),
                efficiency=targets, axis="tokens",
            )  # fmt: skip
    if not dry:
        # fla tries configurations of its backward pass for a minute.
        heads = heads_of(2**17, True, dry)
        yield RanksCase(
            name=f"forward and backward {2**17}, first layer, beside fla", ahead=True,
            shape={"tokens": 2**17, "heads": heads, "layer": "first layer", "passes": "both, beside fla"},
            make=partial(make, 2**17, "first layer", True, heads, True),
        )  # fmt: skip


if __name__ == "__main__":
    main(cases)
