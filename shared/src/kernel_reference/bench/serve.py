"""A server's day: ``python -m kernel_reference.bench.serve packages/*/benchmarks/serve.py --out DIR`` on a GPU.

A file has ``layers(setting) -> list[Layer]``: one layer of a model with its paged cache or its states, and the
implementations that compute it; and ``PAGE_SIZE`` where its pages must have another size. Steps come from
`kernel_reference.bench.server`, the same ones for every implementation: steps in which all rows decode replay a CUDA
graph of the next larger batch size, as servers do, with block tables as wide as the longest context; the others are
called eagerly. Every hundredth step is judged against float64. Reported: quantiles of step times, kernels compiled
after the warm-up, bytes that a step allocates, and that it keeps, errors, and the memory of each minute.

With ``--log FILE`` each run adds a line to the file, and its traffic is another one than that of the lines before it: a
soak in as many sittings as a machine allows. ``--alone`` leaves the peers out.

``--dry`` runs tiny layers for a few steps on a CPU, whose times mean nothing.

Exit code 0: all is well; 1: ours was wrong, drifted, compiled after the warm-up or left memory behind; 2: no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from kernel_reference.bench import machine, served
from kernel_reference.bench.compiled import compilations
from kernel_reference.bench.engines import captured
from kernel_reference.bench.minutes import Minutes, allocated
from kernel_reference.bench.run import load_module
from kernel_reference.bench.served import Served
from kernel_reference.bench.server import Limits, Row, Server, Step, first_prompts
from kernel_reference.bench.table import show
from kernel_reference.bench.traffic import KINDS, Lengths, Traffic
from kernel_reference.errors import fail

JUDGED_EACH, SAMPLED = 100, 4
# About 100 us of waiting on the device, so that a call is queued whole before it begins.
_QUEUED_CYCLES = 200_000

LIMITS = Limits(pages=65536, page_size=16, sequences=256, tokens=8192, longest=131072)
DRY = Limits(pages=64, page_size=4, sequences=4, tokens=24, longest=128)
DRY_TRAFFIC = Traffic("dry", 60.0, Lengths(12, 0.6, 60), Lengths(6, 0.5, 20), prefixes=2, prefix=9, shared=0.5)


@dataclass(frozen=True)
class Batch:
    """A step on the device, padded to as many rows and tokens as its CUDA graph has.

    each: new tokens of every row where all decode, else 0. cu_seqlens_q [rows + 1], seqlens_k [rows] (cached and new
    tokens), cached [rows], block_table [rows, columns], slots [rows] (-1: padding), kept [rows] (of the new tokens,
    those that stand): int32. places [tokens] int64: page * page_size + offset of each new token, -1: padding.
    """

    rows: tuple[Row, ...]
    number: int
    each: int
    max_seqlen_q: int
    cu_seqlens_q: torch.Tensor
    seqlens_k: torch.Tensor
    cached: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    kept: torch.Tensor
    places: torch.Tensor

    @property
    def decoding(self) -> int:
        """Rows that decode, with as many new tokens each; they stand before the others."""
        return len(self.rows) if self.each else sum(row.decodes for row in self.rows)

    @property
    def padded_rows(self) -> int:
        """Rows with the padding."""
        return len(self.seqlens_k)

    @property
    def padded_tokens(self) -> int:
        """New tokens with the padding."""
        return len(self.places)

    def range_of(self, row: int) -> slice:
        """Where the new tokens of a row lie."""
        begin = sum(r.new for r in self.rows[:row])
        return slice(begin, begin + self.rows[row].new)


Call = Callable[[Batch], torch.Tensor]
"""An implementation: the layer's result of a step, [tokens, ...]; nothing that waits for the device."""


class Layer(Protocol):
    """One layer of a model, its cache, and who computes it.

    calls: ours first; ``absent``: peers that could not be imported, and why.
    """

    name: str
    calls: Mapping[str, Call]
    absent: Mapping[str, str]

    def fill(self, batch: Batch) -> None:
        """Before each step, untimed: new tokens' inputs, their keys and values in the cache, states of rows begun."""

    def judge(self, label: str, batch: Batch, rows: Sequence[int]) -> Callable[[torch.Tensor], float | None]:
        """Before the call: what float64 says of some rows; given the result, its error in units of what is allowed.

        None where the layer has no part in these rows: as an error of 0 it would make later errors look like a drift.
        """


class Setting(NamedTuple):
    """What ``layers`` is given: device, limits, traffic, and whether sizes are to be tiny, and peers left out."""

    device: torch.device
    limits: Limits
    traffic: Traffic
    dry: bool
    alone: bool = False


def present(setting: Setting, factories: Mapping[str, Callable[[], Call]]) -> tuple[dict[str, Call], dict[str, str]]:
    """The peers that can be imported, and for the others why not; none on a CPU, where few of them run."""
    calls: dict[str, Call] = {}
    if setting.alone:
        return calls, {}
    if setting.device.type != "cuda":
        return calls, dict.fromkeys(factories, "it needs a GPU")
    absent: dict[str, str] = {}
    for label, factory in factories.items():
        try:
            calls[label] = factory()
        except ImportError as error:
            absent[label] = str(error)
    return calls, absent


def noise(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random numbers that a layer takes its inputs from, other rows in each step; see :func:`rows_of`."""
    return torch.randn((2 * shape[0] + 127, *shape[1:]), device=device).to(dtype)


def rows_of(source: torch.Tensor, number: int, rows: int) -> torch.Tensor:
    """So many rows of ``source`` for step ``number``."""
    begin = number * 37 % (len(source) - rows)
    return source[begin : begin + rows]


class Buffers:
    """The tensors that graphs read: of fixed addresses, filled anew for each step."""

    def __init__(self, setting: Setting) -> None:
        limits, device = setting.limits, setting.device
        self.limits, self.device = limits, device
        self.columns = -(-limits.longest // limits.page_size)
        pinned = device.type == "cuda"

        def pair(*shape: int, dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
            host = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
            return host, torch.zeros(shape, dtype=dtype, device=device)

        self._pairs = {
            "cu_seqlens_q": pair(limits.sequences + 1),
            "block_table": pair(limits.sequences, self.columns),
            "places": pair(limits.tokens, dtype=torch.int64),
            **{name: pair(limits.sequences) for name in ("seqlens_k", "cached", "slots", "kept")},
        }

    def load(self, rows: Sequence[Row], number: int, each: int, padded: int) -> Batch:
        """Rows as a batch of ``padded`` rows."""
        host = {name: pair[0] for name, pair in self._pairs.items()}
        tokens = padded * each or sum(row.new for row in rows)
        host["places"][:tokens] = -1
        for name in ("seqlens_k", "cached", "kept"):
            host[name][:padded] = 0
        host["slots"][:padded] = -1
        at = 0
        size = self.limits.page_size
        host["cu_seqlens_q"][0] = 0
        for i, row in enumerate(rows):
            host["seqlens_k"][i], host["cached"][i] = row.cached + row.new, row.cached
            host["slots"][i], host["kept"][i] = row.slot, row.kept
            pages = torch.tensor(row.pages, dtype=torch.int32)
            host["block_table"][i, : len(pages)] = pages
            positions = torch.arange(row.cached, row.cached + row.new)
            host["places"][at : at + row.new] = pages[positions // size].long() * size + positions % size
            at += row.new
            host["cu_seqlens_q"][i + 1] = at
        host["cu_seqlens_q"][len(rows) + 1 : padded + 1] = at
        given = {name: padded for name in self._pairs} | {"cu_seqlens_q": padded + 1, "places": tokens}
        views = {name: pair[1][: given[name]] for name, pair in self._pairs.items()}
        for name, view in views.items():
            view.copy_(host[name][: given[name]], non_blocking=True)
        longest = each or max((row.new for row in rows), default=1)
        return Batch(rows=tuple(rows), number=number, each=each, max_seqlen_q=longest, **views)


def graph_sizes(most: int) -> list[int]:
    """Batch sizes that servers capture graphs of: 1, 2, 4, and multiples of 8 that grow with the batch."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 100_000, 32)]
    return sorted({min(size, most) for size in sizes})


class Replay:
    """Layers called step by step: graphs where all rows decode, eager calls elsewhere."""

    def __init__(self, layers: Sequence[Layer], setting: Setting) -> None:
        self.layers, self.setting = layers, setting
        self.buffers = Buffers(setting)
        self.each = 1 + setting.traffic.drafts
        self.sizes = graph_sizes(setting.limits.sequences)
        self.served = [Served(layer.name, label, ours=not i) for layer in layers for i, label in enumerate(layer.calls)]
        self._graphs: dict[tuple[str, str, int], Callable[[], torch.Tensor]] = {}
        self._on_gpu = setting.device.type == "cuda"
        self._judged_each = 10 if setting.dry else JUDGED_EACH

    def warm_up(self) -> None:
        """Capture the graphs, and call everything once as steps of prompts do."""
        for layer in self.layers if self._on_gpu else ():
            for i, (label, call) in enumerate(layer.calls.items()):
                try:
                    self._capture(layer, label, call)
                except RuntimeError as error:
                    if not i:
                        raise
                    print(f"{layer.name}, {label}: no CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr)
        traffic, limits = self.setting.traffic, self.setting.limits
        # Then the first steps of the same traffic, begun anew afterwards: prompts, chunks, rows beside each other.
        for step in chain(first_prompts(traffic, limits), islice(Server(traffic, limits).steps(), 24)):
            # Judged once: float64's products have a workspace, and a library to load.
            self._run(step, step.number if step.number == 1 else None)
        for one in self.served:
            one.decode_us, one.mixed_us, one.host_us, one.errors = [], [], [], []
            one.step_bytes = one.kept_bytes = 0

    def _capture(self, layer: Layer, label: str, call: Call) -> None:
        # The largest first, whose memory the others then use.
        for size in reversed(self.sizes):
            batch = self.buffers.load((), 0, self.each, size)
            layer.fill(batch)
            self._graphs[layer.name, label, size] = captured(partial(call, batch))

    def run(self, step: Step) -> None:
        """One step of all layers; judged where its number says so."""
        self._run(step, step.number if step.number % self._judged_each == 0 else None)

    def batch_of(self, step: Step) -> Batch:
        """A step as its graph's batch where all rows decode, else as it is."""
        decodes = step.decodes
        rows = len(step.rows)
        padded = next(size for size in self.sizes if size >= rows) if decodes else rows
        return self.buffers.load(step.rows, step.number, self.each if decodes else 0, padded)

    def _run(self, step: Step, judged: int | None) -> None:
        batch = self.batch_of(step)
        found = iter(self.served)
        for layer in self.layers:
            layer.fill(batch)
            for label, call in layer.calls.items():
                one = next(found)
                check = None
                if judged is not None:
                    count = len(step.rows)
                    check = layer.judge(label, batch, sorted({judged * 7 % count, *range(min(SAMPLED - 1, count))}))
                graph = self._graphs.get((layer.name, label, batch.padded_rows)) if batch.each else None
                held = allocated(self.setting.device)
                with compilations() as compiled:
                    out = self._timed(graph or partial(call, batch), one, bool(batch.each), graph is None)
                one.compiled += compiled
                if check is not None and (error := check(out)) is not None:
                    one.errors.append(error)
                del out
                if check is None:
                    # Judging has memory of its own: float64's products have a workspace, which they keep.
                    one.kept_bytes += allocated(self.setting.device) - held

    def _timed(self, call: Callable[[], torch.Tensor], one: Served, decodes: bool, eager: bool) -> torch.Tensor:
        times = one.decode_us if decodes else one.mixed_us
        if not self._on_gpu:
            begun = time.perf_counter()
            out = call()
            times.append((time.perf_counter() - begun) * 1e6)
            return out
        before = allocated(self.setting.device)
        torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_QUEUED_CYCLES)
        begin.record()
        begun = time.perf_counter()
        out = call()
        host_us = (time.perf_counter() - begun) * 1e6
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
        if eager:
            one.host_us.append(host_us)
        one.step_bytes = max(one.step_bytes, torch.cuda.max_memory_allocated() - before)
        return out


def steps_of(server: Server, seconds: float, most: int | None) -> Iterator[Step]:
    """Steps until the time is over, with a line about where things stand every few seconds."""
    begun = said = time.monotonic()
    for step in server.steps():
        now = time.monotonic()
        if now - begun >= seconds or (most is not None and step.number >= most):
            return
        if now - said > 5:
            said = now
            words = f"{step.seconds:.0f} s of traffic, {len(step.rows)} sequences, {step.waiting} waiting"
            print(f"[{now - begun:.0f} of {seconds:.0f} s] step {step.number}: {words}", file=sys.stderr, flush=True)
        yield step


@torch.inference_mode()
def serve(
    layers: Sequence[Layer], setting: Setting, seconds: float, steps: int | None = None, seed: int = 0
) -> tuple[Replay, Minutes]:
    """A day of ``seconds``, or of so many steps; what was served, and the memory of each minute."""
    replay = Replay(layers, setting)
    replay.warm_up()
    for one in replay.served:
        one.compiled = []
    minutes = Minutes(setting.device)
    for step in steps_of(Server(setting.traffic, setting.limits, seed), seconds, steps):
        replay.run(step)
        minutes.pass_by()
    minutes.take()
    return replay, minutes


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="kernel_reference.bench.serve", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--traffic", choices=sorted(KINDS), default="chat")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each file; 1800 is a soak")
    parser.add_argument("--steps", type=int, help="at most so many")
    parser.add_argument("--out", type=Path, help="write serve.json and serve.svg there")
    parser.add_argument("--log", type=Path, help="add a line to this file; those that it has are earlier sittings")
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--commit", default="", help="said in the record")
    parser.add_argument("--dry", action="store_true", help="tiny layers on a CPU: their times mean nothing")
    chosen = parser.parse_args(arguments)
    if not chosen.dry and not torch.cuda.is_available():
        print("this needs a GPU; --dry runs without one", file=sys.stderr)
        return 2
    if not chosen.seconds > 0:
        fail("--seconds", "positive", chosen.seconds)
    traffic, limits = KINDS[chosen.traffic], LIMITS
    if chosen.dry:
        traffic, limits = replace(DRY_TRAFFIC, drafts=traffic.drafts, accepted=traffic.accepted), DRY
    device = torch.device("cpu" if chosen.dry else "cuda")
    all_served: list[Served] = []
    failures: list[str] = []
    memory: dict[str, list[dict[str, int]]] = {}
    sittings = chosen.log.read_text().splitlines() if chosen.log and chosen.log.exists() else []
    for file in chosen.files:
        torch.manual_seed(0)
        module = load_module(file, "layers(setting)")
        page_size = getattr(module, "PAGE_SIZE", limits.page_size)
        held = limits._replace(page_size=page_size, pages=limits.pages * limits.page_size // page_size)
        setting = Setting(device, limits if chosen.dry else held, traffic, chosen.dry, chosen.alone)
        layers: list[Layer] = module.layers(setting)
        for layer in layers:
            for label, why in layer.absent.items():
                print(f"{layer.name}: {label} is absent: {why}", file=sys.stderr)
        replay, minutes = serve(
            layers, setting, chosen.seconds, chosen.steps or (120 if chosen.dry else None), len(sittings)
        )
        all_served += replay.served
        memory[file.parents[1].name] = minutes.taken
        failures += [words for one in replay.served if one.ours for words in one.failures()]
        del layers, replay
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    caption = f"{traffic.name}: {limits.sequences} sequences, tables for {limits.longest} tokens"
    show(served.table(all_served, caption))
    stamp = {} if chosen.dry else asdict(machine.describe(device))
    record = {
        "traffic": asdict(traffic), "limits": limits._asdict(), "seconds": chosen.seconds, "commit": chosen.commit,
        "sitting": len(sittings), **stamp, "served": [served.summary(one) for one in all_served], "memory": memory,
        "failures": failures,
    }  # fmt: skip
    if chosen.log:
        chosen.log.parent.mkdir(parents=True, exist_ok=True)
        with chosen.log.open("a") as log:
            log.write(json.dumps(record) + "\n")
        past = [json.loads(line) for line in chosen.log.read_text().splitlines()]
        ill = sum(bool(one["failures"]) for one in past)
        print(
            f"{chosen.log}: {sum(one['seconds'] for one in past):.0f} s of each file in {len(past)} sittings, {ill} ill"
        )
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "serve.json").write_text(json.dumps(record, indent=1) + "\n")
        served.draw(all_served, chosen.out / "serve.svg")
    for words in failures:
        print(words, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
