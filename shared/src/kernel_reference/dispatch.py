"""How torch ops find their implementations, and calls what was made ready for others that look alike. Torch only.

An op's room (``ops.py`` of a package) reads like this::

    _library = torch.library.Library("my_package", "DEF")
    _library.define("attend(Tensor q, ..., float scale, int[]? plan=None) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    launches = PreparedLaunches()

    def _prepare(tensors, numbers):
        problem = arguments.check_attend(*tensors, *numbers)
        return launch_module("my_package").prepare_attend(problem, *tensors), arguments.overlap(tensors)

    def _kernel(*given):
        tensors, numbers = given[:7], given[7:]
        run, check_overlap = launches.find(_prepare, tensors, numbers)
        check_overlap(*tensors)
        run(*tensors)

    implement(_library, "attend", reference=reference.attend, kernel=_kernel, fake=arguments.check_attend)
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from kernel_reference.checks import describe, fail, values_are_checked
from kernel_reference.together import begin_triton
from kernel_reference.transforms import are_active

Tensor = torch.Tensor

# Subclasses may want to see an op, as FakeTensor does; a Parameter is a tensor by another name.
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
# torch.compile's guards compare Python type, dispatch keys (with those that a thread includes or leaves out: modes,
# transforms, autocast, jit's tracer), dtype, device, sizes and strides of many tensors in 1 us. They are private, and
# without them each call is the op's.
_TensorGuards = getattr(torch._C._dynamo.guards, "TensorGuards", None)


# Forms of tensors, but for free sizes, that are remembered for the same numbers: caches of two kinds of layers, say.
_MOST_LOOKS = 4


# Whether a call's tensors look like those of another.
_Looks = Callable[[tuple[Tensor | None, ...]], bool]
# What serves calls, and whether one looks like those.
_Direct = tuple[Callable[..., Any], _Looks]


class Free(NamedTuple):
    """Dimensions of a tensor whose sizes, and whose strides, may differ from call to call."""

    sizes: Sequence[int] = ()
    strides: Sequence[int] = ()


_NOTHING_FREE = Free()


class PreparedLaunches:
    """What was made ready for calls, found again by all that tells one call from another.

    Checks, plan and launch cost a call tens of microseconds, and depend on shapes, strides, dtypes, devices and numbers
    alone; finding what they gave costs 2 us where the last call with these numbers looked alike, as those of a model's
    layers do, and else 10. Each package keeps a table of its own. Past ``most`` entries, a launch of 10 to 20 kB each,
    the one looked up longest ago is forgotten, and made once more if it comes again.
    """

    def __init__(self, most: int = 2048) -> None:
        # A server's steps with prompts seldom have a size twice: of 18434 in half an hour of chat, this many entries
        # find 4 % again, four times as many 9 %.
        self.most = most
        # In the order in which they were looked up.
        self._found: OrderedDict[tuple[object, ...], tuple[Any, _Looks]] = OrderedDict()
        # What was found last for some numbers, with gradients on or off, and whether tensors look like those it was
        # found for. Guards compare whether tensors require a gradient, and not whether one is recorded.
        self._latest: dict[tuple[object, ...], tuple[Any, _Looks]] = {}
        # In the order in which they were kept.
        self._direct: OrderedDict[tuple[object, ...], tuple[_Direct, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def find(
        self,
        prepare: Callable[[tuple[Any, ...], tuple[Any, ...]], Any],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> Any:
        """What ``prepare(tensors, numbers)`` returned the last time that tensors and numbers looked like this.

        numbers are hashable, or lists, as torch passes a plan, which ``prepare`` gets as tuples. As numbers 0.0 and
        -0.0 are one: where that matters, pass ``number.hex()``. What ``prepare`` returns must not keep the tensors
        alive: it lives as long as the process.
        """
        mode = torch.is_grad_enabled()
        try:
            latest = self._latest.get((prepare, len(tensors), numbers, mode))
        except TypeError:
            # A list has no hash. To look for one first would cost every call 0.6 us.
            numbers = tuple([tuple(number) if type(number) is list else number for number in numbers])
            latest = self._latest.get((prepare, len(tensors), numbers, mode))
        if latest is not None:
            found, looks_alike = latest
            if looks_alike(tensors):
                return found
        return self._look_up(prepare, tensors, numbers)

    def again(
        self,
        prepare: Callable[[tuple[Any, ...], tuple[Any, ...]], Any],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> Any:
        """What :meth:`find` returned for the last call with these numbers, if this one looks like it; else None.

        For calls past torch's dispatcher: where this is not None, the tensors' kinds and devices, and whether gradients
        are asked of them, are what they were then, so that they need not be looked at one by one; and nobody has a part
        in the call who had none in that one: see :meth:`direct`.
        """
        if torch.compiler.is_dynamo_compiling() or _somebody_looks_on() or values_are_checked():
            return None
        latest = self._latest.get((prepare, len(tensors), numbers, torch.is_grad_enabled()))
        return None if latest is None or not latest[1](tensors) else latest[0]

    def _look_up(
        self,
        prepare: Callable[[tuple[Any, ...], tuple[Any, ...]], Any],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> Any:
        """Among all, by a key that takes as long to make and compare as a launch; layers of a model share one."""
        _check_materialised(tensors)
        key = (prepare, numbers, *[t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors])
        # Taken out, to be put in again as the last.
        known = self._found.pop(key, None)
        found, looks_alike = (prepare(tensors, numbers), _nothing_looks_alike) if known is None else known
        if not looks_alike(tensors):
            looks_alike = _guards(tensors)
        while len(self._found) >= self.most:
            self._forget_oldest()
        self._found[key] = found, looks_alike
        self._latest[(prepare, len(tensors), numbers, torch.is_grad_enabled())] = found, looks_alike
        return found

    def _forget_oldest(self) -> None:
        (prepare, numbers, *tensors), (found, _) = self._found.popitem(last=False)
        for mode in (True, False):
            kind = (prepare, len(tensors), numbers, mode)
            latest = self._latest.get(kind)
            if latest is not None and latest[0] is found:
                self._latest.pop(kind, None)

    def direct(self, tensors: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> Callable[..., Any] | None:
        """What :meth:`keep_direct` was given for a call that looks like this one, to be called in place of the op.

        torch's dispatcher takes 10 to 20 us to hand a Python kernel its arguments. In eager code that is all that it
        does for tensors that are no subclass's, and there this call has the kernel's launch at once. None where
        anybody else has a part in it: a mode (fake tensors, tracing, functions), a transform, a profiler, checks of
        values; and while torch.compile traces. Only the latest call with such numbers is remembered; of calls whose
        sizes are free, a few.
        """
        if torch.compiler.is_dynamo_compiling() or _somebody_looks_on() or values_are_checked():
            return None
        try:
            found = self._direct.get((len(tensors), numbers, torch.is_grad_enabled()))
            if found is None:
                return None
            for run, looks_alike in found:
                if looks_alike(tensors):
                    return run
        except TypeError:
            # Numbers without a hash, or what is no tensor: the op says what they must be.
            pass
        return None

    def keep_direct(
        self,
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
        make: Callable[[], Callable[..., Any]],
        free: Mapping[int, Free] | None = None,
    ) -> None:
        """Remember ``make()`` for :meth:`direct`, if calls like this one, which the op has just served, may go so.

        numbers: all that tells calls of the package apart but their tensors, the op's name included. free: of which
        tensors, by position, some sizes and strides may differ, as those of a server's batches do from step to step;
        what was kept looks at them itself.
        """
        if not torch.compiler.is_dynamo_compiling() and _is_plain(tensors):
            key = len(tensors), numbers, torch.is_grad_enabled()
            before = self._direct.pop(key, ())
            while len(self._direct) >= self.most:
                self._direct.popitem(last=False)
            others = before[: _MOST_LOOKS - 1] if free else ()
            self._direct[key] = ((make(), _guards(tensors, free)), *others)


def _guards(tensors: tuple[Tensor | None, ...], free: Mapping[int, Free] | None = None) -> _Looks:
    """Whether tensors look like these: of the same sizes, strides, dtypes, devices, kinds; and None where these are."""
    there = [i for i, x in enumerate(tensors) if x is not None]
    absent = [i for i, x in enumerate(tensors) if x is None]
    if _TensorGuards is None or not there:
        return _nothing_looks_alike
    given = [x for x in tensors if x is not None]
    sizes = strides = None
    if free:
        # None is what may differ.
        sizes = [_but(x.shape, free.get(i, _NOTHING_FREE).sizes) for i, x in zip(there, given, strict=True)]
        strides = [_but(x.stride(), free.get(i, _NOTHING_FREE).strides) for i, x in zip(there, given, strict=True)]
    check = _TensorGuards(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    of_there, of_absent = _getter(there), _getter(absent)

    def looks_alike(tensors: tuple[Tensor | None, ...]) -> bool:
        return not [x for x in of_absent(tensors) if x is not None] and check(*of_there(tensors))

    return looks_alike


def _getter(positions: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What takes the tensors at these positions, as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    # An itemgetter of one position returns no tuple, and there is none of no position.
    return lambda tensors: tuple([tensors[position] for position in positions])


def _but(numbers: Sequence[int], free: Sequence[int]) -> list[int | None]:
    return [None if dim in free else number for dim, number in enumerate(numbers)]


def _nothing_looks_alike(_: tuple[Tensor | None, ...]) -> bool:
    return False


def _check_materialised(tensors: tuple[Tensor | None, ...]) -> None:
    """Torch's dispatcher materialises what is negated or conjugated only when it is read; calls past it do not."""
    for tensor in tensors:
        if tensor is not None and (tensor.is_neg() or tensor.is_conj()):
            fail(
                "every tensor",
                "materialised (call resolve_neg() or resolve_conj())",
                f"a lazy view, {describe(tensor)}",
            )


def _somebody_looks_on() -> bool:
    """Whether a mode, a transform or a profiler is round the call. Costs 0.3 us."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or are_active()
        or profiler._is_profiler_enabled
    )


def _is_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether the dispatcher would do nothing with these but call the kernel for a GPU."""
    return not (_somebody_looks_on() or torch._C._is_tracing() or values_are_checked()) and all(
        type(x) in _PLAIN
        and has_kernel(x.device)
        and not (x.is_neg() or x.is_conj())
        and not (x.requires_grad and torch.is_grad_enabled())
        for x in tensors
        if x is not None
    )


def has_kernel(device: torch.device) -> bool:
    """Whether ops on this device run a package's kernel, where they run at all."""
    return device.type not in ("cpu", "meta")


def runs_now(tensors: Sequence[Any]) -> bool:
    """Whether an op's implementation on a GPU may be called without torch's dispatcher: 6 us for 26 arguments.

    That is so for plain tensors, the first on CUDA, where nothing looks at ops: no torch.compile, no mode, transform or
    profiler. The caller has refused derivatives, and goes through the op for what it writes into tensors of its
    own caller, of which autograd counts the versions.
    """
    if torch.compiler.is_compiling() or _somebody_looks_on():
        return False
    return {type(tensor) for tensor in tensors} <= _PLAIN and tensors[0].is_cuda


def past_dispatcher(op: Callable[..., Any], kernel: Callable[..., Any], count: int) -> Callable[..., Any]:
    """``op``, whose ``kernel`` is called at once where a call :func:`runs_now`. count: of tensors, its first arguments.

    Of an op that writes into no tensor of its caller. A kernel with gradients is :func:`with_gradients`.
    """

    def call(*given: Any) -> Any:
        tensors = given[:count]
        is_now = isinstance(tensors[0], Tensor) and runs_now(tensors) and not torch._C._is_tracing()
        # The op refuses a sparse tensor by its dispatch key; a kernel would ask for its strides.
        is_now = is_now and all(tensor is None or tensor.layout is torch.strided for tensor in tensors)
        return kernel(*given) if is_now else op(*given)

    return call


def with_gradients(
    kernel: Callable[..., Any], remember: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """A kernel with what ``torch.library.register_autograd`` was given: its own way takes 30 us a call, this one 8.

    On a host whose product of two small tensors takes 3. Their gradients take 37 and 27, of which the engine 19.
    """

    class Now(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            remember(ctx, given, None)
            return kernel(*given)

    Now.backward = staticmethod(backward)  # type: ignore[method-assign]
    apply: Callable[..., Any] = Now.apply
    return apply


_TRITON = "Triton, which torch's GPU builds bring"


def launch_module(package: str, needs: str = _TRITON) -> Any:
    """``<package>.launch``, imported when a tensor on a GPU first asks for it: all else works without Triton.

    RuntimeError says what is needed where it cannot be imported.
    """
    try:
        if needs == _TRITON:
            begin_triton()
        return importlib.import_module(f"{package}.launch")
    except ImportError as error:
        raise RuntimeError(f"tensors on a GPU need {needs}; here it is missing") from error


def implement(
    library: torch.library.Library,
    name: str,
    *,
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Give an op that ``library`` defines its three implementations.

    reference: on a CPU. kernel: on a GPU, ROCm's among them, and on out-of-tree devices such as Ascend's NPUs. fake:
    while torch.compile traces; it allocates what the op returns, and of an op that returns nothing only checks: what a
    check returns, such as a Problem, is dropped. All three check their arguments, so that a compiled call and a direct
    one are checked too.
    """
    library.impl(name, _without_autocast(reference), "CPU")
    # CUDA is also ROCm's key; PrivateUse1 that of out-of-tree devices.
    for key in ("CUDA", "PrivateUse1"):
        library.impl(name, kernel, key)
    returns = getattr(getattr(torch.ops, library.ns), name).default._schema.returns
    torch.library.register_fake(f"{library.ns}::{name}", fake if returns else _dropping(fake), lib=library)


def _without_autocast(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A reference is made of torch's ops, whose precision autocast would lower; a kernel's is its own."""

    def on_a_cpu(*given: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return reference(*given)
        with torch.autocast("cpu", enabled=False):
            return reference(*given)

    return on_a_cpu


def _dropping(check: Callable[..., object]) -> Callable[..., None]:
    def fake(*given: Any) -> None:
        check(*given)

    return fake


# The allocator of torch.compile's generated code: half of torch.empty's host time. It is a private name, so that where
# it is missing the public one serves; and it knows only the current device.
_empty_strided_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def allocator(like: Tensor, device: torch.device | None = None) -> Callable[[], Tensor]:
    """What makes an uninitialised tensor of the same sizes, strides, dtype and device, in the least host time.

    Keeps nothing of ``like`` alive. device: in place of its own, where ``like`` is a form on ``meta``.
    """
    return allocator_of(tuple(like.shape), like.stride(), like.dtype, device or like.device)


def allocator_of(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """As :func:`allocator`, of sizes, strides and dtype that no tensor has yet."""
    # torch 2.11's private allocator takes tuples alone, and torch.Size is none.
    size, stride = tuple(size), tuple(stride)
    if _empty_strided_cuda is not None and device.type == "cuda" and torch.cuda.device_count() == 1:
        return partial(_empty_strided_cuda, size, stride, dtype)
    return partial(torch.empty_strided, size, stride, dtype=dtype, device=device)


def fresh(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty for a call that :func:`runs_now`, in less host time."""
    return _contiguous(size, dtype, device)()


@lru_cache(1024)
def _contiguous(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    strides = [*accumulate(reversed(size[1:]), lambda stride, count: stride * max(1, count), initial=1)]
    return allocator_of(size, tuple(reversed(strides[: len(size)])), dtype, device)
