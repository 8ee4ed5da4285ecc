"""What came out of a server's day: step times, what was compiled and allocated, errors; as a table and a picture."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from kernel_reference.bench.table import Table, duration

# A mean error of the last quarter of judged steps this many times that of the first is a drift.
DRIFT = 1.5


@dataclass
class Served:
    """One implementation of a layer over a whole run.

    decode_us, mixed_us: device time of each step in which all rows decode, and of the others. host_us: host time of
    each eager call. compiled: kernels that were compiled once the warm-up was over. errors: of judged steps, in units
    of what is allowed. step_bytes: the most that a call allocated beyond what was there before it. kept_bytes: what
    calls allocated and nobody gave back, once their results were let go.
    """

    layer: str
    implementation: str
    ours: bool
    decode_us: list[float] = field(default_factory=list)
    mixed_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    step_bytes: int = 0
    kept_bytes: int = 0

    @property
    def drifts(self) -> bool:
        """Whether errors grow from the first quarter of judged steps to the last; not asked of fewer than 8.

        By more than chance makes of few steps: three standard errors of the difference too.
        """
        quarter = len(self.errors) // 4
        if quarter < 2:
            return False
        first, last = self.errors[:quarter], self.errors[-quarter:]
        chance = math.sqrt((statistics.variance(first) + statistics.variance(last)) / quarter)
        before, after = statistics.mean(first), statistics.mean(last)
        return after > DRIFT * before and after - before > 3 * chance

    @property
    def worst(self) -> float:
        """The largest error of judged steps, NaN where one is; 0 of none."""
        return max(self.errors, default=0.0, key=lambda error: float("inf") if math.isnan(error) else error)

    def failures(self) -> list[str]:
        """What a server's owner would not accept, in words."""
        found = []
        if not self.worst <= 1:
            found.append(f"error {self.worst:.3g} of what is allowed")
        if self.drifts:
            found.append("errors grow")
        if self.compiled:
            found.append(f"{len(self.compiled)} kernels compiled after the warm-up: {', '.join(self.compiled[:3])}")
        if self.kept_bytes > 0:
            found.append(f"{self.kept_bytes} bytes are kept by calls that are over")
        return [f"{self.layer}, {self.implementation}: {what}" for what in found]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed; NaN of none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


def summary(served: Served) -> dict[str, object]:
    """The numbers of one implementation, for a record."""
    times = {
        f"{kind}_{name}_us": round(quantile(values, share), 3)
        for kind, values in (("decode", served.decode_us), ("mixed", served.mixed_us), ("host", served.host_us))
        if values
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {
        "layer": served.layer,
        "implementation": served.implementation,
        "decode_steps": len(served.decode_us),
        "mixed_steps": len(served.mixed_us),
        **times,
        "compiled": len(served.compiled),
        "judged": len(served.errors),
        "largest_error": served.worst,
        "drifts": served.drifts,
        "step_bytes": served.step_bytes,
        "kept_bytes": served.kept_bytes,
    }


def table(served: Sequence[Served], caption: str) -> Table:
    """One row for each implementation, a section for each layer."""
    right = (
        "decode p50", "decode p99", "mixed p50", "mixed p99", "host p50", "compiled", "error / allowed", "MB a step",
    )  # fmt: skip
    shown = Table("a server's day", ("layer", "implementation", *right), right=frozenset(right), caption=caption)
    for layer in dict.fromkeys(one.layer for one in served):
        shown.sections.append(
            [
                (
                    layer, one.implementation,
                    *(
                        duration(quantile(values, share)) if values else "-"
                        for values in (one.decode_us, one.mixed_us)
                        for share in (0.5, 0.99)
                    ),
                    duration(quantile(one.host_us, 0.5)) if one.host_us else "-",
                    str(len(one.compiled)),
                    f"{one.worst:.2f}" if one.errors else "-",
                    f"{one.step_bytes / 1e6:.2f}",
                )
                for one in served
                if one.layer == layer
            ]
        )  # fmt: skip
    return shown


def draw(served: Sequence[Served], path: str | os.PathLike[str]) -> None:
    """For each layer and kind of step: which share of steps takes at most so long. Equal numbers give equal bytes."""
    from matplotlib.figure import Figure

    from kernel_reference.bench import picture

    kinds = ("decode", "mixed")
    layers = list(dict.fromkeys(one.layer for one in served))
    with picture.settings():
        figure = Figure(figsize=(9.6, 2.6 * len(layers)), layout="constrained")
        grid = figure.subplots(len(layers), 2, squeeze=False)
        for line, layer in zip(grid, layers, strict=True):
            own, others = iter(picture.OURS), iter(picture.PEERS)
            # One colour for an implementation in both pictures of its layer.
            colours = {one.implementation: next(own if one.ours else others) for one in served if one.layer == layer}
            for axes, kind in zip(line, kinds, strict=True):
                for one in served:
                    values: list[float] = sorted(getattr(one, f"{kind}_us")) if one.layer == layer else []
                    if values:
                        shares = [(i + 1) / len(values) for i in range(len(values))]
                        axes.step(
                            values, shares, where="post", color=colours[one.implementation], label=one.implementation,
                            linewidth=2 if one.ours else 1.2,
                        )  # fmt: skip
                        axes.set_xscale("log")
                words = "all rows decode" if kind == "decode" else "prompts and decoding"
                axes.set_title(f"{layer}: {words}", loc="left", fontsize=9)
                axes.set_xlabel("us a step")
                axes.set_ylabel("share of steps")
                axes.set_ylim(0, 1.02)
                axes.grid(color=picture.RULE, linewidth=0.5)
                if axes.lines:
                    axes.legend(loc="lower right", fontsize=8, frameon=False)
        picture.save(figure, path)
