"""What runs at the same time in a simulated kernel: warp-specialised partitions, barriers, TMA loads, WGMMA."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from kernel_reference.testing.gluon.memory import Descriptor, MBarrierLayout, Shared
from kernel_reference.testing.gluon.values import DType, Value, load, store

Tensor = torch.Tensor

# Past this a barrier that nobody arrives at is taken for a deadlock; a step takes milliseconds.
PATIENCE_S = 60.0
# The longest that a TMA load is in flight.
LATE_S = 0.002
# How long the slow partition stops wherever it meets the others.
SLOW_S = 0.001


class Barrier:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def take(self, arrivals: int, expected: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += expected
            if self.pending < 0 or self.bytes < 0:
                raise RuntimeError("a barrier was arrived at more often, or by more bytes, than it waits for")
            if self.pending == self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changed.notify_all()


class Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


class Stopped(Exception):
    """Another partition has failed."""


class Program:
    """What the threads of one program share."""

    number = 0
    count = 1
    # The partition that is slow; None: any, at random.
    slow: int | None = None
    failed = threading.Event()
    errors: ClassVar[list[BaseException]] = []
    # TMA loads that have not arrived.
    in_flight: ClassVar[set[threading.Timer]] = set()
    landing = threading.RLock()
    own = threading.local()

    @classmethod
    def fail(cls, error: BaseException) -> None:
        cls.errors.append(error)
        cls.failed.set()


def linger() -> None:
    """Let another partition go first, now and then."""
    if getattr(Program.own, "slow", False):
        time.sleep(SLOW_S)
    elif random.random() < 0.3:
        time.sleep(0)


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def expect(barrier: Barrier, size: int, pred: Any = True) -> None:
    if pred:
        barrier.take(1, int(size))


def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    linger()
    if pred:
        barrier.take(count, 0)


def wait(barrier: Barrier, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    end = time.monotonic() + PATIENCE_S
    with barrier.changed:
        while pred and barrier.phase == int(phase):
            barrier.changed.wait(0.1)
            if Program.failed.is_set():
                raise Stopped
            if time.monotonic() > end:
                raise RuntimeError("a deadlock: a barrier is waited for that nobody arrives at")
    linger()


def copy_to_shared(d: Descriptor, coordinates: Any, barrier: Barrier, stage: Shared, pred: Any = True) -> None:
    if not pred:
        return
    box = load(*d.box(coordinates))

    def arrive() -> None:
        stage.store(Value(box.data.reshape(box.data.shape[-2:])))
        # Otherwise a program could end between the two.
        with Program.landing:
            Program.in_flight.discard(timer)
            try:
                barrier.take(0, -d.block_type.nbytes)
            except RuntimeError as error:
                # Raised in a thread of its own, it would be nobody's.
                Program.fail(error)

    timer = threading.Timer(random.random() * LATE_S, arrive)
    if random.random() < 0.5:
        arrive()
    else:
        Program.in_flight.add(timer)
        timer.start()


def copy_from_shared(d: Descriptor, coordinates: Any, stage: Shared) -> None:
    pointer, there = d.box(coordinates)
    store(pointer, Value(stage.load().data.reshape(there.shape)), there)


# Columns that a WGMMA of 16 bits adds to an accumulator at once.
STEP = 16


class Products:
    """How products are summed: see :func:`kernel_reference.testing.gluon.truncated_sums`."""

    truncated = False


def toward_zero(exact: Tensor) -> Tensor:
    """Of float64 the float32 next to it, toward zero."""
    rounded = exact.float()
    return torch.where(rounded.double().abs() > exact.abs(), torch.nextafter(rounded, torch.zeros(())), rounded)


def product_of(a: Tensor, b: Tensor, before: Tensor | None) -> Tensor:
    """``a @ b`` in float32, added to what an accumulator holds ``before``."""
    if not Products.truncated:
        product = a.float() @ b.float()
        return product if before is None else product + before
    acc = torch.zeros(a.shape[0], b.shape[1]) if before is None else before
    a, b = a.double(), b.double()
    for i in range(0, a.shape[1], STEP):
        acc = toward_zero(acc.double() + a[:, i : i + STEP] @ b[i : i + STEP])
    return acc


class Issued:
    """A product that has been issued, and is made when it is waited for."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self.make = make
        self.made: Value | None = None


def multiply(a: Any, b: Shared, acc: Any, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    def make() -> Value:
        left = (a if isinstance(a, Value) else a.load()).data
        # Onto a product that is in flight: WGMMAs are made in the order in which they were issued.
        before: Any = acc.made if isinstance(acc, Issued) else acc
        return Value(product_of(left, b.load().data, before.data if use_acc else None))

    issued = Issued(make)
    products_in_flight().append(issued)
    return issued if is_async else wait_for_products(0, [issued])


def products_in_flight() -> list[Issued]:
    queue: list[Issued] = Program.own.__dict__.setdefault("queue", [])
    return queue


def wait_for_products(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    linger()
    queue = products_in_flight()
    while len(queue) > num_outstanding:
        oldest = queue.pop(0)
        oldest.made = oldest.make()
    results = tuple(x.made if isinstance(x, Issued) else x for x in deps)
    if any(result is None for result in results):
        raise RuntimeError("an accumulator is read while its product is in flight")
    return results[0] if len(results) == 1 else results


def warp_specialize(partitions: Sequence[Any], worker_num_warps: Any, worker_num_regs: Any = None) -> None:
    slow = random.randrange(len(partitions)) if Program.slow is None else Program.slow

    def run(i: int, function: Callable[..., None], arguments: Any) -> None:
        Program.own.slow = i == slow
        try:
            function(*arguments)
        except Stopped:
            pass
        except BaseException as error:
            Program.fail(error)

    threads = [threading.Thread(target=run, args=(i, *partition)) for i, partition in enumerate(partitions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if Program.errors:
        raise Program.errors[0]


def allocate(dtype: DType, shape: Sequence[int], layout: Any, value: Any = None) -> Any:
    if isinstance(layout, MBarrierLayout):
        return Barriers(shape[0])
    size = int(torch.tensor(shape).prod())
    nothing = torch.full((size,), torch.nan if dtype.torch.is_floating_point else -1).to(dtype.torch)
    shared = Shared(nothing, dtype, shape, layout)
    if value is not None:
        shared.store(value)
    return shared
