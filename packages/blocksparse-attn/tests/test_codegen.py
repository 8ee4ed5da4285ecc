"""What do the compilers make of the kernels, for GPUs that are not here?

The configurations are those that plans and launches make for real models: all arguments of a spec come from a Launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import blocksparse_attn
from blocksparse_attn import launch
from blocksparse_attn.arguments import Options, Tensors, check_attend
from blocksparse_attn.choosing.launch import prepare_choose, prepare_pack
from blocksparse_attn.gradients import arguments as gradients
from blocksparse_attn.gradients.launch import prepare_backward
from blocksparse_attn.gradients.plan import plan_backward
from blocksparse_attn.plan import DeviceLimits, plan_attention
from blocksparse_attn.selected import arguments as selected
from blocksparse_attn.selected import launch as selected_launch
from blocksparse_attn.selected.gradients import arguments as selected_gradients
from blocksparse_attn.selected.gradients.launch import prepare_backward as selected_backward_launch
from blocksparse_attn.selected.gradients.plan import plan_backward as plan_selected_backward
from blocksparse_attn.selected.plan import SelectedPlan, plan_selected
from blocksparse_attn.sharing.launch import prepare_merge_parts, prepare_own_lists, prepare_pack_parts
from kernel_reference.models import PHI3_SMALL
from kernel_reference.testing.codegen import (
    KernelSpec,
    Report,
    assert_clean,
    compile_specs,
    launched_kernels,
    recorded_launches,
)
from kernel_reference.testing.targets import SMALL_TARGETS, TARGETS

pytestmark = pytest.mark.codegen

# As launch.device_limits reads them: SMs, shared memory of a program.
LIMITS = {
    "sm_80": DeviceLimits(108, 166912),
    "sm_90": DeviceLimits(132, 232448, hopper=True),
    "sm_100": DeviceLimits(148, 232448),
    "gfx942": DeviceLimits(304, 65536),
    "sm_89": DeviceLimits(142, 101376),
    "sm_120": DeviceLimits(170, 101376),
    "sm_75": DeviceLimits(40, 65536),
}
# Of those that smaller GPUs are given.
MOST_SHARED = ("heads of 256", "Phi-3-small, x-packed")
# Without products, or with those of float32, these have the same PTX for sm_80 as for sm_90, but for the target's name.
NOT_MULTIPLIED = ("merged", "unite_lists", "choosing", "shared,")
ALIKE_ON_SM_80 = re.compile(
    "|".join(NOT_MULTIPLIED) + "|selected, float32|gradients, float32, backward_queries|^float32(, heads of 256)?$"
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PHI3 = (PHI3_SMALL.num_heads_q, PHI3_SMALL.num_heads_kv, PHI3_SMALL.head_dim)


def attending(
    name: str, limits: DeviceLimits, *, heads: tuple[int, int, int] = PHI3,
    head_dim_v: int | None = None, dtype: torch.dtype = BF16, kind: str = "ragged", page: int = 16,
    layout: str = "NHD", rows: int = 4096, longest: int = 1024, blocks: tuple[int, int] = (64, 64),
    splits: int | None = 1, softcap: float = 0.0, left: int = -1, sinks: bool = False, lse: bool = False,
    entries: int = 512, sequences: int = 8, reach: int = 0,
) -> Iterator[KernelSpec]:  # fmt: skip
    """The launches of a call, with the device's plan."""
    pages = 512
    num_heads, heads_kv, size = heads
    size_v = size if head_dim_v is None else head_dim_v
    front: tuple[int, ...] = (sequences, rows // sequences) if kind == "padded" else (rows,)
    q, out = (torch.empty(*front, num_heads, n, dtype=dtype) for n in (size, size_v))
    if kind == "paged":
        x = 16 // dtype.itemsize
        shapes = {
            "NHD": [(pages, page, heads_kv, n) for n in (size, size_v)],
            "HND": [(pages, heads_kv, page, n) for n in (size, size_v)],
            "x-packed": [(pages, heads_kv, size // x, page, x), (pages, heads_kv, size_v, page)],
        }[layout]
    else:
        shapes = [(*front, heads_kv, n) for n in (size, size_v)]
    k, v = (torch.empty(shape, dtype=dtype) for shape in shapes)

    def integers(there: bool, *size: int) -> torch.Tensor | None:
        return torch.empty(*size, dtype=torch.int32) if there else None

    ragged, paged, padded = (kind == one for one in ("ragged", "paged", "padded"))
    tensors = Tensors(
        q, k, v, integers(True, num_heads, -(-max(longest, reach) // blocks[0]) + 1),
        integers(True, num_heads, entries),
        integers(not padded, sequences + 1), integers(ragged, sequences + 1),
        integers(paged, sequences, max(256, reach // page)),
        integers(paged, sequences), *(integers(padded, sequences) for _ in range(4)),
        torch.empty(num_heads) if sinks else None, out,
        torch.empty(*front[:-1], num_heads, front[-1]) if lse else None,
    )  # fmt: skip
    problem = check_attend(tensors, Options(longest, *blocks, layout, size**-0.5, left, 0, softcap, 0))
    # Not as many splits as fill a GPU, which compile to the same code.
    plan = plan_attention(problem, limits)
    if splits is not None:
        plan = replace(plan, num_splits=splits)
    for start, given in recorded_launches(launch.prepare_attend(problem, plan, tensors), *tensors):
        merged = ", merged" if start.kernel.fn.__name__ == "merge" else ""
        yield KernelSpec.of_launch(start, given, name=name + merged)


def selecting(
    name: str, limits: DeviceLimits, *, heads: tuple[int, int, int] = (64, 4, 128), block: int = 128, topk: int = 16,
    tokens: int = 1024, sequences: int = 1, cache: torch.dtype = BF16, dtype: torch.dtype = BF16,
    plan: SelectedPlan | None = None,
) -> Iterator[KernelSpec]:  # fmt: skip
    """The launches of a call of selected attention, with the device's plan, the merge kernel left out."""
    num_heads, heads_kv, size = heads
    q, pages = torch.empty(tokens, num_heads, size, dtype=dtype), torch.empty(64, 64, heads_kv, size).to(cache)
    lists, table, cu, lengths = (
        torch.empty(*shape, dtype=torch.int32)
        for shape in ((tokens, heads_kv, topk), (sequences, 512), (sequences + 1,), (sequences,))
    )
    scale = torch.empty(1) if cache != dtype else None
    lse = torch.empty(num_heads, tokens)
    given = selected.Tensors(q, pages, pages, lists, table, cu, lengths, None, scale, scale, torch.empty_like(q), lse)
    problem = selected.check_selected(given, selected.Options(block, "NHD", True, size**-0.5, 1.0, 1.0))
    prepared = selected_launch.prepare_selected(problem, plan or plan_selected(problem, limits), given)
    for start, arguments in recorded_launches(prepared, *given):
        if start.kernel.fn.__name__ != "merge":
            yield KernelSpec.of_launch(start, arguments, name=f"{name}, {start.kernel.fn.__name__}")


def backward(
    name: str, limits: DeviceLimits, *, heads: tuple[int, int, int] = PHI3, dtype: torch.dtype = BF16,
    padded: bool = False, blocks: tuple[int, int] = (64, 64), softcap: float = 0.0, left: int = -1,
) -> Iterator[KernelSpec]:  # fmt: skip
    """The launches of a backward pass, with the device's plan."""
    num_heads, heads_kv, size = heads
    front = (4, 1024) if padded else (4096,)
    q, k = (torch.empty(*front, n, size, dtype=dtype) for n in (num_heads, heads_kv))
    rows, columns = 1024 // blocks[0], 1024 // blocks[1]
    lists = [torch.empty(num_heads, n, dtype=torch.int32) for n in (rows + 1, 512, columns + 1, 512)]
    cu = torch.empty(5, dtype=torch.int32)
    lengths = (None, None, *[cu[:4]] * 4) if padded else (cu, cu, None, None, None, None)
    inputs = gradients.Inputs(q, k, k, *lists, *lengths, None)
    lse = torch.empty(*front[:-1], num_heads, front[-1])
    given = gradients.Backward(q, lse, q, lse)
    problem = gradients.check_backward(inputs, given, (1024, *blocks, size**-0.5, left, 0, softcap))
    prepared = prepare_backward(problem, plan_backward(problem, limits), inputs, given)
    for start, arguments in recorded_launches(prepared, *inputs, *given, *gradients.new_gradients(inputs)):
        yield KernelSpec.of_launch(start, arguments, name=f"{name}, {start.kernel.fn.__name__}")


def selected_backward(name: str, limits: DeviceLimits) -> Iterator[KernelSpec]:
    """The launches of a backward pass of selected attention, with the device's plan."""
    q, pages, lse = torch.empty(512, 64, 128, dtype=BF16), torch.empty(64, 64, 4, 128, dtype=BF16), torch.empty(64, 512)
    integers = (torch.zeros(*n, dtype=torch.int32) for n in ((512, 4, 16), (1, 64), (2,), (1,)))
    inputs = selected_gradients.Inputs(q, pages, pages, *integers, None, None, None)
    given = gradients.Backward(q, lse, q, lse)
    problem = selected_gradients.check_backward(inputs, given, (128, "NHD", True, 0.1, 1.0, 1.0))
    prepared = selected_backward_launch(problem, plan_selected_backward(problem, limits), inputs, given)
    for start, arguments in recorded_launches(prepared, *inputs, *given, *selected_gradients.new_gradients(inputs)):
        yield KernelSpec.of_launch(start, arguments, name=f"{name}, {start.kernel.fn.__name__}")


def sharing() -> Iterator[KernelSpec]:
    """MiniMax-M3's lists and messages on two ranks."""
    rows, table, lengths = 16, torch.empty(16, 2048, dtype=torch.int32), torch.empty(16, dtype=torch.int32)
    indices, bounds = torch.empty(rows, 4, 16, dtype=torch.int32), torch.empty(rows + 1, dtype=torch.int32)
    own = (indices, table, bounds, lengths, indices, table, lengths, bounds, lengths)
    out, lse = torch.empty(rows, 64, 128, dtype=BF16), torch.empty(64, rows)
    parts = torch.empty(2, rows, 32, 130, dtype=BF16)
    merged = (parts, torch.empty(32), lengths, torch.empty(rows, 32, 128, dtype=BF16), torch.empty(32, rows))
    whole = (out, lse, parts)
    launches = (
        (prepare_own_lists(own, (2, 1, 128, 128, True)), own), (prepare_pack_parts(whole), whole),
        (prepare_merge_parts(merged), merged),
    )  # fmt: skip
    for launched, tensors in launches:
        for start, arguments in recorded_launches(launched, *tensors):
            yield KernelSpec.of_launch(start, arguments, name="shared, MiniMax-M3")


def all_specs(target: str) -> Iterator[KernelSpec]:
    limits = LIMITS[target]
    yield from selecting("selected, MiniMax-M3", limits)
    yield from selecting("selected, MiniMax-M3, decoding", limits, tokens=32, sequences=32, cache=torch.float8_e4m3fn)
    block, tile = (128, (64, 128, 1, 4, 1)) if limits.shared_memory > 128 * 1024 else (32, (16, 32, 1, 4, 1))
    blockwise = SelectedPlan(*tile, by_blocks=4096, shared=limits.hopper)
    yield from selecting("selected, block by block", limits, block=block, plan=blockwise)
    yield from selecting("selected, Qwen3.8", limits, heads=(24, 2, 256), block=4, topk=512)
    if limits.shared_memory > 200 * 1024:
        yield from selecting("selected, long lists", limits, heads=(24, 2, 64), block=32, topk=512)
    yield from selecting("selected, float32", limits, dtype=FP32, cache=FP32)
    for columns, dtype in ((512, FP32), (2048, BF16)):
        given = (
            torch.empty(64, columns, dtype=dtype),
            *(torch.empty(*n, dtype=torch.int32) for n in ((64,), (64, 24), (64,))),
        )
        for start, arguments in recorded_launches(prepare_choose(given, (16, 4, 1, False, 8, 64, 64)), *given):
            yield KernelSpec.of_launch(start, arguments, name=f"choosing of {columns}")
    lists = [torch.empty(*n, dtype=torch.int32) for n in ((4, 512, 21), (2048,), (4, 513), (4, 512 * 21))]
    for start, arguments in recorded_launches(prepare_pack(lists), *lists):
        yield KernelSpec.of_launch(start, arguments, name="choosing, packed")

    yield from sharing()

    def portable(name: str, **options: Any) -> Iterator[KernelSpec]:
        yield from attending(name, replace(limits, hopper=False), **options)

    yield from backward("gradients, Phi-3-small", limits)
    yield from backward("gradients, padded heads of 256", limits, heads=(16, 4, 256), padded=True, left=4095)
    yield from backward("gradients, float32", limits, dtype=FP32, softcap=30.0)

    yield from selected_backward("gradients, MiniMax-M3", limits)

    decoding = {"rows": 8, "longest": 1}
    yield from portable("Phi-3-small")
    yield from portable("Phi-3-small, paged", kind="paged", left=4095, sinks=True)
    yield from portable("Phi-3-small, x-packed", kind="paged", layout="x-packed", page=64)
    yield from portable("Phi-3-small, padded", kind="padded", lse=True, softcap=30.0)
    yield from portable("Phi-3-small, decoding, split", kind="paged", splits=3, lse=True, sinks=True, **decoding)
    yield from portable("Phi-3-small, decoding, x-packed", kind="paged", layout="x-packed", **decoding)
    yield from portable("Phi-3-small, drafts of 16", kind="paged", page=64, left=4095, rows=128, longest=16)
    if target != "sm_100":
        # With the plans of sm_90, and kernels that differ from those above by their sizes.
        yield from portable("heads of 256", heads=(16, 4, 256), splits=2, kind="padded", sinks=True)
        yield from portable("heads of 256, decoding", heads=(16, 4, 256), dtype=FP16, **decoding)
        yield from portable("heads of 80 in float16", heads=(16, 16, 80), dtype=FP16, blocks=(128, 32))
        yield from portable("blocks of 16, decoding", blocks=(16, 16), kind="paged", **decoding)
        yield from portable("heads of 17 and 40", heads=(4, 4, 17), head_dim_v=40, blocks=(16, 16))
        yield from portable("float32", dtype=FP32, softcap=30.0, sinks=True)
        yield from portable("float32, heads of 256", dtype=FP32, heads=(16, 4, 256))
        yield from portable("float32, decoding", dtype=FP32, kind="paged", **decoding)
    if not limits.hopper:
        return
    yield from attending("in thirds, decoding", limits, heads=(8, 1, 128), dtype=FP32, kind="paged", **decoding)

    def hopper(name: str, **options: Any) -> Iterator[KernelSpec]:
        specs = attending(f"for sm_90, {name}", limits, **options)
        yield from (spec for spec in specs if spec.kernel.endswith("hopper.kernel:attend"))

    yield from hopper("128")
    yield from hopper("128, paged", kind="paged", sinks=True, lse=True)
    yield from hopper("128, padded, short lists", kind="padded", lse=True, entries=256)
    yield from hopper("64, split, capped", heads=(16, 2, 64), kind="paged", page=64, splits=3, softcap=30.0)
    few = {"rows": 512, "longest": 512, "entries": 4096}
    yield from hopper("96 and 128 in float16", heads=(8, 8, 96), head_dim_v=128, dtype=FP16, blocks=(32, 32), **few)
    yield from hopper("192", heads=(8, 8, 192), blocks=(64, 192))
    yield from hopper("72 and 160, a window", heads=(8, 8, 72), head_dim_v=160, left=4095)
    yield from hopper("blocks of 16, a window", blocks=(16, 16), left=4095, kind="paged", entries=4096)
    yield from hopper("256", heads=(8, 2, 256), kind="paged", page=48, layout="HND", lse=True)


def specs(target: str) -> list[KernelSpec]:
    """The cases that ``python -m kernel_reference.testing.codegen --compare REV`` compiles too."""
    return [spec for spec in all_specs(target) if target != "sm_80" or not ALIKE_ON_SM_80.search(spec.name)]


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    jobs = {target: specs(target) for target in TARGETS}
    # Plans, and so specs, differ by target: a process for each, two at a time, the longest first.
    order = sorted(TARGETS, key=lambda target: len(jobs[target]), reverse=True)

    def compiled(target: str) -> list[Report]:
        # Code is read of the kernel for sm_90 alone, and takes the disassembler longer to tell.
        hopper = [spec for spec in jobs[target] if spec.name.startswith("for sm_90")]
        others = [spec for spec in jobs[target] if spec not in hopper]
        found = compile_specs(others, [target], processes=1)
        return found + (compile_specs(hopper, [target], processes=1, keep_code=True) if hopper else [])

    with ThreadPoolExecutor(2) as pool:
        return [report for found in pool.map(compiled, order) for report in found]


def test_every_kernel_compiles_for_every_target_without_spills_or_traps(reports: list[Report]) -> None:
    # The kernel for sm_90 keeps what belongs to all work items in memory, outside the loops that multiply.
    assert_clean(reports, most_stack_outside_loops=96)
    assert {report.target for report in reports} == set(TARGETS)


def test_the_largest_tiles_compile_for_gpus_with_99_kib_of_shared_memory() -> None:
    jobs = {target: [spec for spec in all_specs(target) if spec.name in MOST_SHARED] for target in SMALL_TARGETS}
    with ThreadPoolExecutor(2) as pool:
        compiled = pool.map(lambda target: compile_specs(jobs[target], [target], processes=1), SMALL_TARGETS)
        reports = [report for reports in compiled for report in reports]
    assert len(reports) == 2 * len(SMALL_TARGETS)
    assert_clean(reports)
    assert all(report.uses_tensor_cores for report in reports)


def test_the_largest_tiles_fit_in_the_64_kib_of_sm_75() -> None:
    largest = {"heads": (16, 4, 256), "kind": "paged", "layout": "x-packed", "page": 64}
    jobs = [
        spec
        for dtype in (FP16, FP32)
        for spec in attending(f"heads of 256 in {dtype}", LIMITS["sm_75"], dtype=dtype, **largest)
    ]
    reports = compile_specs(jobs, ["sm_75"])
    assert [report.error for report in reports] == ["", ""]
    assert max(report.shared for report in reports) <= LIMITS["sm_75"].shared_memory


def test_products_of_16_bits_use_tensor_cores(reports: list[Report]) -> None:
    without_products = (
        *NOT_MULTIPLIED, "number_entries", "combine_blocks", "share_entries", "begin_numbers", "place_entries",
    )  # fmt: skip
    for report in reports:
        if not any(word in report.spec for word in without_products):
            multiplied = any(opcode.startswith(("HMMA", "HGMMA", "UTCHMMA", "v_mfma")) for opcode in report.opcodes)
            # float32 is multiplied as it is.
            assert multiplied == ("float32" not in report.spec) or report.target == "gfx942", report.spec


def test_no_page_layout_is_loaded_element_by_element(reports: list[Report]) -> None:
    loaded = [report for report in reports if report.spec.startswith("Phi") and report.target != "gfx942"]
    loaded = [report for report in loaded if "merged" not in report.spec]
    assert len(loaded) == 7 * 3
    for report in loaded:
        # 32: what there is one of a row, such as pages, lengths and columns.
        assert report.load_bits <= {32, 64, 128}, (report.spec, report.target, report.load_bits)


def test_pairs_of_e4m3_are_read_as_elements_of_16_bits(reports: list[Report]) -> None:
    (pairs,) = [report for report in reports if "M3, decoding" in report.spec and report.target == "sm_90"]
    assert pairs.uses("LDSM.16.MT88")
    assert not pairs.uses("LDS.U8")


def test_two_programs_of_gradients_fit_on_an_sm_of_sm_90_and_multiply_by_whole_warpgroups(
    reports: list[Report],
) -> None:
    """One waits for a product or a load while the other multiplies."""
    found = [report for report in reports if report.spec.startswith("gradients, Phi") and report.target == "sm_90"]
    assert len(found) == 2
    for report in found:
        assert report.shared <= LIMITS["sm_90"].shared_memory // 2, report.spec
        # Of 8 warps each half would multiply all of a tile.
        assert report.uses("HGMMA.64x128x16"), report.spec


def test_both_consumers_on_sm_90_store_rows_by_16_bytes(reports: list[Report]) -> None:
    """In the partitions of a kernel Triton 3.6 forgets that a stride is 1.

    Strides between heads of 72 and 160 are no multiples of 16, the only ones that Triton knows.
    """
    for report in reports:
        if report.spec.startswith("for sm_90") and "72" not in report.spec:
            assert not report.uses("STG.E.U16"), report.spec


def test_tma_loads_on_sm_90_are_issued_without_choosing_a_thread(reports: list[Report]) -> None:
    """Where ptxas does not know that all threads of a warp have the same coordinates, it chooses one for each load."""
    for report in reports:
        if report.spec.startswith("for sm_90"):
            assert not re.search(r"@!?U?P\d+ UTMALDG", report.code["sass"]), report.spec


def test_products_on_sm_90_are_waited_for_in_groups(reports: list[Report]) -> None:
    """Where an operand is written that a product may still read, ptxas has each product wait for the one before."""
    for report in reports:
        if report.spec.startswith("for sm_90"):
            sass = report.code["sass"]
            assert 4 * sass.count("WARPGROUP.DEPBAR") < sass.count("HGMMA"), report.spec


def test_the_kernel_for_sm_90_uses_tma_and_wgmma(reports) -> None:
    hopper = [report for report in reports if report.spec.startswith("for sm_90")]
    assert len(hopper) == 9
    for report in hopper:
        assert report.uses("UTMALDG"), report.spec
        assert report.uses_tensor_cores, report.spec
        assert report.shared <= LIMITS["sm_90"].shared_memory, report.spec


def test_a_layer_needs_four_kernels_for_life_whatever_its_batches_are() -> None:
    """A server has another batch size and another number of rows at each step; compiling takes 2 s."""
    for kind in ("paged", "ragged"):
        kernels = set()
        for rows in (1, 2, 3, 16, 17, 64, 77, 255, 256):
            for sequences, longest in ((rows, 1), (1, rows * 32), (1, rows * 333)):
                for spec in attending(
                    "", LIMITS["sm_90"], rows=rows * longest if sequences > 1 else longest, sequences=sequences,
                    longest=longest, splits=None, lse=True, kind=kind, entries=2**20, reach=2**17,
                ):  # fmt: skip
                    kernels.add((spec.kernel, repr((spec.signature, spec.constexprs, spec.aligned))))
        names = sorted(name.rpartition(":")[2] for name, _ in kernels)
        # Long prompts have one of their own. In a ragged batch as many keys as queries, which are not split.
        assert names == ["attend", "attend", "attend_packed", *(["merge"] if kind == "paged" else [])]


def test_no_kernel_is_left_out() -> None:
    assert {spec.kernel for spec in specs("sm_90")} == launched_kernels(blocksparse_attn)
