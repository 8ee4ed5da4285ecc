"""Tokens per second of layers inside transformers, with a package's kernels in them and with its own.

``python -m kernel_reference.bench.engines packages/*/benchmarks/engines.py [--out FILE]`` on a GPU; ``--dry`` runs tiny
models on a CPU, whose times mean nothing; ``--table`` shows records again, for a README. A file has ``stacks(dry)``,
which gives a list of :class:`Stack`: models of few layers of a real one's sizes, with random weights, the same ones on
both sides, which are timed in turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernel_reference.bench.machine import commit_of, describe
from kernel_reference.bench.table import Table, duration, show, significant
from kernel_reference.errors import fail

ROUNDS, STEPS = 5, 16
# Norm of the difference of logits over that of transformers' own. Experts chosen otherwise in 16 bits move some tokens
# far; layers that are wrong move all.
_LARGEST_DIFFERENCE = 0.5

Step = Callable[[], torch.Tensor]


class Load(NamedTuple):
    """So many new tokens of each sequence, after so many in the cache; a prompt has none there."""

    sequences: int
    tokens: int = 1
    cached: int = 0


@dataclass(frozen=True)
class Stack:
    """A model's config, and how a package is put into it.

    ``layers``: of the model, said in the table. ``caches``: theirs and ours, each made from config and length. Decoding
    is timed in a CUDA graph too where ``graphs``.
    """

    name: str
    config: Any
    enable: Callable[[], AbstractContextManager[Any]]
    caches: tuple[Callable[[Any, int], Any], Callable[[Any, int], Any]]
    loads: Sequence[Load]
    layers: str
    attn_implementation: str | None = None
    graphs: bool = True
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Timing:
    """Microseconds of one step on either side, and how far apart the logits are; of a record, on which GPU."""

    stack: str
    layers: str
    sequences: int
    tokens: int
    cached: int
    graph: bool
    theirs_us: float
    ours_us: float
    difference: float
    device: str = ""

    @property
    def step(self) -> tuple[str, int, int, int, str]:
        """What an eager call and a graph of the same step have in common."""
        return self.stack, self.sequences, self.tokens, self.cached, self.device

    def rate(self, us: float) -> float:
        """Tokens per second."""
        return self.sequences * self.tokens / us * 1e6


class Sides:
    """One model, whose layers are a package's or, inside :meth:`theirs`, transformers' own."""

    def __init__(self, stack: Stack, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self.stack, self.device = stack, device
        attention = stack.attn_implementation or "sdpa"
        with stack.enable(), device:
            options = {"attn_implementation": attention, "dtype": stack.dtype}
            self.model = AutoModelForCausalLM.from_config(stack.config, **options).eval()
        self._swapped = [module for module in self.model.modules() if not _is_of_engine(type(module))]

    @contextmanager
    def side(self, ours: bool) -> Iterator[None]:
        """The model with layers of one side."""
        if ours:
            with self.stack.enable() if self.stack.attn_implementation else nullcontext():
                yield
            return
        classes = [type(module) for module in self._swapped]
        for module, own in zip(self._swapped, classes, strict=True):
            module.__class__ = next(base for base in own.__mro__ if _is_of_engine(base))
        if self.stack.attn_implementation:
            self.model.set_attn_implementation("sdpa")
        try:
            yield
        finally:
            for module, own in zip(self._swapped, classes, strict=True):
                module.__class__ = own
            if self.stack.attn_implementation:
                with self.stack.enable():
                    self.model.set_attn_implementation(self.stack.attn_implementation)

    def step(self, load: Load, ours: bool) -> tuple[Step, Callable[[], None]]:
        """A step of this load, and what takes the cache back to where it was."""
        make = self.stack.caches[ours]
        new = torch.randint(2, self.stack.config.vocab_size, (load.sequences, load.tokens), device=self.device)
        # Longer than what it holds by as many steps as are made between two rewinds; a prompt has a new one each time.
        length = -(-(load.cached + load.tokens * (STEPS + 8 if load.cached else 1)) // 128) * 128
        if not load.cached:
            return lambda: self._logits(new, make(self.stack.config, length)), lambda: None
        cache = make(self.stack.config, length)
        self._logits(new[:, :1].expand(-1, 4), cache)
        _fill(cache, load.cached)
        return lambda: self._logits(new, cache), lambda: _rewind(cache, load.cached)

    def _logits(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, past_key_values=cache, logits_to_keep=1).logits
        return logits


def _is_of_engine(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("transformers", "torch")


def _fill(cache: Any, tokens: int) -> None:
    """Random keys and values as if so many tokens had been seen, the same ones however a cache holds them."""
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue
        batch, heads, length, width = layer.keys.shape
        if not isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
            length = tokens
        both = layer.keys.new_empty((batch, heads, length, width + layer.values.shape[3])).normal_()
        keys, values = both.split((width, layer.values.shape[3]), 3)
        if length == layer.keys.shape[2]:
            layer.keys.copy_(keys)
            layer.values.copy_(values)
        else:
            layer.keys, layer.values = keys, values
        # What the indexers of MiniMax-M3 and of DeepSeek-V3.2 look through.
        for name in ("idx_keys", "indexer_keys"):
            if isinstance(getattr(layer, name, None), torch.Tensor):
                getattr(layer, name).normal_()
    _rewind(cache, tokens)


def _rewind(cache: Any, tokens: int) -> None:
    for layer in cache.layers:
        counters = ("cumulative_length", "idx_cumulative_length", "indexer_cumulative_length")
        lengths = [getattr(layer, name, None) for name in counters]
        if isinstance(lengths[0], torch.Tensor):
            for length in lengths:
                if length is not None:
                    length.fill_(tokens)
        elif getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]


def captured(step: Step) -> Step:
    """The step in a CUDA graph, which keeps what the step refers to; it has run before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    # A graph holds addresses alone: replayed without its step's tensors, it reads whatever has their memory by then.
    def replay(kept: Step = step) -> torch.Tensor:
        graph.replay()
        return result

    return replay


def step_us(step: Step, rewind: Callable[[], None], steps: int, device: torch.device) -> float:
    """Microseconds of a step, the mean of so many."""
    rewind()
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - started) * 1e6 / steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / steps


@torch.inference_mode()
def measure(stack: Stack, device: torch.device, rounds: int = ROUNDS) -> Iterator[Timing]:
    """Every load of a stack, eager and, where it decodes, in a CUDA graph."""
    sides = Sides(stack, device)
    for load in stack.loads:
        # Of several tokens transformers asks the device whether they are the first, to leave the mask out.
        may_capture = stack.graphs and load.cached and load.tokens == 1 and device.type == "cuda"
        for graph in (False, True) if may_capture else (False,):
            try:
                yield compare(sides, load, graph, rounds)
            except RuntimeError as error:
                if not graph:
                    raise
                print(f"{stack.name}, {load}: no CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)


def compare(sides: Sides, load: Load, graph: bool, rounds: int) -> Timing:
    """Both sides' step, in turns.

    Raises:
        ValueError: their logits are too far apart.
    """
    made: dict[bool, tuple[Step, Callable[[], None]]] = {}
    logits: dict[bool, torch.Tensor] = {}
    for ours in (False, True):
        torch.manual_seed(0)
        with sides.side(ours):
            step, rewind = sides.step(load, ours)
            if graph:
                step()
            made[ours] = (captured(step) if graph else step), rewind
    # Of what is timed, once both sides have their memory.
    for ours, (step, rewind) in made.items():
        with sides.side(ours):
            rewind()
            logits[ours] = step().clone()
    difference = float((logits[True] - logits[False]).norm() / logits[False].norm())
    if not difference <= _LARGEST_DIFFERENCE:
        raise ValueError(f"{sides.stack.name}, {load}: logits differ by {difference:.3f} of their norm")
    us: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for ours, (step, rewind) in made.items():
            with sides.side(ours):
                us[ours].append(step_us(step, rewind, STEPS if load.cached else 2, sides.device))
    theirs_us, ours_us = (statistics.median(us[ours]) for ours in (False, True))
    return Timing(sides.stack.name, sides.stack.layers, *load, graph, theirs_us, ours_us, difference)


def table(timings: Sequence[Timing]) -> Table:
    """As the READMEs have it."""
    right = ("transformers", "tokens/s", "ours", "tokens/s, ours", "faster", "logits differ by")
    shown = Table(
        "transformers, a step",
        ("stack", "layers", "sequences", "new", "cached", "graph", *right),
        right=frozenset(right),
    )
    for name in dict.fromkeys(timing.stack for timing in timings):
        shown.sections.append(
            [
                (
                    t.stack, t.layers, str(t.sequences), str(t.tokens), str(t.cached), "yes" if t.graph else "no",
                    duration(t.theirs_us), significant(t.rate(t.theirs_us)), duration(t.ours_us),
                    significant(t.rate(t.ours_us)), f"{t.theirs_us / t.ours_us:.2f}", f"{t.difference:.1e}",
                )
                for t in timings
                if t.stack == name
            ]
        )  # fmt: skip
    return shown


def read(files: Sequence[Path]) -> list[Timing]:
    """What ``--out`` wrote."""
    names = [field.name for field in fields(Timing)]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [Timing(**{name: line[name] for name in names if name in line}) for line in lines]


def markdown(timings: Sequence[Timing]) -> list[str]:
    """A table of a README: a row a load and GPU, an eager step's time and, where it was captured, its CUDA graph's."""
    lines = [
        "| model | new tokens | behind | GPU | transformers, eager | ours | in a graph | ours | tokens/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for eager in (timing for timing in timings if not timing.graph):
        graphs = [timing for timing in timings if timing.graph and timing.step == eager.step]
        best = graphs[0] if graphs else eager
        times = [duration(us) for timing in [eager, *graphs] for us in (timing.theirs_us, timing.ours_us)]
        cells = [
            eager.stack, f"{eager.sequences} x {eager.tokens}", str(eager.cached or "-"), _model_of(eager.device),
            *times, *(["-", "-"] if not graphs else []), significant(best.rate(best.ours_us)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _model_of(device: str) -> str:
    """H200 of "NVIDIA H200", H100 of "NVIDIA H100 80GB HBM3"."""
    return device.removeprefix("NVIDIA ").partition(" ")[0]


def load_stacks(file: Path, dry: bool) -> list[Stack]:
    """What the file's ``stacks(dry)`` gives."""
    spec = importlib.util.spec_from_file_location(f"engines_of_{file.parents[1].name.replace('-', '_')}", file)
    if spec is None or spec.loader is None:
        fail("FILE", "a Python file", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stacks: list[Stack] = module.stacks(dry)
    return stacks


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code: 1 where a stack failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="kernel_reference.bench.engines", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--dry", action="store_true", help="tiny models on a CPU: their times mean nothing")
    parser.add_argument("--only", default="", help="stacks whose name has this in it")
    parser.add_argument("--out", type=Path, help="write the timings there, as JSON lines")
    parser.add_argument("--commit", help="the commit to record where the sources are no git checkout")
    parser.add_argument("--table", action="store_true", help="FILE are records: print them as a README's table")
    chosen = parser.parse_args(arguments)
    if chosen.table:
        print("\n".join(markdown(read(chosen.files))))
        return 0
    if not chosen.dry and not torch.cuda.is_available():
        print("this needs a GPU; --dry runs without one", file=sys.stderr)
        return 2
    device = torch.device("cpu" if chosen.dry else "cuda")
    commit = chosen.commit or commit_of(chosen.files[0].resolve().parent)
    machine = {} if chosen.dry else asdict(describe(device)) | {"commit": commit}
    timings: list[Timing] = []
    failed: list[str] = []
    if chosen.out:
        chosen.out.write_text("")
    for stack in (stack for file in chosen.files for stack in load_stacks(file, chosen.dry)):
        if chosen.only not in stack.name:
            continue
        try:
            for timing in measure(stack, device, 1 if chosen.dry else ROUNDS):
                print(timing, flush=True)
                timings.append(timing)
                # At once: what ends the run early leaves the record of what was timed.
                if chosen.out:
                    with chosen.out.open("a") as file:
                        file.write(json.dumps(asdict(timing) | machine) + "\n")
        except (RuntimeError, ValueError) as error:
            failed.append(stack.name)
            print(f"{stack.name}: {error}", file=sys.stderr, flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    show(table(timings))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
