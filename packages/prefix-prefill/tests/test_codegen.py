"""What do the compilers make of the kernels, for GPUs that are not here?

The configurations are those that plans and launches make for real models: all arguments of a spec come from a Launch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import prefix_prefill
from kernel_reference.models import GPT_OSS, LLAMA3_70B, SoftmaxAttention
from kernel_reference.testing.codegen import (
    KernelSpec,
    Report,
    assert_clean,
    compile_by_target,
    compile_specs,
    launched_kernels,
    recorded_launches,
)
from kernel_reference.testing.targets import SMALL_TARGETS, TARGETS
from prefix_prefill import CascadeLevel, launch
from prefix_prefill.arguments import MergeTensors, PrefillNumbers, PrefillTensors, check_prefill
from prefix_prefill.cascade.arguments import CascadeNumbers, CascadeTensors, check_cascade, tensors_of_levels
from prefix_prefill.cascade.joined import joined_plan, prepare_joined
from prefix_prefill.cascade.launch import prepare_cascade
from prefix_prefill.plan import MOST_TOKENS, DeviceLimits, plan_prefill

pytestmark = pytest.mark.codegen

# As launch.device_limits reads them: SMs, shared memory of a program.
FOR_SM_90 = "for sm_90, "
WITHOUT_TMA = "without TMA on sm_90, "
# By the same kernel, rows gathered one by one.
GATHERED = "gathered"
# Whose keys are multiplied as the cache has them.
IN_8_BITS = "8-bit queries"
LIMITS = {
    "sm_80": DeviceLimits(108, 166912),
    "sm_90": DeviceLimits(132, 232448, hopper=True),
    "sm_100": DeviceLimits(148, 232448),
    "gfx942": DeviceLimits(304, 65536),
    "sm_89": DeviceLimits(142, 101376),
    "sm_120": DeviceLimits(170, 101376),
}
# Without products, or with those of float32, these have the same PTX for sm_80 as for sm_90, but for the target's name.
ALIKE_ON_SM_80 = re.compile("merged$|^float32|^heads of 17$")
# Of those that smaller GPUs are given.
MOST_SHARED = ("heads of 256", "gpt-oss, split")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LLAMA = LLAMA3_70B.tensor_parallel(8)
WIDE = SoftmaxAttention("heads of 256", 16, 4, 256)
NARROW = SoftmaxAttention("heads of 80", 32, 32, 80)


def empty(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype)


def caches(page_layout: str, page: int, heads: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    blocks = 64
    x = 16 // dtype.itemsize
    shapes = {
        "NHD": [(blocks, page, heads, size)] * 2,
        "HND": [(blocks, heads, page, size)] * 2,
        "x-packed": [(blocks, heads, size // x, page, x), (blocks, heads, size, page)],
    }
    return [empty(*shape, dtype=dtype) for shape in shapes[page_layout]]


def prefill(
    name: str, model: SoftmaxAttention, limits: DeviceLimits, *,
    dtype: torch.dtype = BF16, cache_dtype: torch.dtype | None = None, page: int = 16, page_layout: str = "NHD",
    new_kv: bool = False, rows: int = 2048, longest: int | None = None, splits: int | None = 1, softcap: float = 0.0,
    alibi: bool = False, scales: str | None = None, lse: bool = False, out_dtype: torch.dtype | None = None,
    skip_decode: bool = False, sequences: int = 8, columns: int = 4096, draft: bool = False, values: int | None = None,
    bound: int = MOST_TOKENS, quantize_q: bool = False, widen_bytes: int = 0,
) -> Iterator[KernelSpec]:  # fmt: skip
    """The launches of a call for this model, its window and sinks included, with the device's plan.

    splits: None leaves them to the plan; others say as much of the code. values: their head size, else that of keys.
    bound: of the tokens of a sequence.
    """
    heads, heads_kv, size = model.num_heads_q, model.num_heads_kv, model.head_dim
    q = empty(rows, heads, size, dtype=dtype)
    sizes = (size, values or size)
    k, v = [empty(rows, heads_kv, each, dtype=dtype) if new_kv else None for each in sizes]
    k_cache, v_cache = [
        caches(page_layout, page, heads_kv, each, cache_dtype or dtype)[i] for i, each in enumerate(sizes)
    ]
    shape = {None: None, "heads": (heads_kv,), "tokens": (64, page, heads_kv)}[scales]
    k_scale, v_scale = [None if shape is None else empty(*shape, dtype=FP32) for _ in range(2)]
    table, cu, seqlens = (empty(*n, dtype=torch.int32) for n in ((sequences, columns), (sequences + 1,), (sequences,)))
    per_head = [empty(heads, dtype=FP32) if there else None for there in (alibi, model.sinks)]
    out = empty(rows, heads, sizes[1], dtype=out_dtype or dtype)
    out_scale = None if out_dtype is None else empty(1, dtype=FP32)
    tensors = PrefillTensors(
        q, k, v, k_cache, v_cache, table, cu, seqlens, *per_head, k_scale, v_scale, out_scale, out,
        empty(heads, rows, dtype=FP32) if lse else None, empty(rows, dtype=torch.int64) if draft else None,
    )  # fmt: skip
    longest = rows if longest is None else longest
    left, right = model.window or (-1, 0)
    numbers = PrefillNumbers(
        longest, page_layout, size**-0.5, left, right, softcap, skip_decode, 1.0, 1.0, 1.0, 0, bound,
        quantize_q=quantize_q, widen_bytes=widen_bytes,
    )  # fmt: skip
    problem = check_prefill(tensors, numbers)
    plan = plan_prefill(problem, limits)
    if splits is not None:
        plan = replace(plan, num_splits=splits)
    for start, given in recorded_launches(launch.prepare_prefill(problem, plan, tensors), *tensors):
        beside = {"merge_pieces": "merged", "merge_splits": "merged", "widen": "before"}.get(start.kernel.fn.__name__)
        yield KernelSpec.of_launch(start, given, name=f"{name.removeprefix(FOR_SM_90)}, {beside}" if beside else name)


def cascade(model: SoftmaxAttention, limits: DeviceLimits) -> Iterator[KernelSpec]:
    """The levels of a cascade: keys that all sequences share, and their own; what merges is compiled elsewhere."""
    heads, sequences = model.num_heads_q, 64
    levels = [
        CascadeLevel(*caches("NHD", 16, model.num_heads_kv, model.head_dim, BF16),
                     *(empty(*n, dtype=torch.int32) for n in ((groups, 512), (groups + 1,), (groups,))))
        for groups in (1, sequences)
    ]  # fmt: skip
    q = empty(sequences, heads, model.head_dim)
    lse = empty(heads, sequences, dtype=FP32)
    tensors = CascadeTensors(q, tuple(levels), empty(heads, dtype=FP32), None, None, None, q, lse, None)
    numbers = CascadeNumbers(1, "NHD", 0.1, 0.0, 1.0, 1.0, 1.0, 0)
    problems, each = check_cascade(tensors, numbers), tensors_of_levels(tensors)
    plans = [plan_prefill(problem, limits) for problem in problems]
    run = prepare_cascade(problems, plans, each)
    for name, call in zip(("shared", "last"), recorded_launches(run, each), strict=False):
        yield KernelSpec.of_launch(*call, name=f"{FOR_SM_90}a cascade's {name} level")


def joined_cascade(model: SoftmaxAttention, limits: DeviceLimits) -> Iterator[KernelSpec]:
    """Three levels by one launch, and what joins their tables before it."""
    k_cache, v_cache = caches("NHD", 16, model.num_heads_kv, model.head_dim, BF16)
    levels = [
        CascadeLevel(
            k_cache, v_cache, *(empty(*n, dtype=torch.int32) for n in ((groups, 512), (groups + 1,), (groups,)))
        )
        for groups in (1, 4, 16)
    ]
    q = empty(4096, model.num_heads_q, model.head_dim)
    tensors = CascadeTensors(q, tuple(levels), None, None, None, None, q, None, None)
    numbers = CascadeNumbers(256, "NHD", 0.1, 0.0, 1.0, 1.0, 1.0, 0)
    problems, each = check_cascade(tensors, numbers), tensors_of_levels(tensors)
    plan = joined_plan(problems, limits)
    assert plan is not None
    names = ("a cascade's, before", f"{FOR_SM_90}a cascade's levels, joined", "a cascade's levels, joined, merged")
    for name, call in zip(names, recorded_launches(prepare_joined(problems, plan, each), each), strict=False):
        yield KernelSpec.of_launch(*call, name=name)


def merge() -> Iterator[KernelSpec]:
    rows, heads, size = 2048, LLAMA.num_heads_q, LLAMA.head_dim
    part, lse = empty(rows, heads, size), empty(heads, rows, dtype=FP32)
    tensors = MergeTensors(part, lse, part, lse, part, lse)
    for call in recorded_launches(launch.prepare_merge(tensors), *tensors):
        yield KernelSpec.of_launch(*call, name="two results merged")


def specs(target: str) -> Iterator[KernelSpec]:
    """The cases that ``python -m kernel_reference.testing.codegen --compare REV`` compiles too, each kernel once."""
    found: list[KernelSpec] = []
    for spec in all_specs(target):
        unnamed = replace(spec, name="")
        if unnamed not in found and not (target == "sm_80" and ALIKE_ON_SM_80.search(spec.name)):
            found.append(unnamed)
            yield spec


def all_specs(target: str) -> Iterator[KernelSpec]:
    limits = LIMITS[target]

    def portable(name: str, model: SoftmaxAttention, **options: Any) -> Iterator[KernelSpec]:
        yield from prefill(name, model, replace(limits, hopper=False), **options)

    yield from portable("Llama-3-70B TP8", LLAMA, new_kv=True)
    yield from portable("Llama-3-70B TP8, x-packed", LLAMA, new_kv=True, page_layout="x-packed")
    yield from portable("gpt-oss, split", GPT_OSS, splits=3, lse=True, page=64)
    yield from portable("heads of 256", WIDE, page_layout="HND", page=544)
    yield from portable("heads of 512", replace(WIDE, head_dim=512), page_layout="HND")
    if target != "sm_100":
        # With the plans of sm_90, and kernels that differ from the others by their sizes.
        paged: dict[str, Any] = {"page_layout": "x-packed", "page": 64}
        yield from portable("Llama-3-70B TP8, x-packed, pages of 64", LLAMA, new_kv=True, **paged)
        drafts: dict[str, Any] = {"alibi": True, "lse": True, "longest": 63, "draft": True}
        yield from portable("heads of 80 in float16, x-packed", NARROW, dtype=FP16, page_layout="x-packed", **drafts)
        yield from portable("heads of 17", replace(NARROW, head_dim=17), rows=64, longest=20)
        yield from portable("float32, capped", LLAMA, dtype=FP32, softcap=30.0, new_kv=True)
        yield from portable("float32, heads of 256", WIDE, dtype=FP32)
    yield from portable(
        "8-bit queries, decoding", LLAMA, cache_dtype=E4M3, scales="heads", rows=64, longest=1, skip_decode=True,
        quantize_q=True,
    )  # fmt: skip
    # gfx942 and sm_80 have no instructions for such outputs.
    out_dtype = E4M3 if target in ("sm_90", "sm_100") else None
    yield from portable("8 bits, scales of tokens", GPT_OSS, cache_dtype=E5M2, scales="tokens", out_dtype=out_dtype)
    yield from merge()
    if not limits.hopper:
        return

    # What TMA does not load.
    yield from prefill(f"{WITHOUT_TMA}x-packed", LLAMA, limits, page_layout="x-packed", values=64, lse=True)
    yield from prefill(f"{WITHOUT_TMA}x-packed, decoding", LLAMA, limits, page_layout="x-packed", rows=64, longest=1)

    def hopper(name: str, model: SoftmaxAttention, **options: Any) -> Iterator[KernelSpec]:
        yield from prefill(f"{FOR_SM_90}{name}", model, limits, **options)

    yield from hopper("128", LLAMA, new_kv=True, page=64)
    yield from hopper(f"128, {GATHERED}", LLAMA, page=1, splits=None)
    yield from hopper(f"80, new keys, {GATHERED}", NARROW, page=12, rows=64, longest=1, new_kv=True)
    yield from hopper("64, new keys, a window, sinks, lse", GPT_OSS, new_kv=True, lse=True, out_dtype=E4M3)
    yield from hopper("x-packed, new keys", LLAMA, page_layout="x-packed", new_kv=True, splits=None)
    yield from hopper("64 rows, split", LLAMA, rows=64, longest=1, splits=4)
    yield from hopper("96 in float16, capped", replace(LLAMA, head_dim=96), dtype=FP16, page=544, softcap=30.0)
    yield from hopper("128, capped", LLAMA, softcap=30.0)
    yield from hopper("72, decoding", replace(NARROW, head_dim=72), rows=64, longest=1, new_kv=True)
    yield from hopper("192, new keys", replace(LLAMA, head_dim=192), new_kv=True)
    yield from hopper("256, new keys, drafts", WIDE, new_kv=True, page=64, rows=512, longest=63, draft=True)
    yield from hopper("192, values of 128", replace(LLAMA, head_dim=192), values=128, page=64)
    yield from hopper("512, new keys", replace(WIDE, head_dim=512), new_kv=True, page=64, splits=2)
    yield from cascade(LLAMA, limits)
    yield from joined_cascade(LLAMA, limits)
    yield from hopper("256 with slopes", WIDE, page_layout="HND", page=64, alibi=True)
    yield from hopper("8-bit cache", LLAMA, cache_dtype=E4M3, scales="heads", splits=2)
    yield from hopper("8-bit cache widened", LLAMA, cache_dtype=E4M3, scales="heads", sequences=1, widen_bytes=2**30)
    of_8_bits: dict[str, Any] = {"cache_dtype": E4M3, "quantize_q": True}
    yield from hopper(f"{IN_8_BITS}, a window, sinks", GPT_OSS, page=64, lse=True, **of_8_bits)
    yield from hopper(f"{IN_8_BITS}, 80, decoding", replace(LLAMA, head_dim=80), rows=64, longest=1, **of_8_bits)
    yield from hopper("128, 8-bit cache, decoding", LLAMA, cache_dtype=E4M3, rows=64, longest=1, splits=None)
    # They hold all that calls without new keys do, and those with scales of heads.
    yield from hopper("8-bit cache, scales of tokens, new keys", LLAMA, cache_dtype=E5M2, scales="tokens", new_kv=True)


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_by_target(specs)


def test_every_kernel_compiles_for_every_target_without_traps_or_spills_in_its_main_loop(reports) -> None:
    """What a persistent program keeps from tile to tile may be in memory, and what its scheduler looks up, which no
    other warp waits for: at most 448 bytes a thread.
    """
    persistent = [report for report in reports if report.spec.startswith(FOR_SM_90)]
    # An address, and a count that is loaded and stored where a tile of keys has masked values, and nowhere else.
    assert_clean(persistent, most_stack_outside_loops=448, most_in_loops=2)
    without_tma = [report for report in reports if report.spec.startswith(WITHOUT_TMA)]
    # The quickest tiles, as measured, leave no register for what only masked tiles and the epilogue use.
    assert_clean(without_tma, most_stack_outside_loops=96)
    assert_clean([report for report in reports if report not in persistent + without_tma])
    assert {report.target for report in reports} == set(TARGETS)


def test_what_takes_most_shared_memory_compiles_for_gpus_that_have_99_kib_of_it() -> None:
    reports = compile_by_target(
        lambda target: [spec for spec in specs(target) if spec.name in MOST_SHARED], SMALL_TARGETS
    )
    assert len(reports) == 2 * len(SMALL_TARGETS)
    # Triton 3.6 spills 8 bytes of one of them on sm_120, 3.7 none.
    assert_clean(reports, most_stack=8)
    assert all(report.uses_tensor_cores for report in reports)


def test_what_is_in_16_bits_is_multiplied_on_tensor_cores(reports: list[Report]) -> None:
    # What merges results, and what widens a cache before, multiplies nothing.
    attending = [report for report in reports if "merged" not in report.spec and not report.spec.endswith("before")]
    for report in attending:
        multiplied = any(opcode.startswith(("HMMA", "HGMMA", "UTCHMMA", "v_mfma")) for opcode in report.opcodes)
        # float32 is multiplied as it is.
        assert multiplied == ("float32" not in report.spec) or report.target == "gfx942", report.spec
    assert {report.target for report in attending} == set(TARGETS)


def test_no_layout_is_loaded_number_by_number(reports: list[Report]) -> None:
    loaded = [report for report in reports if report.spec.startswith("Llama") and report.target != "gfx942"]
    assert len(loaded) == 8
    for report in loaded:
        # 32: what there is one of for each row, as pages and lengths.
        assert report.load_bits <= {32, 64, 128}, report.spec


def test_every_consumer_on_sm_90_moves_rows_by_16_bytes(reports: list[Report]) -> None:
    """Triton knows of a stride whether it is 1 and whether it is a multiple of 16: strides of heads of 72 are not, and
    in the partitions of a kernel 3.6 forgets all of them that are 1.
    """
    for report in reports:
        if report.spec.startswith(FOR_SM_90):
            assert report.load_bits <= {32, 64, 128}, report.spec


def test_the_kernel_for_sm_90_loads_by_tma_and_multiplies_by_wgmma(reports) -> None:
    hopper = [report for report in reports if report.spec.startswith(FOR_SM_90)]
    assert len(hopper) == 23
    for report in hopper:
        assert report.uses("UTMALDG") == (report.spec != f"{FOR_SM_90}128, {GATHERED}"), report.spec
        # 16 bytes a lane, which the stage's barrier counts.
        assert report.uses("LDGSTS.E.BYPASS.128") == report.uses("ARRIVES.LDGSTSBAR") == (GATHERED in report.spec)
        assert report.uses_tensor_cores, report.spec
        assert report.uses("QGMMA") == (IN_8_BITS in report.spec)
        assert report.shared <= LIMITS["sm_90"].shared_memory, report.spec


def test_the_largest_tiles_fit_in_the_64_kib_of_sm_75() -> None:
    """Heads of 256 in the caches that take most: in 16 bits, and x-packed in 8."""
    limits = DeviceLimits(40, 65536, turing=True)
    options = [{"page_layout": "HND", "page": 544}, {"page_layout": "x-packed", "cache_dtype": E4M3, "scales": "heads"}]
    largest = [spec for each in options for spec in prefill(str(each), WIDE, limits, dtype=FP16, **each)]
    reports = compile_specs(largest, ["sm_75"], processes=1)
    assert_clean(reports)
    for report in reports:
        assert 40 * 1024 < report.shared <= limits.shared_memory, report


def test_a_layer_needs_four_kernels_for_life_whatever_its_batches_are() -> None:
    """A server has another batch size, another number of rows and a wider table at each step; compiling takes 2 s."""
    of_128 = ({}, {"new_kv": True, "page": 64}, {"page": 1}, {"page_layout": "x-packed", "new_kv": True})
    for model, options in (*((LLAMA, options) for options in of_128), (WIDE, {}), (replace(WIDE, window=(127, 0)), {})):
        kernels = set()
        for sequences, longest, bound in itertools.product((1, 3, 17, 256), (1, 5, 77, 2048), (21, 500, MOST_TOKENS)):
            rows = max(sequences * longest - sequences // 2, 1)
            for spec in prefill(
                "", model, LIMITS["sm_90"], rows=rows, longest=longest, sequences=sequences, splits=None, lse=True,
                columns=4096 + sequences, bound=bound, **options,
            ):  # fmt: skip
                kernels.add(repr((spec.kernel, spec.signature, spec.constexprs, spec.aligned)))
        # The portable kernel has one for drafts, and one that merges all splits. In short windows one does.
        assert len(kernels) == (1 if model.window else 4), (options, kernels)


def test_no_kernel_is_left_out() -> None:
    assert {spec.kernel for spec in specs("sm_90")} == launched_kernels(prefix_prefill)
