"""What do the compilers make of the kernels, for GPUs that are not here?

The configurations are those that plans and launches make for real models: all arguments of a spec come from a Launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import lightning_attn
from kernel_reference.launching import Launch
from kernel_reference.models import MINIMAX_01
from kernel_reference.testing.codegen import (
    KernelSpec,
    Report,
    assert_clean,
    compile_by_target,
    compile_specs,
    launched_kernels,
    recorded_launches,
)
from kernel_reference.testing.targets import TARGETS
from lightning_attn import arguments, launch, tensors
from lightning_attn.fitting import apart, besides, staged, staged_by_mean, widened
from lightning_attn.gradients import launch as gradients_launch
from lightning_attn.packed import arguments as packed_arguments
from lightning_attn.packed import launch as packed_launch
from lightning_attn.packed.plan import plan_state
from lightning_attn.plan import (
    DecodePlan,
    DeviceLimits,
    Heads,
    PrefillPlan,
    plan_decode,
    plan_prefill,
)
from lightning_attn.trees import arguments as tree_arguments
from lightning_attn.trees import launch as tree_launch

pytestmark = pytest.mark.codegen

# As launch.device_limits reads them: SMs, shared memory of a program.
LIMITS = {
    "sm_80": DeviceLimits(108, 166912, bf16=True),
    "sm_90": DeviceLimits(132, 232448, hopper=True, dependent_launch=True, bf16=True),
    "sm_100": DeviceLimits(148, 232448, blackwell=True, dependent_launch=True, bf16=True),
    "gfx942": DeviceLimits(304, 65536),
}
# Those with less shared memory, for which the largest tiles are compiled. sm_75 multiplies bfloat16 without tensor
# cores, in more registers than there are.
SMALL_LIMITS = {
    "sm_75": DeviceLimits(40, 65536),
    "sm_89": DeviceLimits(142, 101376, bf16=True),
    "sm_120": DeviceLimits(170, 101376, blackwell=True, dependent_launch=True, bf16=True),
}
MINIMAX = Heads(MINIMAX_01.num_heads, MINIMAX_01.num_heads, MINIMAX_01.head_qk, MINIMAX_01.head_v)
MINIMAX_TP8 = Heads(8, 8, MINIMAX_01.head_qk, MINIMAX_01.head_v)
# Whose strides are no multiples of 16.
ODD_SIZES = Heads(64, 64, 72, 40)
WIDE = Heads(64, 64, 256, 256)
LARGER_TP8 = Heads(8, 8, 192, 192)
GROUPED = Heads(16, 64, 64, 192)


def launches(
    op: str, given: tuple[Any, ...], numbers: tuple[Any, ...], plan: Any
) -> list[tuple[Launch, tuple[Any, ...]]]:
    """The launches that an op makes with this plan, each with its tensors."""
    group = {"attention_backward": "AttentionBackward", "verify": "Decode"}.get(op, op.title())
    t = getattr(tensors, group)(*given)
    problem = getattr(arguments, f"check_{op}")(t, *numbers)
    room = gradients_launch if op == "attention_backward" else launch
    prepare = getattr(room, f"prepare_{'decode' if op == 'verify' else op}")
    return recorded_launches(prepare(problem, plan, t), t)


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype)


def all_specs(target: str) -> Iterator[KernelSpec]:
    limits = {**LIMITS, **SMALL_LIMITS}[target]

    def dense(
        name: str, heads: Heads, dtype: torch.dtype, plan: PrefillPlan | None = None, *, forward: bool = False
    ) -> Iterator[KernelSpec]:
        """The prefill backwards, which holds all that others do; the one forward too if wanted."""
        rows = 2 * 4096
        q, k = (empty(1, heads.num_heads, rows, heads.head_qk, dtype=dtype) for _ in range(2))
        v = empty(1, heads.num_heads, rows, heads.head_v, dtype=dtype)
        out, state = torch.empty_like(v), empty(1, heads.num_heads, 1, heads.head_qk, heads.head_v, dtype=torch.float32)
        rates, history = empty(heads.num_heads, dtype=torch.float32), state[:, :, 0]
        plan = plan or plan_prefill(heads, str(dtype).removeprefix("torch."), limits, suits_tma=True)
        if forward:
            calls = launches("attention", (q, k, v, rates, history, out, state), (1.0,), plan)
            for i, call in enumerate(calls):
                yield KernelSpec.of_launch(*call, name=f"{name}, forward {i}")
        given = (q, k, v, rates, history, out, state, *map(torch.empty_like, (q, k, v, history)))
        calls = launches("attention_backward", given, (1.0,), plan)
        # The last of the three prefills goes backwards and keeps its final state.
        for i, call in enumerate(calls[-(len(calls) // 3) :]):
            spec = KernelSpec.of_launch(*call, name=f"{name}, backward {i}")
            # It is the same for all dtypes and sizes.
            if not spec.kernel.endswith("carry_states") or (heads == MINIMAX_TP8 and dtype == torch.bfloat16):
                yield spec

    def ragged(
        name: str, heads: Heads, dtype: torch.dtype, snapshots: int, plan: PrefillPlan | None = None,
        tokens: int = 8192, sequences: int = 16,
    ) -> Iterator[KernelSpec]:  # fmt: skip
        q, k = (empty(tokens, heads.num_heads_qk, heads.head_qk, dtype=dtype) for _ in range(2))
        v = empty(tokens, heads.num_heads_v, heads.head_v, dtype=dtype)
        out = empty(tokens, heads.num_heads, heads.head_v, dtype=dtype)
        pool = empty(64, heads.num_heads, heads.head_qk, heads.head_v, dtype=torch.float32)
        cu, slots = empty(sequences + 1, dtype=torch.int32), empty(sequences, dtype=torch.int32)
        has = empty(sequences, dtype=torch.bool)
        marks = [empty(sequences, snapshots, dtype=torch.int32) if snapshots else None for _ in range(2)]
        rates = empty(heads.num_heads, dtype=torch.float32)
        plan = plan or plan_prefill(heads, str(dtype).removeprefix("torch."), limits, True, snapshots > 0)
        given = (q, k, v, rates, cu, pool, slots, has, *marks, out)
        for i, call in enumerate(launches("varlen", given, (False, 1.0), plan)):
            yield KernelSpec.of_launch(*call, name=f"{name}, ragged {i}")

    def recurrent(name: str, heads: Heads, tokens: int, plan: DecodePlan, *kinds: str) -> Iterator[KernelSpec]:
        q, k = (empty(32, tokens, heads.num_heads_qk, heads.head_qk) for _ in range(2))
        v = empty(32, tokens, heads.num_heads_v, heads.head_v)
        out = empty(32, tokens, heads.num_heads, heads.head_v)
        pool = empty(64, heads.num_heads, heads.head_qk, heads.head_v, dtype=torch.float32)
        slots, rates = empty(32, dtype=torch.int32), empty(heads.num_heads, dtype=torch.float32)
        tensors_of = {
            "decode": (q[:, 0], k[:, 0], v[:, 0], pool, slots, rates, out[:, 0]),
            "verify": (q, k, v, pool, slots, rates, out),
            "commit": (k, v, pool, slots, rates, empty(32, dtype=torch.int32)),
        }
        for kind in kinds:
            numbers = () if kind == "commit" else (1.0,)
            calls = launches(kind, tensors_of[kind], numbers, plan)
            yield from (KernelSpec.of_launch(*call, name=f"{name}, {kind}") for call in calls)

    def states(
        name: str, heads: Heads, dtype: torch.dtype, *, keeps: bool, in_lanes: bool = False, sequences: int = 8
    ) -> Iterator[KernelSpec]:  # fmt: skip
        """States alone and, of packed sequences, what fills in those of empty ones."""
        tokens, num_heads = 8192, heads.num_heads
        k, v = (empty(tokens, num_heads, size, dtype=dtype) for size in (heads.head_qk, heads.head_v))
        rates, cu = empty(num_heads, dtype=torch.float32), empty(sequences + 1, dtype=torch.int32)
        state = empty(sequences, num_heads, heads.head_qk, heads.head_v, dtype=torch.float32)
        t = tensors.State(k, v, rates, cu, state, state)
        problem = packed_arguments.check_state(t, 1.0, False, False)
        plan = plan_state(heads, dtype == torch.float32, limits, in_lanes, in_lanes)
        calls = recorded_launches(packed_launch.prepare_state(problem, plan, t), t)
        if keeps:
            packed = tensors.Packed(k, k, v, rates, cu, state, torch.empty_like(v), state)
            problem = packed_arguments.check_packed_attention(packed, 1.0)
            prefill = plan_prefill(heads, str(dtype).removeprefix("torch."), limits)
            calls.append(recorded_launches(packed_launch.prepare_packed(problem, prefill, packed), packed)[-1])
        for i, call in enumerate(calls):
            yield KernelSpec.of_launch(*call, name=f"{name}, states {i}")

    def branching(name: str, heads: Heads, plan: DecodePlan) -> Iterator[KernelSpec]:
        nodes = 32
        q, k, v, out = (empty(32, nodes, heads.num_heads, heads.head_qk) for _ in range(4))
        pool = empty(64, heads.num_heads, heads.head_qk, heads.head_v, dtype=torch.float32)
        slots, rates = empty(32, dtype=torch.int32), empty(heads.num_heads, dtype=torch.float32)
        parents = empty(32, nodes, dtype=torch.int32)
        tree = tensors.TreeVerify(q, k, v, pool, slots, rates, parents, out)
        run = tree_launch.prepare_verify_tree(tree_arguments.check_verify_tree(tree, 1.0), plan, tree)
        yield from (KernelSpec.of_launch(*call, name=f"{name}, tree") for call in recorded_launches(run, tree))
        path = tensors.PathCommit(k, v, pool, slots, rates, slots, parents)
        run = tree_launch.prepare_commit_path(tree_arguments.check_commit_path(path), plan, path)
        yield from (KernelSpec.of_launch(*call, name=f"{name}, path") for call in recorded_launches(run, path))

    of_states = states("MiniMax-01", MINIMAX, torch.bfloat16, keeps=True)
    decoding, wide_decoding = (replace(plan_decode(heads, limits), hopper=False) for heads in (MINIMAX, WIDE))
    # The small ones where registers are fewest, and on one target of another make.
    if target in ("sm_90", "gfx942"):
        yield from branching("MiniMax-01", MINIMAX, decoding)
    yield from of_states if target in ("sm_90", "sm_100") else [next(of_states)]
    yield next(states("float32", MINIMAX, torch.float32, keeps=False))
    yield from dense(
        "MiniMax-01", MINIMAX, torch.bfloat16, plan_prefill(MINIMAX, "bfloat16", limits), forward=target == "sm_90"
    )
    yield from dense("head sizes 72 and 40", ODD_SIZES, torch.bfloat16)
    yield from dense("float16", MINIMAX, torch.float16)
    yield from dense("token by token", MINIMAX, torch.float32, PrefillPlan(1, 16, 0, 1, 1, block_d=128))
    yield from ragged(
        "MiniMax-01 TP8", MINIMAX_TP8, torch.bfloat16, 2, plan_prefill(MINIMAX_TP8, "bfloat16", limits, snapshots=True)
    )
    yield from ragged("head sizes of 256", WIDE, torch.bfloat16, 0, plan_prefill(WIDE, "bfloat16", limits))
    # Half a minute to compile, where a product is six.
    if target in ("sm_90", "gfx942"):
        yield from ragged("head sizes of 256 in float32", WIDE, torch.float32, 0)
    # Verifying holds all that the others do.
    others = ("decode", "commit") if target in ("sm_90", "gfx942") else ()
    yield from recurrent("MiniMax-01", MINIMAX, 4, decoding, "verify", *others)
    yield from recurrent("head sizes of 256", WIDE, 16, wide_decoding, "verify")
    if limits.hopper:
        yield from states("for sm_90", MINIMAX, torch.bfloat16, keeps=False, in_lanes=True)
        # Of few sequences a launch behind adds lanes up.
        yield from states("for sm_90, larger heads", WIDE, torch.bfloat16, keeps=False, in_lanes=True, sequences=2)
        yield next(states("for sm_90, lanes in float32", MINIMAX, torch.float32, keeps=False, in_lanes=True))
        tokens = replace(decoding, hopper=True)
        yield from recurrent("for sm_90, head sizes of 256", WIDE, 16, replace(tokens, block_e=32), "verify")
        yield from recurrent("for sm_90", MINIMAX, 4, tokens, "verify", "decode")
        yield from recurrent("for sm_90, columns", MINIMAX, 1, replace(tokens, lines=False), "decode")
        yield next(branching("for sm_90", MINIMAX, tokens))
        by_roles = plan_prefill(MINIMAX_TP8, "bfloat16", limits, True)
        one = staged(plan_prefill(MINIMAX, "bfloat16", limits, True), MINIMAX, 1)
        yield from dense("for sm_90", MINIMAX, torch.bfloat16, one)
        yield from dense("for sm_90, segments", MINIMAX_TP8, torch.bfloat16)
        wide = widened(by_roles, MINIMAX_TP8, 16, limits)
        # Of float16, which takes more registers than bfloat16.
        yield list(dense("for sm_90, 128 columns", MINIMAX_TP8, torch.float16, wide))[-1]
        yield from ragged("for sm_90, head sizes of 256, snapshots", WIDE, torch.float16, 2)
        by_two = ragged("for sm_90, two warpgroups follow", Heads(16, 16, 72, 72), torch.bfloat16, 0)
        yield from (spec for spec in by_two if spec.kernel.endswith("hopper_roles:prefill"))
        yield from dense("for sm_90 in float32", MINIMAX_TP8, torch.float32)
        larger = dense("for sm_90, two launches in float32", LARGER_TP8, torch.float32, forward=True)
        yield from (spec for spec in larger if "forward" in spec.name and spec.kernel.endswith("float32:prefill"))
        yield from ragged("for sm_90, grouped", GROUPED, torch.bfloat16, 0)
        for heads, name, dtype in ((MINIMAX, "bfloat16", torch.bfloat16), (MINIMAX_TP8, "float32", torch.float32)):
            plan = apart(staged_by_mean(plan_prefill(heads, name, limits, True), heads, 64, 64, limits), heads, 64, 64)
            yield from ragged(f"for sm_90, tokens apart in {name}", heads, dtype, 0, plan, 64, 64)
        for name, dtype in (("float16", torch.float16), ("float32", torch.float32)):
            short = staged(plan_prefill(MINIMAX_TP8, name, limits, True), MINIMAX_TP8, 1)
            plan = besides(short, MINIMAX_TP8, 4128, 33, limits)
            long = ragged(f"for sm_90, long segments in {name}", MINIMAX_TP8, dtype, 0, plan, 4128, 33)
            yield from (spec for spec in long if spec.kernel.endswith("prefill"))
        # With segments it holds all that it does without; the other launches are those above.
        specs = ragged("for sm_90, segments and snapshots", MINIMAX_TP8, torch.bfloat16, 2)
        yield from (spec for spec in specs if spec.kernel.endswith("hopper:prefill"))


def specs(target: str) -> list[KernelSpec]:
    """The cases that ``python -m kernel_reference.testing.codegen --compare REV`` compiles too."""
    return list(all_specs(target))


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_by_target(specs)


def test_every_kernel_compiles_for_every_target_without_spills_or_traps(reports: list[Report]) -> None:
    float32 = [report for report in reports if "in float32" in report.spec]
    # The sums of two pieces in flight while the next chunk is loaded.
    assert_clean(float32, most_stack=96)
    # A state of 256 rows takes half of a thread's registers; what is stored is read behind the loop over chunks.
    of_256 = [report for report in reports if report.spec == "for sm_90, head sizes of 256, snapshots, ragged 0"]
    assert_clean(of_256, most_stack_outside_loops=8)
    # Programs that go round hold what belongs to all items.
    round_ = [report for report in reports if report.spec == "for sm_90, tokens apart in bfloat16, ragged 1"]
    assert_clean(round_, most_stack_outside_loops=48)
    # Scores' warps, which wait half of their time, have 104 registers where two warpgroups follow a state.
    by_two = [report for report in reports if report.spec.startswith("for sm_90, two warpgroups follow")]
    assert_clean(by_two, most_stack_outside_loops=8, most_in_loops=2)
    assert_clean([report for report in reports if report not in float32 + of_256 + round_ + by_two])
    assert {report.target for report in reports} == set(TARGETS)


def test_the_largest_tiles_fit_the_shared_memory_of_smaller_gpus() -> None:
    reports = []
    for target in SMALL_LIMITS:
        largest = [spec for spec in all_specs(target) if spec.name == "head sizes of 256, ragged 0"]
        reports += compile_specs(largest, [target], processes=1)
    assert [report.target for report in reports] == [*SMALL_LIMITS]
    assert_clean([report for report in reports if report.target != "sm_75"])
    for report in reports:
        assert not report.error
        assert 0 < report.shared <= SMALL_LIMITS[report.target].shared_memory


def test_prefill_in_bfloat16_multiplies_on_tensor_cores(reports: list[Report]) -> None:
    hopper = [report for report in reports if report.spec.startswith("for sm_90, grouped")]
    assert len(hopper) == 1
    assert hopper[0].uses_tensor_cores
    assert hopper[0].uses("UTMALDG")
    assert hopper[0].uses("UTMASTG")
    portable = [report for report in reports if report.spec == "MiniMax-01, backward 0"]
    assert {report.target for report in portable} == set(TARGETS)
    for report in portable:
        # Tiles of 32 rows are too few for the matrix instructions of a whole warpgroup.
        assert any(opcode.startswith(("HMMA", "HGMMA", "v_mfma")) for opcode in report.opcodes), report
    states = {(report.spec, report.target): report for report in reports if report.spec.endswith("states 0")}
    # Those in lanes are for sm_90 alone.
    assert len(states) == 2 * len(TARGETS) + 3 * ("sm_90" in TARGETS)
    assert all(report.uses_tensor_cores for report in states.values())


def test_rows_of_heads_of_odd_multiples_of_8_are_loaded_by_16_bytes(reports: list[Report]) -> None:
    """Of strides Triton knows whether they are multiples of 16, and these are not: it would go two bytes at a time."""
    of_rows = set(TARGETS) - {"sm_90"}
    odd = [r for r in reports if r.spec == "head sizes 72 and 40, backward 0" and r.target in of_rows]
    assert {report.target for report in odd} == of_rows
    for report in odd:
        assert 128 in report.load_bits, (report.target, report.load_bits)
        assert 16 not in report.load_bits, (report.target, report.load_bits)


def test_no_kernel_is_left_out() -> None:
    assert {spec.kernel for spec in specs("sm_90")} == launched_kernels(lightning_attn)


def kernel_of(launch: Launch, given: tuple[Any, ...]) -> tuple[str, ...]:
    """What tells compiled kernels apart."""
    spec = KernelSpec.of_launch(launch, given)
    parts = (spec.signature, spec.constexprs, spec.options, spec.aligned)
    return (spec.kernel, *(repr(sorted(part.items()) if isinstance(part, dict) else part) for part in parts))


def batches(heads: Heads, dtype: torch.dtype, snapshots: bool) -> Iterator[tuple[Launch, tuple[Any, ...]]]:
    """The launches of a layer's life on sm_90: ragged batches of every kind, and decoding.

    Who keeps snapshots always says at which positions, -1 where there are none.
    """
    pool = empty(300, heads.num_heads, heads.head_qk, heads.head_v, dtype=torch.float32)
    rates = empty(heads.num_heads, dtype=torch.float32)

    def rows(count: int) -> list[torch.Tensor]:
        """q, k, v and out."""
        q, k = (empty(count, heads.num_heads_qk, heads.head_qk, dtype=dtype) for _ in range(2))
        v = empty(count, heads.num_heads_v, heads.head_v, dtype=dtype)
        return [q, k, v, empty(count, heads.num_heads, heads.head_v, dtype=dtype)]

    of_each = (1, 1), (1, 16), (1, 4097), (2, 4096), (16, 16), (17, 999), (33, 4128), (128, 128), (255, 3000)
    for sequences, tokens in of_each:
        q, k, v, out = rows(tokens)
        cu, slots = empty(sequences + 1, dtype=torch.int32), empty(sequences, dtype=torch.int32)
        for marks in (1, 2, 16) if snapshots else (0,):
            wanted = [empty(sequences, marks, dtype=torch.int32) if marks else None for _ in range(2)]
            given = (q, k, v, rates, cu, pool, slots, empty(sequences, dtype=torch.bool), *wanted, out)
            yield from launches("varlen", given, (False, 1.0), None)
    for sequences in (1, 2, 15, 16, 17, 64, 256):
        q, k, v, out = rows(sequences)
        given = (q, k, v, pool, empty(sequences, dtype=torch.int32), rates, out)
        yield from launches("decode", given, (1.0,), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [
    MINIMAX, MINIMAX_TP8, Heads(8, 8, 96, 96), Heads(32, 32, 72, 72), Heads(8, 8, 192, 192), WIDE,
], ids=str)  # fmt: skip
@pytest.mark.parametrize("snapshots", [False, True], ids=["", "snapshots"])
def test_a_layer_takes_at_most_6_kernels_whatever_its_batches(
    heads: Heads, dtype: torch.dtype, snapshots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "device_limits", lambda _: LIMITS["sm_90"])
    kernels = set()
    for call in batches(heads, dtype, snapshots):
        kernels.add(kernel_of(*call))
    assert len(kernels) <= 6, sorted(kernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [MINIMAX, MINIMAX_TP8], ids=str)
def test_one_kernel_makes_gradients_of_keys_and_of_values_where_states_have_none(
    heads: Heads, dtype: torch.dtype
) -> None:
    """A third of what the first backward compiles."""
    plan = plan_prefill(heads, str(dtype).removeprefix("torch."), LIMITS["sm_90"], suits_tma=True)
    q, k, v, d_out, d_q, d_k, d_v = (empty(1, heads.num_heads, 8192, heads.head_qk, dtype=dtype) for _ in range(7))
    rates = empty(heads.num_heads, dtype=torch.float32)
    calls = launches("attention_backward", (q, k, v, rates, None, d_out, None, d_q, d_k, d_v), (1.0,), plan)
    of_dk, of_dv = (calls[len(calls) // 3 * walk : len(calls) // 3 * (walk + 1)] for walk in (1, 2))
    assert [kernel_of(*call) for call in of_dv] == [kernel_of(*call) for call in of_dk]
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v, d_out, d_q, d_k, d_v)]
    cu = empty(4, dtype=torch.int32)
    t = tensors.PackedBackward(*rows[:3], rates, cu, None, rows[3], None, *rows[4:])
    run = packed_launch.prepare_packed_backward(packed_arguments.check_packed_backward(t, 1.0), plan, t)
    calls = recorded_launches(run, t)
    # And none fills in the states of sequences without tokens.
    of_dk, of_dv = (calls[len(calls) // 3 * walk : len(calls) // 3 * (walk + 1)] for walk in (1, 2))
    assert [kernel_of(*call) for call in of_dv] == [kernel_of(*call) for call in of_dk]
