"""What an inference engine takes for granted of an operator, as assertions: each takes functions and inputs and raises
AssertionError with the reason. Results may be a tensor or any nesting of tuples, lists and dicts of tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from kernel_reference.checks import as_int, check_tensors, describe, fail
from kernel_reference.testing.guards import assert_same_bits, poison_, tensors_in

Inputs = Sequence[Any]


def check_opcheck(op: Any, cases: Iterable[Inputs]) -> None:
    """Run ``torch.library.opcheck`` (schema, fake implementation, autograd, AOT dispatch) on each case.

    op: ``torch.ops.<namespace>.<name>.default``. cases: the positional arguments of a call each.
    """
    listed = _listed("cases", cases, "the positional arguments of a call each")
    cases = [_checked(f"cases[{position}]", case) for position, case in enumerate(listed)]
    ran = 0
    for ran, case in enumerate(cases, 1):
        try:
            torch.library.opcheck(op, tuple(case))
        except Exception as error:
            raise AssertionError(f"{op} fails opcheck on case {ran - 1}, {_described(case)}: {error}") from error
    if not ran:
        fail("cases", "at least one call's arguments", "none")


def check_compiles(
    fn: Callable[..., Any], inputs_small: Inputs, inputs_large: Inputs, *,
    dynamic: Mapping[int, int] | None = None, backend: str | None = None,
) -> None:  # fmt: skip
    """``torch.compile(fn, fullgraph=True)`` runs on two sizes with no recompile on the second, bit for bit as without.

    dynamic: which dimension differs between the sizes, by the position of the argument (``{0: 0, 1: 0}``: the tokens
    of the first two); those are marked dynamic, so that specialising on them is an error too. If left out, every
    dimension that differs is marked. backend: ``"inductor"`` on a GPU and ``"aot_eager"``, which needs no C++
    compiler, on a CPU unless given. What ``fn`` writes into its inputs is compared too; the inputs handed in are left
    as they are.
    """
    # Torch has no public way to ask for this.
    from torch._dynamo.exc import RecompileError

    _check_function("fn", fn)
    inputs_small = _checked("inputs_small", inputs_small)
    inputs_large = _checked("inputs_large", inputs_large)
    if len(inputs_large) != len(inputs_small):
        fail("inputs_large", f"{len(inputs_small)} arguments, as inputs_small", len(inputs_large))
    if dynamic is None:
        differing = _differing(inputs_small, inputs_large)
    else:
        differing = list(_dims("dynamic", dynamic, inputs_small))
    if not differing:
        fail("inputs_large", "of another size than inputs_small", "the same sizes")
    if backend is None:
        backend = "inductor" if any(t.is_cuda for t in tensors_in(inputs_small)) else "aot_eager"
    torch.compiler.reset()
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    try:
        for what, inputs in {"the first size": inputs_small, "the second size": inputs_large}.items():
            expected_inputs, actual_inputs = _twins(inputs), _twins(inputs)
            expected = fn(*expected_inputs)
            for argument, dim in differing:
                torch._dynamo.mark_dynamic(actual_inputs[argument], dim)
            try:
                with torch._dynamo.config.patch(error_on_recompile=inputs is inputs_large):
                    actual = compiled(*actual_inputs)
            except RecompileError as error:
                raise AssertionError(f"the second size is compiled again, {_described(inputs)}: {error}") from error
            except Exception as error:
                raise AssertionError(f"{what} does not compile, {_described(inputs)}: {error}") from error
            assert_same_bits(actual, expected, f"compiled, {what}:")
            assert_same_bits(actual_inputs, expected_inputs, f"compiled, {what}, after the call: input")
    finally:
        torch.compiler.reset()


def check_cuda_graph(fn: Callable[..., Any], make_inputs: Callable[[int], Inputs], *, replays: int = 2) -> None:
    """``fn`` can be captured in a CUDA graph, and its replays on refilled inputs give the bits of plain calls.

    make_inputs: from a seed to the arguments; shapes, and whatever is not a tensor, must not depend on the seed.
    Results are poisoned before each replay, so that one which does nothing is seen. Needs a GPU.
    """
    _check_function("fn", fn)
    _check_function("make_inputs", make_inputs)
    replays = as_int("replays", replays)
    _require_gpu("check_cuda_graph")
    static = make_inputs(0)
    # Libraries allocate and initialise on a first call, which a capture forbids.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn(*_twins(static))
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fn(*static)
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(static)}
    for seed in range(1, replays + 1):
        fresh = make_inputs(seed)
        for captured_input, tensor in zip(tensors_in(static), tensors_in(fresh), strict=True):
            captured_input.copy_(tensor)
        for result in tensors_in(captured):
            if result.untyped_storage().data_ptr() not in given:
                poison_(result)
        graph.replay()
        torch.cuda.synchronize()
        expected = fn(*fresh)
        assert_same_bits(captured, expected, f"replay {seed}:")
        assert_same_bits(static, fresh, f"replay {seed}, after it: input")


def check_compiled_graphs(fn: Callable[..., Any], *calls: Inputs, static: Iterable[int] = ()) -> None:
    """Under ``torch.compile(mode="reduce-overhead")``, whose CUDA graphs own all that is allocated under them, ``fn``
    gives the bits of plain calls: each of ``calls`` is warmed up, captured and replayed.

    static: positions of tensors that calls write. The first call's serve all, each as the last one left it. Without
    gradients. Needs a GPU.
    """
    from torch._inductor.cudagraph_trees import get_manager

    _check_function("fn", fn)
    calls = tuple(_checked(f"calls[{position}]", inputs) for position, inputs in enumerate(calls))
    _require_gpu("check_compiled_graphs")
    torch.compiler.reset()
    compiled = torch.compile(fn, fullgraph=True, mode="reduce-overhead")
    plain = {at: _twin(_tensor_of("static", at, calls[0])) for at in static}
    own = {at: _twin(tensor) for at, tensor in plain.items()}
    for tensor in own.values():
        torch._dynamo.mark_static_address(tensor)
    with torch.no_grad():
        for turn, inputs in enumerate(inputs for inputs in calls for _ in ("warm-up", "capture", "replay")):
            given, wanted = ([kept.get(at, value) for at, value in enumerate(_twins(inputs))] for kept in (own, plain))
            torch.compiler.cudagraph_mark_step_begin()
            actual = compiled(*given)
            # Behind it, so that what a first call makes ready is made ready in the warm-up.
            expected = fn(*wanted)
            assert_same_bits(actual, expected, f"turn {turn}:")
            assert_same_bits(given, wanted, f"turn {turn}, after it: input")
    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    if manager is None or not any(manager.get_roots()):
        raise AssertionError(
            "torch.compile captured nothing: no kernel runs, or arguments that are not static are written"
        )


def check_deterministic(fn: Callable[[], Any], *, runs: int = 5) -> None:
    """``fn()`` gives the same bits in every one of ``runs`` calls (>= 2)."""
    _check_function("fn", fn)
    if as_int("runs", runs) < 2:
        fail("runs", ">= 2", runs)
    expected = _copied(fn())
    for run in range(1, runs):
        assert_same_bits(fn(), expected, f"call {run}:")


def check_batch_invariant(fn: Callable[[slice], Any], size: int, parts: Iterable[slice] | None = None) -> None:
    """A row's result has the same bits whatever rows are computed beside it.

    fn: computes rows (or sequences) ``slice`` of a fixed batch of ``size`` and returns results whose first dimension
    are those rows: ``lambda rows: op(q[rows], k[rows])``. parts: the slices to compare with the whole batch; if left
    out, the first row, the last one, half of the rows and all but the first.
    """
    _check_function("fn", fn)
    if as_int("size", size) < 2:
        fail("size", ">= 2", size)
    chosen = None if parts is None else _listed("parts", parts, "slices")
    for part in chosen or ():
        if not isinstance(part, slice):
            fail("parts", "slices", describe(part), TypeError)
    whole = _copied(fn(slice(0, size)))
    for part in chosen or (slice(0, 1), slice(size - 1, size), slice(0, size // 2), slice(1, size)):
        alone = fn(part)
        assert_same_bits(
            alone, [tensor[part] for tensor in tensors_in(whole)], f"rows {part.start}:{part.stop} of {size}, alone:"
        )


def check_no_host_sync(fn: Callable[[], Any]) -> None:
    """A second call of ``fn()`` (the first may compile) never waits for the GPU. Needs a GPU.

    torch tells: what goes past it, such as a library's own cudaStreamSynchronize, is not seen.
    """
    _check_function("fn", fn)
    _require_gpu("check_no_host_sync")
    fn()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fn()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise AssertionError(f"the call waits for the GPU: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def check_version(package: ModuleType, distribution: str) -> None:
    """``__version__`` is what the metadata of ``distribution`` say, and 0+source where they are missing."""
    missing = metadata.PackageNotFoundError(distribution)
    for said, wanted in (("1.2.3", "1.2.3"), (missing, "0+source")):
        with mock.patch.object(metadata, "version", side_effect=[said]) as asked:
            version = importlib.reload(package).__version__
        importlib.reload(package)
        assert version == wanted, f"{package.__name__}.__version__ must be {wanted}, got {version}"
        asked.assert_called_once_with(distribution)


def check_int64_offsets(
    fn: Callable[..., Any], inputs: Inputs, dims: Mapping[int, int | Sequence[int]] | None = None, *,
    written: Sequence[int] = (),
) -> None:  # fmt: skip
    """``fn(*inputs)`` keeps its bits, and writes nowhere else, when what an argument's index counts lies so far apart
    that offsets pass 2^31 elements.

    dims: the dimension to stretch, or several, by the position of the argument. written: positions of arguments that
    ``fn`` writes, such as ``out=``; each is stretched in every dimension of two or more besides, the last one too: an
    offset of its elements made in 32 bits is negative there, and what it names is written before the tensor. One
    dimension of one argument is stretched at a time. Three or more of what is stretched see most: of two, the stride
    itself does not fit in 32 bits, which Triton notices and counts in 64.

    Memory round the stretched argument is NaN (-1 of integers) and must stay so: on a GPU all of it is looked at, on
    a CPU, where what is not touched takes up no memory, the elements that offsets of 32 bits would name and eight on
    either side. Takes at least 2^32 elements of memory once, see :func:`far_apart`, for as long as the largest argument
    named here is stretched: 4 GiB of 8 bits each, 8 of bfloat16, 16 of float32; a GPU must have that to spare, a CPU
    must give out the addresses. ``RuntimeError`` ("out of memory", "allocate memory") is raised where there is less.

    >>> q, k, v, out, lse = ...  # (tokens, heads, head size) and (heads, tokens), three or more of each
    >>> def attend(q, k, v, out, lse):
    ...     attention(q, k, v, out=out, lse=lse)
    >>> check_int64_offsets(attend, [q, k, v, out, lse], {0: 0, 1: (0, 1), 2: (0, 1)}, written=[3, 4])
    """
    _check_function("fn", fn)
    inputs = _checked("inputs", inputs)
    stretches = dict.fromkeys(_dims("dims", {} if dims is None else dims, inputs))
    for argument in _listed("written", written, "positions of arguments"):
        _tensor_of("written", argument, inputs)
        stretches.update(dict.fromkeys((argument, dim) for dim, size in enumerate(inputs[argument].shape) if size > 1))
    if not stretches:
        fail("dims", "at least one argument's dimension", "none")
    expected_inputs = _twins(inputs)
    expected = _copied(fn(*expected_inputs))
    for argument, dim in stretches:
        stretched = _twins(inputs)
        far = stretched[argument] = far_apart(stretched[argument], dim)
        what = f"argument {argument} with a stride of {far.stride(dim)} in dimension {dim}:"
        surroundings = _Surroundings(far, dim)
        results = fn(*stretched)
        surroundings.check(what)
        assert_same_bits(results, expected, what)
        assert_same_bits(stretched, expected_inputs, f"{what} after the call: input")
        # Before the next one is made: there may not be memory for two.
        del far, surroundings, results, stretched


def far_apart(tensor: torch.Tensor, dim: int = 0, beyond: int = 2**31) -> torch.Tensor:
    """A copy whose stride in ``dim`` is so large that its last row starts at least ``beyond`` elements after its first.

    It stands in the middle of an allocation of at least twice ``beyond`` elements, so that an offset computed in 32
    bits reads or writes other memory of the same allocation, and shows as a wrong result instead of a crash. On a CPU,
    memory that is never touched is not taken up.
    """
    check_tensors(tensor=tensor)
    if not -tensor.ndim <= as_int("dim", dim) < tensor.ndim:
        fail("dim", f"a dimension of {describe(tensor)}", dim)
    as_int("beyond", beyond)
    rows = tensor.shape[dim]
    if rows < 2:
        fail("tensor", f"of at least 2 rows in dimension {dim}", rows)
    inner = tensor.select(dim, 0)
    width = inner.numel()
    # A multiple of 16 elements, so that rows stay as aligned as they were.
    stride = -(-max(beyond, width * rows) // (rows - 1) // 16) * 16 + 16
    strides = list(torch.empty(inner.shape, device="meta").stride())
    strides.insert(dim % tensor.dim(), stride)
    extent = stride * (rows - 1) + width
    storage = torch.empty(2 * extent, dtype=tensor.dtype, device=tensor.device)
    return torch.as_strided(storage, tensor.shape, strides, extent // 16 * 16).copy_(tensor.detach())


class _Surroundings:
    """What lies in the allocation of a tensor made by :func:`far_apart`, but for its own elements: to stay as it is."""

    def __init__(self, far: torch.Tensor, dim: int) -> None:
        self._first = far.storage_offset()
        size = far.untyped_storage().nbytes() // far.element_size()
        whole = torch.as_strided(far, (size,), (1,), 0)
        self._whole = whole.view(_integers_of(far))
        self._own = _offsets(far)
        # In 0xFF of every byte each floating-point dtype has a NaN.
        self._nothing = -1 if self._whole.dtype.is_signed else 255
        self._watched: torch.Tensor | None = None
        if far.is_cuda:
            kept = far.clone()
            self._whole.fill_(self._nothing)
            far.copy_(kept)
            return
        self._watched = self._others(_wrapped(far, dim, size))
        self._whole[self._watched] = self._nothing

    def check(self, what: str) -> None:
        if self._watched is not None:
            changed = self._watched[self._whole[self._watched] != self._nothing]
        else:
            parts = []
            for start in range(0, len(self._whole), _CHUNK):
                found = (self._whole[start : start + _CHUNK] != self._nothing).nonzero().flatten() + start
                parts.append(self._others(found))
            changed = torch.cat(parts)
        if not len(changed):
            return
        offset = int(changed[0]) - self._first
        last = int(self._own.max()) - self._first
        where = f"{-offset} before its first" if offset < 0 else f"{offset} after its first"
        if offset > last:
            where = f"{offset - last} after its last"
        raise AssertionError(f"{what} {len(changed)} elements beside it were overwritten; one is {where}")

    def _others(self, offsets: torch.Tensor) -> torch.Tensor:
        return offsets[~torch.isin(offsets, self._own)]


# Elements looked at in one go.
_CHUNK = 2**27
_NEIGHBOURS = 8


def _integers_of(tensor: torch.Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def _offsets(tensor: torch.Tensor) -> torch.Tensor:
    """Offsets of all elements of a tensor in its allocation."""
    offsets = torch.full((), int(tensor.storage_offset()), dtype=torch.int64, device=tensor.device)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size, device=tensor.device) * stride
    return offsets.flatten()


def _wrapped(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Elements of an allocation of ``size``, and some beside them, that an offset of 32 bits would name: of the
    stretched dimension alone, and of all dimensions."""
    first = int(tensor.storage_offset())
    offsets = _offsets(tensor) - first
    index = torch.arange(tensor.shape[dim], device=tensor.device) * tensor.stride(dim)
    of_dim = index.view([-1 if d == dim else 1 for d in range(tensor.dim())]).expand(tensor.shape).flatten()
    named = [first + _in_32_bits(offsets), first + _in_32_bits(of_dim) + (offsets - of_dim)]
    beside = torch.arange(-_NEIGHBOURS, _NEIGHBOURS + 1, device=tensor.device)
    found: torch.Tensor = torch.unique(torch.cat([(one[:, None] + beside).flatten() for one in named]))
    return found[(found >= 0) & (found < size)]


def _in_32_bits(offsets: torch.Tensor) -> torch.Tensor:
    return (offsets + 2**31) % 2**32 - 2**31


def _copied(tree: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors_in(tree)]


def _twins(inputs: Inputs) -> list[Any]:
    """Copies of the same strides, so that a padded row stays padded."""
    return [_twin(value) if isinstance(value, torch.Tensor) else value for value in inputs]


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _differing(small: Inputs, large: Inputs) -> list[tuple[int, int]]:
    return [
        (argument, dim)
        for argument, (one, other) in enumerate(zip(small, large, strict=True))
        if isinstance(one, torch.Tensor)
        for dim in range(one.dim())
        if one.shape[dim] != other.shape[dim]
    ]


def _check_function(name: str, fn: object) -> None:
    if not callable(fn):
        fail(name, "a function", describe(fn), TypeError)


def _checked(name: str, inputs: Any) -> Inputs:
    """The positional arguments of a call: a tensor would be taken apart row by row, a string letter by letter."""
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        fail(name, "the positional arguments of a call, in a list or a tuple", describe(inputs), TypeError)
    return inputs


def _listed(name: str, given: Any, wanted: str) -> list[Any]:
    if not isinstance(given, Iterable) or isinstance(given, (str, torch.Tensor)):
        fail(name, wanted, describe(given), TypeError)
    return list(given)


def _tensor_of(name: str, argument: Any, inputs: Inputs) -> torch.Tensor:
    """The tensor at a position that ``name`` says."""
    position = as_int(name, argument, "positions of arguments")
    if not 0 <= position < len(inputs):
        fail(name, f"positions of arguments from 0 to {len(inputs) - 1}", position)
    if not isinstance(inputs[position], torch.Tensor):
        fail(name, "positions of tensors", f"{position}, which is {describe(inputs[position])}")
    found: torch.Tensor = inputs[position]
    return found


def _dims(name: str, dims: Any, inputs: Inputs) -> Iterator[tuple[int, int]]:
    """(position, dimension) of each dimension, or sequence of them, by the position of its argument."""
    if not isinstance(dims, Mapping):
        fail(name, "dimensions by the position of their argument", describe(dims), TypeError)
    for argument, chosen in dims.items():
        tensor = _tensor_of(name, argument, inputs)
        for dim in chosen if isinstance(chosen, (tuple, list)) else [chosen]:
            if not -tensor.ndim <= as_int(name, dim, "dimensions of tensors") < tensor.ndim:
                fail(f"{name}[{argument}]", f"a dimension of {describe(tensor)}", dim)
            yield argument, dim % tensor.ndim


def _described(inputs: Inputs) -> str:
    shown = (
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else repr(value)
        for value in inputs
    )
    return f"({', '.join(shown)})"


def _require_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(f"{name} needs a GPU; mark the test with pytest.mark.gpu")
