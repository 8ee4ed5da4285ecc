"""Does the package do what engines take for granted: torch.compile, CUDA graphs, autograd, streams, large batches?"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

import lightning_attn
from kernel_reference.dispatch import PreparedLaunches
from kernel_reference.models import MINIMAX_01
from kernel_reference.testing import contract
from kernel_reference.testing.forks import run_alone
from kernel_reference.testing.guards import assert_bitwise_equal, assert_same_bits, tensors_in
from kernel_reference.testing.memory import much_memory, peak_beyond
from lightning_attn import Snapshots, launch, ops
from lightning_attn.packed.plan import StatePlan
from lightning_attn.plan import DecodePlan, DeviceLimits, PrefillPlan, plan_prefill

Tensor = torch.Tensor
BF16, FP32 = torch.bfloat16, torch.float32
gpu = pytest.mark.gpu
HEADS, D, E = 4, 32, 48
SLOTS = 12
TP8 = MINIMAX_01.tensor_parallel(8)
H200 = DeviceLimits(132, 232448, hopper=True, dependent_launch=True)


class Maker:
    """Makes the inputs of the public functions from a size and a seed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def integers(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def start(self, seed: int) -> None:
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.host = torch.Generator().manual_seed(seed)

    def slopes(self) -> Tensor:
        return torch.tensor([0.02, 0.0, 0.9, 0.2], device=self.device)[:HEADS]

    def pool_and_slots(self, sequences: int) -> tuple[Tensor, Tensor]:
        slots = torch.randperm(SLOTS, generator=self.host)[:sequences].tolist()
        if sequences > 2:
            slots[int(torch.randint(sequences, (), generator=self.host))] = -1
        return self.normal(SLOTS, HEADS, D, E, dtype=FP32), self.integers(slots)

    def dense(self, size: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, ed, kv_history of ``size`` sequences of 7 * size tokens."""
        self.start(seed)
        q, k, v = (self.normal(size, HEADS, 7 * size, width) for width in (D, D, E))
        return [q, k, v, self.slopes(), self.normal(size, HEADS, D, E, dtype=FP32)]

    def ragged(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, slopes, cu_seqlens, state_pool, slots, has_initial_state, positions, snapshot slots."""
        self.start(seed)
        rows = 30 * sequences
        # Other lengths for each seed, in as many rows.
        bounds = torch.randint(rows + 1, (sequences,), generator=self.host).sort().values.tolist()
        if sequences > 2:
            bounds[1] = bounds[0]
        q, k, v = (self.normal(rows, heads, width) for heads, width in ((2, D), (2, D), (HEADS, E)))
        pool, slots = self.pool_and_slots(sequences)
        cu = self.integers([0, *bounds])
        has = torch.rand(sequences, generator=self.generator, device=self.device) < 0.7
        lengths = [end - begin for begin, end in pairwise([0, *bounds])]
        free = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
        positions, targets = ([[-1, -1] for _ in lengths] for _ in range(2))
        for i, slot in zip(range(sequences), free, strict=False):
            if lengths[i] > 1:
                positions[i][0], targets[i][0] = lengths[i] // 2, slot
        return [q, k, v, self.slopes(), cu, pool, slots, has, self.integers(positions), self.integers(targets)]

    def packed(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, slopes, cu_seqlens, initial_state."""
        _, _, v, slopes, cu, *_ = self.ragged(sequences, seed)
        q, k = (self.normal(len(v), HEADS, D) for _ in range(2))
        return [q, k, v, slopes, cu, self.normal(sequences, HEADS, D, E, dtype=FP32)]

    def out_of_ragged(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """The same with an out."""
        tensors = self.ragged(sequences, seed)
        return [*tensors, torch.zeros(30 * sequences, HEADS, E, dtype=BF16, device=self.device)]

    def tokens(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, state_pool, slots, slopes."""
        self.start(seed)
        q, k, v = (self.normal(sequences, HEADS, width) for width in (D, D, E))
        return [q, k, v, *self.pool_and_slots(sequences), self.slopes()]

    def drop_in(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, kv_caches, slope_rate, slot_idx."""
        q, k, v, pool, slots, slopes = self.tokens(sequences, seed)
        return [q[:, :, None], k[:, :, None], v[:, :, None], pool, slopes[:, None, None], slots]

    def drafts(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, state_pool, slots, slopes."""
        self.start(seed)
        q, k, v = (self.normal(sequences, 5, heads, width) for heads, width in ((2, D), (2, D), (HEADS, E)))
        return [q, k, v, *self.pool_and_slots(sequences), self.slopes()]

    def tree(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """q, k, v, state_pool, slots, slopes, parents."""
        return [*self.drafts(sequences, seed), self.integers([[-1, 0, 0, -1, 2]] * sequences)]

    def path(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """k, v, state_pool, slots, slopes, accepted, path."""
        *tensors, accepted = self.accepted(sequences, seed)
        return [*tensors, accepted.clamp(max=3), self.integers([[0, 2, 4]] * sequences)]

    def accepted(self, sequences: int, seed: int = 0) -> list[Tensor]:
        """k, v, state_pool, slots, slopes, accepted."""
        _, *tensors = self.drafts(sequences, seed)
        return [*tensors, self.integers(torch.randint(6, (sequences,), generator=self.host).tolist())]


@pytest.fixture
def make(device: torch.device) -> Maker:
    return Maker(device)


def attend(q: Tensor, k: Tensor, v: Tensor, ed: Tensor, history: Tensor) -> Any:
    return lightning_attn.lightning_attention(q, k, v, ed, kv_history=history, scale=0.5)


def attend_from_zeros(q: Tensor, k: Tensor, v: Tensor, ed: Tensor, history: Tensor) -> Any:
    return lightning_attn.lightning_attention(q, k, v, ed)


def attend_ragged(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, cu: Tensor, pool: Tensor, slots: Tensor, has: Tensor,
    positions: Tensor, targets: Tensor, out: Tensor | None = None,
) -> Any:  # fmt: skip
    result = lightning_attn.lightning_attention_varlen(
        q, k, v, slopes, cu, state_pool=pool, slots=slots, has_initial_state=has, scale=0.5, out=out,
        snapshot=Snapshots(positions, targets),
    )  # fmt: skip
    return result, pool


def attend_ragged_from_zeros(*tensors: Tensor) -> Any:
    q, k, v, slopes, cu, pool, slots, *_ = tensors
    result = lightning_attn.lightning_attention_varlen(
        q, k, v, slopes, cu, state_pool=pool, slots=slots, has_initial_state=False
    )
    return result, pool


def attend_packed(*tensors: Tensor) -> Any:
    *tensors, initial = tensors
    return lightning_attn.lightning_attention_packed(*tensors, initial_state=initial, scale=0.5)


def states(_: Tensor, *tensors: Tensor) -> Any:
    *tensors, initial = tensors
    return lightning_attn.lightning_state(*tensors, initial_state=initial)


def decode(*tensors: Tensor) -> Any:
    return lightning_attn.lightning_decode(*tensors, scale=0.5), tensors[3]


def decode_as_engines_do(*tensors: Tensor) -> Any:
    return lightning_attn.linear_decode_forward_triton(*tensors), tensors[3]


def verify(*tensors: Tensor) -> Any:
    return lightning_attn.lightning_verify(*tensors)


def commit(*tensors: Tensor) -> Any:
    lightning_attn.lightning_commit(*tensors)
    return tensors[2]


def verify_tree(*tensors: Tensor) -> Any:
    *tensors, parents = tensors
    return lightning_attn.lightning_verify(*tensors, parents=parents)


def commit_path(*tensors: Tensor) -> Any:
    *tensors, path = tensors
    lightning_attn.lightning_commit(*tensors, path=path)
    return tensors[2]


PUBLIC: dict[str, tuple[Callable[..., Any], Callable[..., list[Tensor]]]] = {
    "attention": (attend, Maker.dense),
    "attention from zeros": (attend_from_zeros, Maker.dense),
    "varlen": (attend_ragged, Maker.ragged),
    "varlen, out=": (attend_ragged, Maker.out_of_ragged),
    "varlen from zeros": (attend_ragged_from_zeros, Maker.ragged),
    "packed": (attend_packed, Maker.packed),
    "state": (states, Maker.packed),
    "decode": (decode, Maker.tokens),
    "decode as engines do": (decode_as_engines_do, Maker.drop_in),
    "verify": (verify, Maker.drafts),
    "commit": (commit, Maker.accepted),
    "verify of a tree": (verify_tree, Maker.tree),
    "commit of a path": (commit_path, Maker.path),
}
WALK, STEP = PrefillPlan(16, 16, 0, 4, 2), DecodePlan(16, 4)
BY_A_PLAN: dict[str, tuple[Callable[..., Any], Callable[..., list[Tensor]]]] = {
    "attention": (
        lambda q, k, v, ed, history: lightning_attn.lightning_attention(q, k, v, ed, kv_history=history, plan=WALK),
        Maker.dense,
    ),
    "varlen": (
        lambda *t: lightning_attn.lightning_attention_varlen(
            *t[:5], state_pool=t[5], slots=t[6], has_initial_state=t[7], plan=WALK
        ),
        Maker.ragged,
    ),
    "packed": (
        lambda *t: lightning_attn.lightning_attention_packed(*t[:5], initial_state=t[5], plan=WALK),
        Maker.packed,
    ),
    "state": (
        lambda _, *t: lightning_attn.lightning_state(*t[:4], initial_state=t[4], plan=StatePlan(16, 16, 16, 32, 4, 1)),
        Maker.packed,
    ),
    "decode": (partial(lightning_attn.lightning_decode, plan=STEP), Maker.tokens),
    "decode as engines do": (partial(lightning_attn.linear_decode_forward_triton, plan=STEP), Maker.drop_in),
    "verify": (partial(lightning_attn.lightning_verify, plan=STEP), Maker.drafts),
    "commit": (partial(lightning_attn.lightning_commit, plan=STEP), Maker.accepted),
    "verify of a tree": (lambda *t: lightning_attn.lightning_verify(*t[:6], parents=t[6], plan=STEP), Maker.tree),
    "commit of a path": (lambda *t: lightning_attn.lightning_commit(*t[:6], path=t[6], plan=STEP), Maker.path),
}
every_public_function = pytest.mark.parametrize(("function", "inputs"), PUBLIC.values(), ids=PUBLIC)


# The ops


def requiring(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in tensors]


def cases_of(name: str, make: Maker) -> list[tuple[Any, ...]]:
    walk, step = PrefillPlan(16, 16, 0, 4, 2).as_ints(), DecodePlan(16, 4).as_ints()
    if name in ("attention", "attention_inference"):
        q, k, v, ed, history = make.dense(2)
        if name == "attention":
            leaves = requiring([q[:, :, :3].float(), k[:, :, :3].float(), v[:, :, :3].float(), history.clone()])
            return [(*leaves[:3], ed, leaves[3], 1.0), (q, k, v, ed[:, None], None, 1.0, walk)]
        cases = [(q, k, v, ed, history, 0.5), (q, k, v, ed[:, None], None, 1.0, walk)]
        cases.append((q[:0], k[:0], v[:0], ed, history[:0], 1.0))
        cases.append((q[:, :, :0], k[:, :, :0], v[:, :, :0], ed, history, 1.0))
        cases.append((q.mT.contiguous().mT, k[:1].expand_as(k), v, ed, history, 1.0))
        return cases
    if name == "attention_backward":
        q, k, v, ed, history = make.dense(2)
        d_kv = make.normal(2, HEADS, 1, D, E, dtype=FP32)
        return [(q, k, v, ed, history, v, d_kv, 0.5), (q, k, v, ed, None, v[:1].expand_as(v), None, 1.0, walk)]
    if name in ("packed", "packed_backward", "state"):
        q, k, v, slopes, cu, initial = make.packed(3)
        if name == "packed":
            leaves = requiring([q[:9].float(), k[:9].float(), v[:9].float(), initial.clone()])
            return [
                (*leaves[:3], slopes, cu.clamp(max=9), leaves[3], 1.0),
                (q, k, v, slopes, cu.long(), None, 0.5, walk),
            ]
        if name == "packed_backward":
            cotangent = v[:, :1].expand_as(v)
            return [
                (q, k, v, slopes, cu, None, cotangent, initial, 0.5),
                (q, k, v, slopes, cu, initial, v, None, 1.0, walk),
            ]
        dense = (q[None].transpose(1, 2), v[None].transpose(1, 2), slopes, None, initial[:1])
        plan = StatePlan(16, 16, 16, 32, 4, 1).as_ints()
        return [(k, v, slopes, cu, initial, 1.0, False, False), (*dense, 0.5, True, True, plan)]
    if name == "varlen":
        *tensors, positions, targets = make.ragged(3)
        out = torch.zeros(90, HEADS, E, dtype=BF16, device=make.device)
        first, has = tensors[:7], tensors[7]
        return [
            (*first, has, positions, targets, out, False, 0.5),
            (*first, None, None, None, out, True, 1.0, walk),
            (*first[:4], first[4].long(), first[5], first[6].long(), None, None, None, out, False, 1.0),
        ]  # fmt: skip
    if name in ("decode", "verify"):
        tensors = make.tokens(3) if name == "decode" else make.drafts(3)
        out = torch.zeros(*tensors[0].shape[:-2], HEADS, E, dtype=BF16, device=make.device)
        return [(*tensors, out, 0.5), (*tensors, out, 1.0, step)]
    if name == "verify_tree":
        *tensors, parents = make.tree(3)
        out = torch.zeros(*tensors[0].shape[:-2], HEADS, E, dtype=BF16, device=make.device)
        return [(*tensors, parents.long(), out, 0.5, step)]
    if name == "commit_path":
        return [tuple(make.path(3))]
    assert name == "commit", f"an op that this test does not know: {name}"
    return [tuple(make.accepted(3)), (*make.accepted(2), step)]


def op_names() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("lightning_attn::") for name in names if name.startswith("lightning_attn::"))


@pytest.mark.parametrize("name", op_names())
def test_every_op_of_the_library_passes_opcheck(make, name: str) -> None:
    contract.check_opcheck(getattr(torch.ops.lightning_attn, name).default, cases_of(name, make))


def test_results_of_fakes_have_the_shapes_strides_and_dtypes_of_those_of_the_ops(make) -> None:
    for carried in (False, True):
        q, k, v, ed, history = make.dense(2)
        given = (q, k.mT.contiguous().mT, v, ed, history if carried else None)
        for op, rest in (
            (torch.ops.lightning_attn.attention, (1.0,)),
            (torch.ops.lightning_attn.attention_inference, (1.0,)),
            (torch.ops.lightning_attn.attention_backward, (v, None, 1.0)),
        ):
            real = op(*given, *rest)
            fake = op(*[x if not isinstance(x, Tensor) else x.to("meta") for x in (*given, *rest)])
            for one, other in zip(fake, real, strict=True):
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    *given, initial = make.packed(2)
    given[2] = given[2].mT.contiguous().mT
    for op, tensors, rest in (
        (torch.ops.lightning_attn.packed, (*given, None), (1.0,)),
        (torch.ops.lightning_attn.packed_backward, (*given, initial, given[2], None), (1.0,)),
        (torch.ops.lightning_attn.state, (*given[1:], initial), (1.0, False, False)),
    ):
        real = op(*tensors, *rest)
        fake = op(*[x if x is None else x.to("meta") for x in tensors], *rest)
        for one, other in zip(tensors_in(fake), tensors_in(real), strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.torch_compile
@every_public_function
def test_public_functions_compile_whole_and_once_for_two_sizes(make, function, inputs) -> None:
    contract.check_compiles(function, inputs(make, 3), inputs(make, 5, seed=1))


@pytest.mark.torch_compile
def test_lengths_alone_compile_once_for_two_sizes(make) -> None:
    def of_length(tokens: int) -> list[Tensor]:
        q, k, v, ed, history = make.dense(3)
        return [q[:, :, :tokens].clone(), k[:, :, :tokens].clone(), v[:, :, :tokens].clone(), ed, history]

    contract.check_compiles(attend, of_length(9), of_length(20))


@pytest.mark.torch_compile
@pytest.mark.parametrize("used", ["both", "out", "kv"])
def test_gradients_compile_whole(make, used: str) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, ed: Tensor, history: Tensor) -> Tensor:
        out, kv = attend(q, k, v, ed, history)
        parts = {"out": (out.float() ** 2).sum(), "kv": kv.sin().sum()}
        return parts[used] if used in parts else parts["out"] + parts["kv"]

    def differentiable() -> list[Tensor]:
        *qkv, ed, history = make.dense(3)
        return [*requiring(qkv), ed, *requiring([history])]

    plain, compiled = differentiable(), differentiable()
    loss(*plain).backward()
    backend = "inductor" if make.device.type == "cuda" else "aot_eager"
    torch.compile(loss, fullgraph=True, backend=backend)(*compiled).backward()
    for one, other in zip(plain, compiled, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.torch_compile
def test_the_first_call_of_a_process_may_be_inside_torch_compile(device: torch.device) -> None:
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    run_alone(
        f"""
        import torch, lightning_attn
        attend = torch.compile(lightning_attn.lightning_attention, fullgraph=True, backend={backend!r})
        k = torch.ones(1, 2, 3, 16, device={device.type!r})
        out, kv = attend(k, k, k, torch.zeros(2, device={device.type!r}))
        assert out[0, 0, :, 0].tolist() == [16, 32, 48], out
        assert (kv == 3).all(), kv
        pool, slots = torch.zeros(2, 2, 16, 16, device=k.device), torch.tensor([1], device=k.device)
        decode = torch.compile(lightning_attn.lightning_decode, fullgraph=True, backend={backend!r})
        with torch.no_grad():
            out = decode(k[:, :, 0], k[:, :, 0], k[:, :, 0], pool, slots, torch.zeros(2, device=k.device))
        assert (out == 16).all(), out
        assert (pool[1] == 1).all() and not pool[0].any()
        """
    )


def test_cpu_tensors_need_no_triton() -> None:
    run_alone(
        """
        import sys
        sys.modules["triton"] = None
        import torch, lightning_attn
        x = torch.ones(1, 2, 3, 16)
        out, kv = lightning_attn.lightning_attention(x.requires_grad_(), x, x, torch.zeros(2))
        out.sum().backward()
        """
    )


def test_the_version_is_that_of_the_metadata_or_says_that_there_is_none() -> None:
    contract.check_version(lightning_attn, "lightning-attn")


def test_all_names_that_are_exported_are_there() -> None:
    assert sorted(lightning_attn.__all__) == lightning_attn.__all__
    for name in lightning_attn.__all__:
        assert getattr(lightning_attn, name).__doc__


@every_public_function
def test_public_functions_run_under_inference_mode(make, function, inputs) -> None:
    expected = function(*inputs(make, 4))
    with torch.inference_mode():
        for tensors in (inputs(make, 4), [tensor.clone() for tensor in inputs(make, 4)]):
            assert_same_bits(function(*tensors), expected)


@every_public_function
def test_the_same_call_gives_the_same_bits(make, function, inputs) -> None:
    contract.check_deterministic(lambda: function(*inputs(make, 4)))


@pytest.mark.parametrize("segment", [0, 16])
def test_the_same_walk_gives_the_same_bits(tensors, kernels, segment: int) -> None:
    plan = PrefillPlan(16, 16, segment, 4, 2)

    def walk() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        batch = tensors.ragged([20, 1], heads=(1, 1), sizes=(16, 16), slots=[2, 0])
        kernels.prefill(batch, plan)
        return batch.out.tensor, batch.pool.tensor[[2, 0]]

    contract.check_deterministic(walk, runs=2)


# A sequence's bits do not depend on its neighbours


def prefill_of(given: Sequence[Tensor], sequences: Sequence[int], plan: Any, through: Callable[..., Any]) -> Any:
    """These sequences of a batch alone: their rows of the output, and their states."""
    q, k, v, slopes, cu, pool, slots, has = given
    bounds = cu.tolist()
    rows = torch.cat([torch.arange(bounds[i], bounds[i + 1], device=q.device) for i in sequences])
    lengths = [bounds[i + 1] - bounds[i] for i in sequences]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=cu.dtype, device=q.device)
    chosen = torch.tensor(sequences, device=q.device)
    pool = pool.clone()
    # A row before none of which it knows, so that tensors start elsewhere.
    q, k, v = (torch.cat([x[rows], x[:1]]) for x in (q, k, v))
    heads = slopes.numel()
    out = torch.empty(q.shape[0], heads, v.shape[2], dtype=q.dtype, device=q.device)
    through(q, k, v, slopes, ends, pool, slots[chosen], has[chosen], None, None, out, plan)
    return [*out.split([*lengths, 1])[:-1]], [*pool[slots[chosen].long()]]


def by_launch(kernels: Any, *given: Any) -> None:
    *tensors, plan = given
    kernels.call("varlen", tensors, False, 1.0, plan=plan)


def by_public_function(*given: Any) -> None:
    q, k, v, slopes, cu, pool, slots, has, _, _, out, plan = given
    lightning_attn.lightning_attention_varlen(
        q, k, v, slopes, cu, state_pool=pool, slots=slots, has_initial_state=has, out=out, plan=plan
    )


def batch_of(make: Maker, lengths: Sequence[int], heads: int, sizes: tuple[int, int], dtype=BF16) -> list[Tensor]:
    make.start(5)
    d, e = sizes
    q, k, v = (make.normal(sum(lengths), heads, size, dtype=dtype) for size in (d, d, e))
    slopes = torch.rand(heads, generator=make.generator, device=make.device) * 0.2
    slots = make.integers(torch.randperm(len(lengths), generator=make.host).tolist())
    has = make.integers([i % 3 for i in range(len(lengths))]).bool()
    return [
        q, k, v, slopes, make.integers([0, *accumulate(lengths)]),
        make.normal(len(lengths), heads, d, e, dtype=FP32), slots, has,
    ]  # fmt: skip


def check_neighbours(given: Sequence[Tensor], plan: Any, through: Callable[..., Any], groups: Any) -> None:
    count = given[6].numel()
    outs, states = prefill_of(given, range(count), plan, through)
    for group in groups:
        some_outs, some_states = prefill_of(given, group, plan, through)
        for i, out, state in zip(group, some_outs, some_states, strict=True):
            assert_bitwise_equal(out, outs[i], what=f"the output of sequence {i} among {group}")
            assert_bitwise_equal(state, states[i], what=f"the state of sequence {i} among {group}")


@pytest.mark.parametrize("segment", [0, 16])
def test_a_walk_of_a_sequence_has_the_same_bits_whatever_is_walked_beside_it(make, kernels, segment: int) -> None:
    given = batch_of(make, [33, 1, 20, 16], 1, (16, 16))
    check_neighbours(given, PrefillPlan(16, 16, segment, 4, 2), partial(by_launch, kernels), [[0], [2, 0], [3, 2, 1]])


def test_a_ragged_sequence_has_the_same_bits_whatever_is_beside_it(make) -> None:
    given = batch_of(make, [70, 1, 0, 300, 64, 5], 3, (32, 48))
    groups = [[i] for i in (0, 1, 3, 4, 5)] + [[3, 0], [4, 2, 5, 0], [5, 4, 3, 2, 1, 0]]
    check_neighbours(given, None, by_public_function, groups)


@gpu
@pytest.mark.parametrize("model", [MINIMAX_01, TP8], ids=lambda model: model.name)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_sequences_of_a_model_have_the_same_bits_whatever_is_beside_them(make, model, dtype) -> None:
    """Of 8 heads some are longer than a segment, of 2048 tokens."""
    lengths = [5000, 1, 2048, 2049, 0, 777, 1, 4097]
    given = batch_of(make, lengths, model.num_heads, (model.head_qk, model.head_v), dtype)
    if dtype == BF16:
        plan = plan_prefill(lightning_attn.plan.Heads(8, 8, 128, 128), "bfloat16", H200, suits_tma=True)
        assert plan.segment == 2048
    groups = [[0], [2], [3], [7], [7, 0], [1, 3, 5], [6, 5, 4, 3, 2, 1, 0]]
    check_neighbours(given, None, by_public_function, groups)


def test_a_sequence_of_a_dense_batch_has_the_same_bits_whatever_is_beside_it(make) -> None:
    q, k, v, ed, history = make.dense(8)
    contract.check_batch_invariant(
        lambda rows: lightning_attn.lightning_attention(q[rows], k[rows], v[rows], ed, kv_history=history[rows]), 8
    )


@pytest.mark.parametrize("tokens", [1, 5])
def test_decoding_and_verifying_a_sequence_has_the_same_bits_whatever_is_beside_it(make, tokens: int) -> None:
    q, k, v, pool, slots, slopes = make.tokens(9) if tokens == 1 else make.drafts(9)

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        states, own = pool.clone(), slots[rows].clone()
        if tokens == 1:
            out = lightning_attn.lightning_decode(q[rows], k[rows], v[rows], states, own, slopes)
        else:
            out = lightning_attn.lightning_verify(q[rows], k[rows], v[rows], states, own, slopes)
            counts = torch.arange(9, dtype=torch.int32, device=q.device)[rows] % (tokens + 1)
            lightning_attn.lightning_commit(k[rows], v[rows], states, own, slopes, counts)
        return out, states[own.clamp(min=0).long()] * (own >= 0)[:, None, None, None]

    contract.check_batch_invariant(run, 9)


def test_kernels_decode_a_sequence_to_the_same_bits_whatever_is_beside_it(tensors, kernels) -> None:
    whole = tensors.ragged([2] * 4, heads=(2, 2), sizes=(24, 20), slots=[3, 0, -1, 6])
    kernels.verify(whole, DecodePlan(16, 4))
    kernels.commit(whole, [2, 1, 2, 2], DecodePlan(16, 4))
    for i in (0, 3):
        alone = tensors.ragged([2], heads=(2, 2), sizes=(24, 20), slots=[1], num_slots=3)
        alone.q, alone.k, alone.v = (x[2 * i : 2 * i + 2] for x in (whole.q, whole.k, whole.v))
        alone.pool.tensor[1] = whole.before[whole.slot_of[i]]
        kernels.verify(alone, DecodePlan(16, 4))
        kernels.commit(alone, [2], DecodePlan(16, 4))
        assert_bitwise_equal(alone.out.tensor, whole.out.tensor[2 * i : 2 * i + 2])
        assert_bitwise_equal(alone.pool.tensor[1], whole.pool.tensor[whole.slot_of[i]])


# Gradients


def test_gradients_are_made_once_and_not_twice(make) -> None:
    q, k, v, ed, history = make.dense(2)
    q = q.float().requires_grad_()
    out, _ = attend(q, k.float(), v.float(), ed, history)
    (gradient,) = torch.autograd.grad(out.square().sum(), [q], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradients_match_finite_differences(make) -> None:
    """In float32, of which differences over 1e-2 keep three digits."""
    make.start(0)
    q, k, v = (make.normal(1, 1, 5, 16, dtype=FP32) * 0.3 for _ in range(3))
    history = make.normal(1, 1, 16, 16, dtype=FP32) * 0.3
    ed = torch.tensor([0.3], device=make.device)
    torch.autograd.gradcheck(
        lambda q, k, v, history: attend(q, k, v, ed, history), requiring([q, k, v, history]), eps=1e-2, atol=2e-2,
        rtol=2e-2, nondet_tol=0.0,
    )  # fmt: skip


# What is made ready once and found again


# The way from a public function to the kernels: where there is no GPU, CPU tensors are sent it too


@pytest.fixture
def by_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops on CPU tensors run the kernels, interpreted, with the plan of a device of few cores."""
    if device.type == "cuda":
        yield
        return
    library = torch.library.Library("lightning_attn", "IMPL", "CPU")
    monkeypatch.setattr(launch, "device_limits", lambda device: DeviceLimits(1))
    monkeypatch.setattr(ops, "launches", PreparedLaunches())
    with warnings.catch_warnings():
        # torch says once that an implementation is replaced.
        warnings.simplefilter("ignore")
        for name in op_names():
            library.impl(name, getattr(ops, f"_kernel_{name.removesuffix('_inference')}"), allow_override=True)
    yield
    library._destroy()


@pytest.mark.usefixtures("by_kernels")
def test_public_functions_pass_every_argument_on_to_the_kernels(tensors) -> None:
    options = {"heads": (1, 2), "sizes": (16, 32), "scale": 0.7}
    batch = tensors.ragged(
        [20, 1, 0, 3], slots=[5, 0, 3, -1], num_slots=9, initial=[True, False, True, True], rows_after=1, **options
    )
    positions, targets = (
        torch.tensor(rows, device=tensors.device) for rows in ([[9], [1], [-1], [2]], [[8], [7], [-1], [6]])
    )
    states = {"state_pool": batch.pool.tensor, "slots": batch.slots}
    with torch.no_grad():
        lightning_attn.lightning_attention_varlen(
            batch.q, batch.k, batch.v, batch.slopes, batch.cu_seqlens, **states, scale=0.7, out=batch.out.tensor,
            has_initial_state=batch.has_initial_state, snapshot=Snapshots(positions, targets),
        )  # fmt: skip
        batch.check(snapshots=[(0, 9, 8), (1, 1, 7)])
        for initial in (False, True):
            batch = tensors.ragged([5, 3], initial=initial, **options)
            lightning_attn.lightning_attention_varlen(
                batch.q, batch.k, batch.v, batch.slopes, batch.cu_seqlens, state_pool=batch.pool.tensor,
                slots=batch.slots, scale=0.7, out=batch.out.tensor, has_initial_state=initial,
            )  # fmt: skip
            batch.check()
        batch = tensors.ragged([1] * 3, slots=[5, -1, 0], **options)
        states = {"state_pool": batch.pool.tensor, "slots": batch.slots, "slopes": batch.slopes, "scale": 0.7}
        lightning_attn.lightning_decode(batch.q, batch.k, batch.v, **states, out=batch.out.tensor)
        batch.check(products=FP32)
        batch = tensors.ragged([3] * 3, slots=[5, -1, 0], **options)
        q, k, v, out = (x.unflatten(0, (3, 3)) for x in (batch.q, batch.k, batch.v, batch.out.tensor))
        states = {"state_pool": batch.pool.tensor, "slots": batch.slots, "slopes": batch.slopes}
        lightning_attn.lightning_verify(q, k, v, **states, scale=0.7, out=out)
        batch.check(states=[0] * 3, products=FP32, chunk=1)
        accepted = torch.tensor([2, 3, 3], device=tensors.device)
        lightning_attn.lightning_commit(k, v, **states, accepted=accepted)
        batch.check(states=[2, 3, 3], products=FP32, chunk=1)
        batch = tensors.ragged([20, 0, 3], initial=True, **{**options, "heads": (2, 2)})
        states = {"slopes": batch.slopes, "cu_seqlens": batch.cu_seqlens, "initial_state": batch.before[batch.slots]}
        packed = lightning_attn.lightning_attention_packed(batch.q, batch.k, batch.v, **states, scale=0.7)
        batch.check_out(packed.out)
        wanted = batch.attend(dict(enumerate(batch.lengths))).state
        tensors.assert_rounded(packed.final_state, wanted, apart=(0, 1))
        state = lightning_attn.lightning_state(batch.k, batch.v, **states, exact=True)
        tensors.assert_rounded(state, wanted, apart=(0, 1))


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("carried", [False, True], ids=["from zeros", "carried"])
def test_autograd_passes_every_argument_on_to_the_kernels(tensors, carried: bool) -> None:
    q, k, v = (tensors.normal(1, 2, 9, size) for size in (16, 16, 32))
    history = tensors.normal(1, 2, 16, 32) if carried else None
    slopes = tensors.slopes(2)
    given = [q, k, v, *([history] if carried else [])]
    d_out, d_kv = torch.randn_like(v), tensors.normal(1, 2, 16, 32)

    def gradients(given: Sequence[Tensor], form: Any) -> tuple[Tensor, ...]:
        own = [x.detach().clone().requires_grad_() for x in given]
        history = own[3] if carried else None
        if form is None:
            out, kv = lightning_attn.lightning_attention(*own[:3], slopes, kv_history=history, scale=0.7)
            kv = kv[:, :, 0]
        else:
            out, kv = tensors.padded(*own[:3], slopes, history, 0.7, form)
        return torch.autograd.grad([out, kv], own, [d_out.to(out.dtype), d_kv.to(kv.dtype)])

    def forms_of(*given: Tensor) -> list[tuple[Tensor, ...]]:
        plains = [gradients(given, form) for form in (tensors.plain, tensors.otherwise)]
        return [gradients([x.double() for x in given], tensors.exact), *plains]

    for one, wanted in zip(gradients(given, None), tensors.wanted(forms_of, given), strict=True):
        tensors.assert_rounded(one, wanted, apart=(0, 1))


@pytest.mark.usefixtures("by_kernels")
def test_calls_that_differ_in_strides_dtypes_or_scale_alone_are_not_confused(tensors) -> None:
    for dtype in (BF16, FP32):
        for scale, pool in ((1.0, "packed"), (0.5, "packed"), (0.5, "transposed")):
            for fused in (False, True):
                batch = tensors.ragged(
                    [1] * 2, heads=(1, 1), sizes=(16, 16), dtype=dtype, scale=scale, pool=pool, fused=fused
                )
                lightning_attn.lightning_decode(
                    batch.q, batch.k, batch.v, batch.pool.tensor, batch.slots, batch.slopes, scale=scale,
                    out=batch.out.tensor,
                )  # fmt: skip
                batch.check(products=FP32)


# What only a GPU shows


@gpu
@pytest.mark.torch_compile
@pytest.mark.parametrize(("function", "inputs"), BY_A_PLAN.values(), ids=BY_A_PLAN)
def test_a_plan_may_be_given_in_plain_calls_in_a_graph_and_where_torch_compiles(make, function, inputs) -> None:
    contract.check_cuda_graph(function, lambda seed: inputs(make, 5, seed=seed))
    contract.check_compiles(function, inputs(make, 3), inputs(make, 5, seed=1))


@gpu
@every_public_function
def test_a_captured_graph_replays_the_bits_of_plain_calls(make, function, inputs) -> None:
    """For other lengths, slots, states and drafts accepted in as many rows."""
    contract.check_cuda_graph(function, lambda seed: inputs(make, 5, seed=seed), replays=4)


@gpu
@pytest.mark.torch_compile
@pytest.mark.parametrize(
    ("name", "static"), [("attention", ()), ("varlen", (5,)), ("packed", ()), ("decode", (3,)), ("commit", (2,))]
)
def test_graphs_that_torch_compile_captures_replay_the_bits_of_plain_calls(make, name, static) -> None:
    function, inputs = PUBLIC[name]
    calls = [inputs(make, sequences, seed=sequences) for sequences in (5, 3, 4)]
    contract.check_compiled_graphs(function, *calls, static=static)


@gpu
@pytest.mark.parametrize("heads", [8, 64])
def test_a_captured_graph_of_a_model_replays_other_lengths_of_the_same_most(make, heads: int) -> None:
    """Of 8 heads by segments, of 64 in one go."""
    most, sequences = 9000, 6

    def inputs(seed: int) -> list[Tensor]:
        make.start(seed)
        bounds = [0, *torch.randint(most + 1, (sequences,), generator=make.host).sort().values.tolist()]
        if seed == 1:
            bounds = [0, most, most, most, most, most, most]
        q, k, v = (make.normal(most, heads, 128) for _ in range(3))
        slots = torch.randperm(8, generator=make.host)[:sequences].tolist()
        slots[seed % sequences] = -1
        positions = [[(end - begin) // 2 or -1] for begin, end in pairwise(bounds)]
        return [
            q, k, v, torch.rand(heads, generator=make.generator, device=make.device) * 0.1, make.integers(bounds),
            make.normal(16, heads, 128, 128, dtype=FP32), make.integers(slots),
            make.integers([i % 2 for i in range(sequences)]).bool(), make.integers(positions),
            make.integers([[8 + i] for i in range(sequences)]),
        ]  # fmt: skip

    contract.check_cuda_graph(attend_ragged, inputs, replays=4)


@gpu
@every_public_function
def test_no_call_waits_for_the_gpu(make, function, inputs) -> None:
    tensors = inputs(make, 5)
    contract.check_no_host_sync(lambda: function(*tensors))


@gpu
def test_a_thread_that_has_launched_nothing_may_call_with_memory_from_the_cache(device: torch.device) -> None:
    """As autograd's does: no allocation makes the context current that TMA descriptors are encoded with."""
    q, k = (torch.randn(1, 2, 300, 64, device=device).bfloat16() for _ in range(2))
    rates = lightning_attn.slopes(2).to(device)
    first = lightning_attn.lightning_attention(q, q, q, rates).out.clone()
    found: list[torch.Tensor | Exception] = []

    def call() -> None:
        try:
            lightning_attn.lightning_attention(k, k, k, rates)
            found.append(lightning_attn.lightning_attention(q, q, q, rates).out)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert_bitwise_equal(found[0], first)


@gpu
def test_backward_does_not_wait_for_the_gpu(make) -> None:
    *qkv, ed, history = make.dense(3)
    given = requiring([*qkv, history])
    contract.check_no_host_sync(lambda: torch.autograd.grad(attend(*given[:3], ed, given[3]).out.float().sum(), given))


@gpu
def test_chains_of_decoding_on_one_stream_carry_the_state(make) -> None:
    """A launch that starts before the one ahead has ended must wait on the device, or it reads an old state."""
    q, k, v, pool, slots, slopes = make.tokens(9)
    pool.zero_()
    slopes.zero_()
    steps = 200
    sums = []
    for _ in range(steps):
        k.fill_(1)
        v.fill_(2)
        lightning_attn.lightning_decode(q, k, v, pool, slots, slopes)
        # Reads of what the launch wrote, and writes of what it read.
        sums.append(torch.stack([pool[slots.clamp(min=0).long()].amax(), pool.amin()]))
        k.fill_(-7)
        v.fill_(11)
    used = slots[slots >= 0].long()
    assert (pool[used] == 2 * steps).all()
    assert [largest for largest, _ in torch.stack(sums).tolist()] == [2.0 * (step + 1) for step in range(steps)]


@gpu
def test_drafts_verified_and_committed_in_a_chain_equal_decoding(make) -> None:
    q, k, v, pool, slots, slopes = make.drafts(9)
    decoded = pool.clone()
    accepted = torch.full((9,), 5, dtype=torch.int32, device=make.device)
    for _ in range(20):
        out = lightning_attn.lightning_verify(q, k, v, pool, slots, slopes)
        lightning_attn.lightning_commit(k, v, pool, slots, slopes, accepted)
        outs = [lightning_attn.lightning_decode(q[:, t], k[:, t], v[:, t], decoded, slots, slopes) for t in range(5)]
        assert_bitwise_equal(out, torch.stack(outs, dim=1))
    assert_bitwise_equal(pool, decoded)


@gpu
def test_an_unaligned_tensor_after_an_aligned_one_of_the_same_shape_is_computed(tensors) -> None:
    for offset in (0, 0, 1, 0, 3, 8):
        for lengths in ([70, 1, 9], [1] * 5):
            batch = tensors.ragged(lengths, heads=(4, 4), sizes=(64, 64))
            for name in ("q", "k", "v"):
                tensor = getattr(batch, name)
                room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype, device=tensor.device)
                setattr(batch, name, room[offset : offset + tensor.numel()].view_as(tensor).copy_(tensor))
            if lengths[0] == 1:
                out = lightning_attn.lightning_decode(
                    batch.q, batch.k, batch.v, batch.pool.tensor, batch.slots, batch.slopes
                )
                batch.check_out(out, products=FP32)
                batch.check(out=False, products=FP32)
            else:
                out = lightning_attn.lightning_attention_varlen(
                    batch.q, batch.k, batch.v, batch.slopes, batch.cu_seqlens, state_pool=batch.pool.tensor,
                    slots=batch.slots, has_initial_state=True,
                )  # fmt: skip
                batch.check_out(out)
                batch.check(out=False)


@gpu
def test_many_sizes_do_not_grow_the_table_of_launches_past_its_bound(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "launches", PreparedLaunches(most=8))
    for sequences in range(1, 12):
        for function, inputs in PUBLIC.values():
            function(*inputs(make, sequences))
            assert len(ops.launches) <= 8


@gpu
def test_a_call_inside_another_stream_runs_there(make) -> None:
    q, k, v, ed, history = make.dense(4)
    wanted = attend(q, k, v, ed, history)
    values = [x.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, value in zip((q, k, v), values, strict=True):
            x.copy_(value)
        result = attend(q, k, v, ed, history)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_bits(result, wanted)


@gpu
@every_public_function
def test_tensors_on_a_device_that_is_not_the_current_one_are_taken_there(make, function, inputs) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    expected = function(*inputs(make, 5))
    for _ in range(2):
        results = function(*[tensor.to("cuda:1") for tensor in inputs(make, 5)])
        for one, other in zip(tensors_in(results), tensors_in(expected), strict=True):
            assert one.device == torch.device("cuda:1")
            assert_bitwise_equal(one.cpu(), other.cpu())
    assert torch.cuda.current_device() == 0


@gpu
@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
@much_memory()
def test_prefill_of_131072_tokens_takes_less_than_5_percent_of_memory_beyond_inputs_and_outputs(
    make, ragged: bool, heads: int
) -> None:
    tokens = 131072
    if torch.cuda.mem_get_info()[1] < 8 * tokens * heads * 128 * 2:
        tokens //= 8
    make.start(0)
    shape = (tokens, heads, 128) if ragged else (1, heads, tokens, 128)
    q, k, v = (torch.empty(shape, dtype=BF16, device=make.device).normal_() for _ in range(3))
    slopes = torch.rand(heads, device=make.device)
    if ragged:
        lengths = [tokens // 2 + 1, 1, tokens // 4 - 7, 0]
        cu = make.integers([0, *accumulate(lengths)])
        pool, slots = torch.zeros(4, heads, 128, 128, device=make.device), make.integers([0, 1, 2, 3])
        run: Callable[[], Any] = partial(
            lightning_attn.lightning_attention_varlen, q, k, v, slopes, cu, state_pool=pool, slots=slots,
            has_initial_state=True,
        )  # fmt: skip
    else:
        run = partial(lightning_attn.lightning_attention, q, k, v, slopes)
    given = sum(x.numel() * x.element_size() for x in (q, k, v))
    assert peak_beyond(run) < 0.05 * given


@gpu
@pytest.mark.parametrize(("sequences", "tokens"), [(1000, 64), (64, 2048), (500, 1)])
def test_prefill_of_many_short_sequences_takes_less_than_5_percent_of_memory_beyond(make, sequences, tokens) -> None:
    make.start(0)
    q, k, v = (make.normal(sequences, 8, tokens, 128) for _ in range(3))
    slopes = torch.rand(8, device=make.device)
    given = sum(x.numel() * x.element_size() for x in (q, k, v))
    # The allocator gives out blocks of 2 MiB.
    assert peak_beyond(partial(lightning_attn.lightning_attention, q, k, v, slopes)) < 0.05 * given + 2**21
