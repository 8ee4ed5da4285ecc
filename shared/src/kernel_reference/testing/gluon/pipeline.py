"""What runs at the same time in a simulated kernel: warp-specialised partitions, barriers, TMA loads, WGMMA."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from kernel_reference.testing.gluon.memory import Descriptor, MBarrierLayout, Shared
from kernel_reference.testing.gluon.values import DType, Value, load, store
from kernel_reference.testing.tensor_cores import truncated_product

Tensor = torch.Tensor

# Time is the simulation's own. The longest that a partition takes from one place where it meets the others to the next.
STEP_S = 0.0005
# The longest that a TMA load is in flight.
LATE_S = 0.002
# The same of elements copied one by one: longer than who is told too early takes to read them.
COPY_LATE_S = 0.02
# How long the slow partition stops wherever it meets the others.
SLOW_S = 0.001


class Stopped(Exception):
    """Another partition has failed."""


class Partition:
    """A thread that runs while it is its turn; products: its own that are in flight; copied_at: when its copies of
    single elements will have arrived.
    """

    def __init__(self, slow: bool = False) -> None:
        self.slow = slow
        self.products: list[Issued] = []
        self.copied_at = 0.0
        self.turn = threading.Lock()
        self.turn.acquire()


class Program:
    """What the partitions of one program share. One of them runs at a time, until it meets the others: no thread waits
    in real time, a deadlock is seen at once, and what happens follows from Python's random numbers alone.
    """

    current: ClassVar[Program]
    number: ClassVar[int] = 0
    count: ClassVar[int] = 1
    # The partition that is slow; None: any, at random.
    slow: ClassVar[int | None] = None

    def __init__(self) -> None:
        self.now = 0.0
        self.running = Partition()
        self.ready: list[Partition] = []
        self.waiting: set[Partition] = set()
        self.failed: BaseException | None = None
        self.loads_in_flight = 0
        # When, in which order if at one time, what happens.
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time, next(self._order), happen))

    def pass_time(self) -> None:
        """The running partition has done something."""
        self.now += random.random() * STEP_S
        while self._later and self._later[0][0] <= self.now:
            self._go_on()
        if self.failed:
            raise Stopped

    def give_turn(self) -> None:
        """Let one of those that are ready run; go on when it is the caller's turn again."""
        mine = self.running
        if self._choose() is not mine:
            self.running.turn.release()
            mine.turn.acquire()
        if self.failed:
            raise Stopped

    def wait(self) -> None:
        """Let others run until the caller is woken."""
        self.waiting.add(self.running)
        self.give_turn()

    def wake(self, partition: Partition) -> None:
        if partition in self.waiting:
            self.waiting.remove(partition)
            self.ready.append(partition)

    def run_all(self, partitions: Sequence[Partition], run: Callable[[Partition], None]) -> None:
        """Run each partition in a thread of its own, while the caller waits."""
        caller, unfinished = self.running, len(partitions)

        def run_one(partition: Partition) -> None:
            nonlocal unfinished
            partition.turn.acquire()
            try:
                if not self.failed:
                    run(partition)
            except Stopped:
                pass
            except BaseException as error:
                self.failed = self.failed or error
            unfinished -= 1
            if unfinished:
                self._choose()
            else:
                self.running = caller
            self.running.turn.release()

        threads = [threading.Thread(target=run_one, args=(partition,)) for partition in partitions]
        for thread in threads:
            thread.start()
        self.ready += partitions
        self.give_turn()
        for thread in threads:
            thread.join()

    def _choose(self) -> Partition:
        while not self.ready and self._later and not self.failed:
            self._go_on()
        if not self.ready and not self.failed:
            self.failed = RuntimeError("a deadlock: a barrier is waited for that nobody arrives at")
        if self.failed:
            for partition in [*self.waiting]:
                self.wake(partition)
        self.running = self.ready.pop(random.randrange(len(self.ready)))
        return self.running

    def _go_on(self) -> None:
        """To what happens next."""
        time, _, happen = heapq.heappop(self._later)
        self.now = max(self.now, time)
        try:
            happen()
        except RuntimeError as error:
            self.failed = self.failed or error


Program.current = Program()


class Barrier:
    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.waiting: list[Partition] = []

    def take(self, arrivals: int, expected: int) -> None:
        self.pending -= arrivals
        self.bytes += expected
        if self.pending < 0 or self.bytes < 0:
            raise RuntimeError("a barrier was arrived at more often, or by more bytes, than it waits for")
        if self.pending == self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            while self.waiting:
                Program.current.wake(self.waiting.pop())


class Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]
        self.shape = [count, 1]

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


def linger() -> None:
    """Let another partition go first, now and then."""
    program = Program.current
    program.pass_time()
    mine = program.running
    if mine.slow:
        program.at(program.now + SLOW_S, partial(program.wake, mine))
        program.wait()
    elif random.random() < 0.3:
        program.ready.append(mine)
        program.give_turn()


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
    if pred:
        before = int(phase)
        while barrier.phase == before:
            barrier.waiting.append(Program.current.running)
            Program.current.wait()
    linger()


def copy_to_shared(d: Descriptor, coordinates: Any, barrier: Barrier, stage: Shared, pred: Any = True) -> None:
    if not pred:
        return
    program = Program.current
    box = load(*d.box(coordinates))

    def arrive() -> None:
        program.loads_in_flight -= 1
        stage.store(Value(box.data.reshape(-1, box.data.shape[-1])))
        barrier.take(0, -d.block_type.nbytes)

    program.loads_in_flight += 1
    if random.random() < 0.5:
        arrive()
    else:
        program.at(program.now + random.random() * LATE_S, arrive)


def copy_elements(stage: Shared, pointer: Any, mask: Any = True) -> None:
    """Arrive late, as TMA's loads do; what is masked becomes zero."""
    program = Program.current
    elements = load(pointer, mask)

    def arrive() -> None:
        program.loads_in_flight -= 1
        stage.store(elements)

    when = program.now + random.random() * COPY_LATE_S
    program.running.copied_at = max(program.running.copied_at, when)
    program.loads_in_flight += 1
    program.at(when, arrive)


def arrive_behind_copies(barrier: Barrier, increment_count: bool = True) -> None:
    """Once the partition's copies have arrived; an arrival more is waited for, where it counts itself."""
    program = Program.current
    barrier.pending += increment_count
    program.at(max(program.now, program.running.copied_at), partial(barrier.take, 1, 0))


def copy_from_shared(d: Descriptor, coordinates: Any, stage: Shared) -> None:
    pointer, there = d.box(coordinates)
    store(pointer, Value(stage.load().data.reshape(there.shape)), there)


class Products:
    """How products are summed: see :func:`kernel_reference.testing.gluon.truncated_sums`."""

    truncated = False


def product_of(a: Tensor, b: Tensor, before: Tensor | None) -> Tensor:
    """``a @ b`` in float32, added to what an accumulator holds ``before``."""
    if not Products.truncated:
        product = a.float() @ b.float()
        return product if before is None else product + before
    return truncated_product(a, b, before)


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
    Program.current.running.products.append(issued)
    return issued if is_async else wait_for_products(0, [issued])


def wait_for_products(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    linger()
    queue = Program.current.running.products
    while len(queue) > num_outstanding:
        oldest = queue.pop(0)
        oldest.made = oldest.make()
    results = tuple(x.made if isinstance(x, Issued) else x for x in deps)
    if any(result is None for result in results):
        raise RuntimeError("an accumulator is read while its product is in flight")
    return results[0] if len(results) == 1 else results


def warp_specialize(partitions: Sequence[Any], worker_num_warps: Any, worker_num_regs: Any = None) -> None:
    slow = random.randrange(len(partitions)) if Program.slow is None else Program.slow

    work = {Partition(i == slow): partition for i, partition in enumerate(partitions)}

    def run(partition: Partition) -> None:
        function, arguments = work[partition]
        function(*arguments)

    Program.current.run_all([*work], run)


def allocate(dtype: DType, shape: Sequence[int], layout: Any, value: Any = None) -> Any:
    if isinstance(layout, MBarrierLayout):
        return Barriers(shape[0])
    size = int(torch.tensor(shape).prod())
    nothing = torch.full((size,), torch.nan if dtype.torch.is_floating_point else -1).to(dtype.torch)
    shared = Shared(nothing, dtype, shape, layout)
    if value is not None:
        shared.store(value)
    return shared
