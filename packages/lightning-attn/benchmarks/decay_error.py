"""How far outputs are from the recurrence, token by token: lightning-attn and the kernel that engines use today.

``python packages/lightning-attn/benchmarks/decay_error.py`` measures where there is a GPU and vLLM, and writes
decay-error.json and decay-error.svg into benchmarks/results; elsewhere it draws the SVG anew from that JSON. Inputs are
bfloat16 values, so that all implementations see the same ones whatever dtype they take.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kernel_reference.bench import machine, picture
from kernel_reference.models import MINIMAX_01
from kernel_reference.recurrence import linear_attention
from lightning_attn import lightning_attention, slopes

Tensor = torch.Tensor
# q, k, v [batch, heads, tokens, elements], decays [heads], state [batch, heads, D, E] or None -> outputs.
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]

RESULTS = Path(__file__).parent / "results"
TOKENS = 600
# The carried state is that of so many tokens before.
CARRIED = 256
# Sequences over which an error is averaged; one alone is too noisy a line.
SEQUENCES = 8
OURS, OURS_BF16 = "lightning-attn, float32", "lightning-attn, bfloat16"
FASTEST, ALL = "fastest head", "all heads"


def implementations(peer: str) -> dict[str, Attention]:
    """Ours and vLLM's prefill, which gets float32 as its layer passes it. ImportError where there is no vLLM."""
    from vllm.model_executor.layers.lightning_attn import lightning_attention as theirs

    return {**ours(), f"{peer}, float32": lambda q, k, v, s, state: theirs(q, k, v, s, 256, state)[0]}


def ours() -> dict[str, Attention]:
    def in_bfloat16(q: Tensor, k: Tensor, v: Tensor, s: Tensor, state: Tensor | None) -> Tensor:
        return lightning_attention(*(x.bfloat16() for x in (q, k, v)), s, kv_history=state).out

    return {
        OURS: lambda q, k, v, s, state: lightning_attention(q, k, v, s, kv_history=state).out,
        OURS_BF16: in_bfloat16,
    }


def measure(
    implementations: Mapping[str, Attention], device: torch.device, *, heads: int, head_size: int, sequences: int
) -> list[dict[str, Any]]:
    """A curve for each implementation, without and with a carried state.

    An error is the root mean square over sequences and elements, of the difference from the float64 recurrence over
    that of the recurrence's outputs at the same position.
    """
    torch.manual_seed(0)
    s = slopes(heads).to(device)
    # [sequences, heads, tokens, elements]
    before, now = (
        [torch.randn(sequences, heads, n, head_size, device=device).bfloat16().float() for _ in range(3)]
        for n in (CARRIED, TOKENS)
    )
    curves = []
    for state in (None, recurrence(*before, s, None)[1].float()):
        exact = recurrence(*now, s, state)[0]
        size = exact.square().mean((0, 3)).sqrt()  # [heads, tokens]
        for name, attention in implementations.items():
            # A copy, for kernels that advance the state in place.
            out = attention(*now, s, None if state is None else state.clone())
            error = (out.double() - exact).square().mean((0, 3)).sqrt() / size
            if not bool(error.isfinite().all()):
                raise ArithmeticError(f"{name} returned values that are not finite")
            curves.append(
                {
                    "implementation": name,
                    "ours": name in (OURS, OURS_BF16),
                    "carried_state": state is not None,
                    # Rates begin with the fastest decay.
                    FASTEST: shortened(error[0]),
                    ALL: shortened(error.square().mean(0).sqrt()),
                    "worst_position_by_head": shortened(error.amax(1)),
                }
            )
    return curves


def recurrence(q: Tensor, k: Tensor, v: Tensor, s: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs [sequences, heads, tokens, elements] and states, token by token in float64."""
    sequences, _, tokens, _ = q.shape
    ends = torch.arange(sequences + 1, device=q.device) * tokens
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out, final = linear_attention(*packed, s, cu_seqlens=ends, initial_state=state)
    return out.unflatten(0, (sequences, tokens)).transpose(1, 2), final


def shortened(values: Tensor) -> list[float]:
    return [float(f"{value:.3e}") for value in values.tolist()]


def record(curves: Sequence[Mapping[str, Any]], described: machine.Machine, commit: str | None) -> dict[str, Any]:
    """The JSON: what was measured, on which machine, with which versions, when, and the curves."""
    return {
        "error": "root mean square of the difference from the float64 recurrence over that of its outputs, by position",
        "package_version": machine.package_of(Path(__file__))[1],
        "heads": MINIMAX_01.num_heads,
        "head_size": MINIMAX_01.head_qk,
        "slopes": shortened(slopes(MINIMAX_01.num_heads)),
        "tokens": TOKENS,
        "tokens_before_the_carried_state": CARRIED,
        "sequences": SEQUENCES,
        **asdict(described),
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "curves": list(curves),
    }


def as_text(found: Mapping[str, Any]) -> str:
    """JSON that reads well: a line for each list of numbers, however long."""
    flat = re.sub(r"\[([^\[\]{}]*)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", json.dumps(found, indent=1))
    return flat + "\n"


def draw(found: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Two panels, without and with a carried state; equal JSON gives equal bytes."""
    with picture.settings():
        picture.save(_figure(found), path)


def _figure(found: Mapping[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.4))
    left, right = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.075, right=0.985, top=0.76, bottom=0.235, wspace=0.05)
    panels = ((left, False, "a call without a state"), (right, True, "a call that goes on from a carried state"))
    for axes, carried, title in panels:
        curves = [curve for curve in found["curves"] if curve["carried_state"] is carried]
        colours = iter(picture.OURS)
        for curve in curves:
            colour = next(colours) if curve["ours"] else picture.PEERS[0]
            # Ours lies on top: where both are right, the line that is hidden is the other's.
            line = {"color": colour, "linewidth": 1.2, "zorder": 3 if curve["ours"] else 2}
            axes.plot(curve[FASTEST], label=f"{curve['implementation']}: {FASTEST}", **line)
            if not curve["ours"]:
                label = f"{curve['implementation']}: {ALL}, root mean square"
                axes.plot(curve[ALL], label=label, linestyle=(0, (4, 2)), **line)
        axes.set_title(title, loc="left", size=9, weight="bold", color=picture.INK)
        axes.set_yscale("log")
        axes.set_xlim(0, found["tokens"] - 1)
        axes.set_xticks(range(0, found["tokens"], 128))
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("bottom", "left"):
            axes.spines[side].set_color(picture.FAINT)
        axes.tick_params(which="both", colors=picture.FAINT)
        axes.set_xlabel("position in the call", color=picture.FAINT)
    left.set_ylabel("error of the output", color=picture.FAINT)
    lines, labels = left.get_legend_handles_labels()
    figure.legend(lines, labels, loc="lower center", ncols=2, frameon=False, fontsize=8, labelcolor=picture.INK)
    figure.text(0.02, 0.93, "Error against the recurrence, by position", size=13, weight="bold", color=picture.INK)
    words = (
        f"{found['heads']} heads of {found['head_size']}, decay rates {found['slopes'][0]:.2g} (the fastest head) to "
        f"{found['slopes'][-1]:.2g}; {found['device']}, driver {found['driver']}, torch {found['torch']}, "
        f"triton {found['triton']}, {found['date'][:10]}"
    )
    figure.text(0.02, 0.88, words, size=8, color=picture.FAINT)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="for the JSON and the SVG")
    parser.add_argument("--peer", default="", metavar="NAME", help="the peer in words where vLLM's version is unknown")
    parser.add_argument("--commit", help="the commit to record where the sources are no git checkout")
    chosen = parser.parse_args()
    data = chosen.out / "decay-error.json"
    try:
        found = measured_here(chosen.peer, chosen.commit)
    except LookupError as error:
        if not data.is_file():
            print(f"decay_error: {error}, and there is no {data} to draw", file=sys.stderr)
            return 2
        print(f"{error}: drawing what {data} holds")
        found = json.loads(data.read_text(encoding="utf-8"))
    else:
        chosen.out.mkdir(parents=True, exist_ok=True)
        data.write_text(as_text(found), encoding="utf-8")
        print(f"wrote {data}")
    for curve in found["curves"]:
        state = "carried state" if curve["carried_state"] else "no state"
        worst = ", ".join(f"{name} {max(curve[name]):.1e}" for name in (FASTEST, ALL))
        print(f"{curve['implementation']}, {state}: largest error {worst}")
    draw(found, data.with_suffix(".svg"))
    print(f"wrote {data.with_suffix('.svg')}")
    return 0


def measured_here(peer: str, commit: str | None) -> dict[str, Any]:
    """The record of this machine. LookupError where it has no GPU or no vLLM."""
    if not torch.cuda.is_available():
        raise LookupError("no GPU here")
    try:
        compared = implementations(peer or vllm_version())
    except ImportError as error:
        raise LookupError(f"no vLLM here ({error})") from None
    device = torch.device("cuda", torch.cuda.current_device())
    model = MINIMAX_01
    curves = measure(compared, device, heads=model.num_heads, head_size=model.head_qk, sequences=SEQUENCES)
    return record(curves, machine.describe(device), commit or machine.commit_of(Path(__file__).parent))


def vllm_version() -> str:
    try:
        return f"vLLM {importlib.metadata.version('vllm')}"
    except importlib.metadata.PackageNotFoundError:
        return "vLLM"


if __name__ == "__main__":
    sys.exit(main())
