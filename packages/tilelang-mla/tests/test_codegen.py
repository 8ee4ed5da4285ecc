"""What do the compilers make of the kernels, for a GPU that is not here?

Kernels are lowered for sm_90a, compiled by nvcc, and the assembler's report is read. Constants are those of real calls.
Lowering takes TileLang up to 8 s a kernel: what comes of it is kept in pytest's cache, by all that it is made from,
which `--cache-clear` empties.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kernel_reference.testing.codegen import GeneratedSource
from tilelang_mla.compile import wanted
from tilelang_mla.gradients.plan import plan_backward
from tilelang_mla.indexer.plan import IndexProblem, TopkProblem, plan_index_scores
from tilelang_mla.plan import (
    DecodeProblem,
    DecodeTiles,
    DeviceLimits,
    PrefillPlan,
    PrefillProblem,
    decode_tiles,
    plan_prefill,
    tiles_8bit,
    tiles_of_keys,
)
from tilelang_mla.sparse.tiles import sparse_prefill_tiles, tiles_of_few_lists

pytestmark = pytest.mark.codegen

BF16, FP16 = torch.bfloat16, torch.float16
H200 = DeviceLimits(132, 227 * 1024)


class Decoding(NamedTuple):
    """A decoding kernel."""

    name = "decode"

    dim_nope: int
    dim_rope: int
    dtype: torch.dtype
    gather: bool
    per_token: bool = False
    early: bool = False

    @property
    def tiles(self) -> DecodeTiles:
        return decode_tiles(16, self.dim_nope, self.dim_rope, None, H200)

    @property
    def problem(self) -> DecodeProblem:
        return DecodeProblem(16, self.dim_nope, self.dim_rope, 1, 1, 4096, 64)

    @property
    def constants(self) -> dict[str, Any]:
        return {**self._asdict(), "block_n": self.tiles.block_n, "num_stages": self.tiles.num_stages}


class Decoding8bit(NamedTuple):
    """A decoding kernel over a cache of 8 bits."""

    name = "decode_8bit"

    cache: str
    dim_nope: int = 512
    dim_rope: int = 64
    dtype: torch.dtype = BF16

    @property
    def problem(self) -> DecodeProblem:
        return DecodeProblem(16, self.dim_nope, self.dim_rope, 1, 1, 4096, 64, cache=self.cache)

    @property
    def tiles(self) -> DecodeTiles:
        return tiles_8bit(self.problem, decode_tiles(16, self.dim_nope, self.dim_rope, None, H200), H200)

    @property
    def constants(self) -> dict[str, Any]:
        return {**self._asdict(), "block_n": self.tiles.block_n, "num_stages": self.tiles.num_stages}


class OfLists(NamedTuple):
    """A kernel of sparse prefill."""

    name = "prefill_sparse"

    dim_rope: int
    heads: int = 128

    @property
    def problem(self) -> DecodeProblem:
        return DecodeProblem(self.heads, 512, self.dim_rope, 1, 4096, 2048, 1, pages=65536)

    @property
    def tiles(self) -> DecodeTiles:
        return sparse_prefill_tiles(self.problem, H200)

    @property
    def constants(self) -> dict[str, Any]:
        from tilelang_mla.sparse.launch import prefill_sparse_constants

        return prefill_sparse_constants(self.problem, self.tiles, BF16)


class OfKeys(NamedTuple):
    """A decoding kernel over a cache of 8 bits whose rows of MMAs are keys."""

    name: str
    cache: str
    rows: int
    dtype: torch.dtype = BF16
    narrow: bool = False
    joined: bool = False

    @property
    def problem(self) -> DecodeProblem:
        return DecodeProblem(self.rows, 512, 64, 1, 1, 4096, 64, cache=self.cache)

    @property
    def tiles(self) -> DecodeTiles:
        of_rows = tiles_of_keys if self.rows <= 32 else tiles_8bit
        tiles = of_rows(self.problem, decode_tiles(self.rows, 512, 64, None, H200), H200)
        return replace(tiles, narrow=self.narrow)

    @property
    def constants(self) -> dict[str, Any]:
        from tilelang_mla import launch

        if self.name == "decode_sparse":
            return launch.sparse_constants(self.problem, self.tiles, self.dtype, "joined" if self.joined else "")
        return launch.decode_8bit_constants(self.problem, self.tiles, self.dtype)


class ByRows(NamedTuple):
    """A decoding kernel whose producer keeps addresses of keys, and widens those of 8 bits."""

    cache: str
    rows: int
    known: str
    dtype: torch.dtype = BF16
    name = "decode_sparse"

    @property
    def problem(self) -> DecodeProblem:
        return DecodeProblem(self.rows, 512, 64, 1, 1, 4096, 48, cache=self.cache)

    @property
    def tiles(self) -> DecodeTiles:
        return tiles_8bit(self.problem, decode_tiles(self.rows, 512, 64, None, H200), H200)

    @property
    def constants(self) -> dict[str, Any]:
        from tilelang_mla import launch

        return launch.sparse_constants(self.problem, self.tiles, self.dtype, self.known)


class Prefill(NamedTuple):
    """A prefill kernel."""

    name = "prefill"

    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    in_parts: bool = False

    @property
    def problem(self) -> PrefillProblem:
        return PrefillProblem(8, 8, self.head_dim, self.head_dim_v, 1000, 2, 600)

    @property
    def plan(self) -> PrefillPlan:
        return plan_prefill(self.problem, H200)

    @property
    def constants(self) -> dict[str, Any]:
        plan = self.plan
        blocks = {"block_m": plan.block_m, "block_n": plan.block_n, "num_stages": plan.num_stages}
        return {**self._asdict(), **blocks}


class Merge(NamedTuple):
    """A combine kernel."""

    name = "merge"
    dim_nope: int
    dtype: torch.dtype
    sink: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        return self._asdict()


class MergeRanks(NamedTuple):
    """The kernel that merges partial results of ranks."""

    name = "merge_ranks"
    dim_nope: int
    dtype: torch.dtype

    @property
    def constants(self) -> dict[str, Any]:
        return self._asdict()


class IndexScores(NamedTuple):
    """A kernel of the indexer's scores."""

    name = "index_scores"
    heads: int
    tokens: int
    page_size: int = 64

    @property
    def problem(self) -> IndexProblem:
        return IndexProblem(self.heads, self.tokens, 1, self.tokens, self.page_size, 100, 6400, 6400, True)

    @property
    def constants(self) -> dict[str, Any]:
        from tilelang_mla.indexer.launch import scores_constants

        return scores_constants(self.problem, plan_index_scores(self.problem, H200))


class IndexTopk(NamedTuple):
    """The kernel of the indexer's top-k."""

    name = "index_topk"
    tokens: int = 1
    width: int = 131072

    @property
    def constants(self) -> dict[str, Any]:
        from tilelang_mla.indexer.launch import topk_constants

        return topk_constants(TopkProblem(self.tokens, self.width, 2048, 1, 64), H200)


class Backward(NamedTuple):
    """A kernel of gradients, of keys or of queries; or of what outputs are times their gradients."""

    name: str
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype

    @property
    def problem(self) -> PrefillProblem:
        return PrefillProblem(128, 128, self.head_dim, self.head_dim_v, 4096, 1, 4096, tokens_k=4096)

    @property
    def constants(self) -> dict[str, Any]:
        from tilelang_mla.gradients import launch

        if self.name == "delta":
            return {"head_dim_v": self.head_dim_v, "dtype": self.dtype}
        plan = plan_backward(self.problem, H200)
        assert plan is not None
        made = launch.keys_constants if self.name == "backward_of_keys" else launch.queries_constants
        return made(self.problem, plan, self.dtype)


# Lowered in 8 s each. Smaller latents have smaller accumulators.
DECODE = {
    "DeepSeek, of many rows": Decoding(512, 64, BF16, False, early=True),
    "blocks of 32 keys, pages of any size, a length of each token": Decoding(512, 128, BF16, True, per_token=True),
    "no powers of two, pages of any size": Decoding(320, 96, FP16, True),
}
# Latents of 512 have keys as rows.
DECODE_8BIT = {"one scale": Decoding8bit("e4m3", 448)}
# Others are one scale and 16 rows, records, lists of them, ropes of 0 and 128: nothing was seen to spill. Of one scale
# and 32 rows 16 bytes are, once a work item.
OF_KEYS = {
    "records, 64 rows": OfKeys("decode_8bit", "656", 64),
    "lists of records in two programs, 64 rows": OfKeys("decode_sparse", "656", 64, joined=True),
    "one scale, not widened": OfKeys("decode_8bit", "e4m3", 16, narrow=True),
    "lists of records in two programs, 32 rows": OfKeys("decode_sparse", "656", 32, joined=True),
}
# Others are pages of any size, one scale, what one program widens alone, and parts that are found: nothing was seen to
# spill there.
BY_ROWS = {"widened for two": ByRows("656", 128, "even"), "16 bits, merged by two": ByRows("", 64, "joined")}
# With ropes, and of one tile of heads, nothing was seen to spill.
OF_LISTS = {"no rope": OfLists(0), "keys are rows": OfLists(64, 16)}
PREFILL = {
    "DeepSeek": Prefill(192, 128, BF16),
    "DeepSeek, in parts": Prefill(192, 128, BF16, True),
    "the largest, of one block, in float16": Prefill(256, 256, FP16),
}
# Others have smaller accumulators.
BACKWARD = {
    "keys, DeepSeek": Backward("backward_of_keys", 192, 128, BF16),
    "queries, DeepSeek": Backward("backward_of_queries", 192, 128, BF16),
    "outputs": Backward("delta", 192, 128, BF16),
}
# Others add up less, and without sinks.
MERGE = {"512, sinks": Merge(512, BF16, True)}
MERGE_RANKS = {"512": MergeRanks(512, BF16)}
# Tiles of 512 rows have the fewest registers; others, and the top-k, which is lowered in 10 s, were not seen to spill.
INDEX_SCORES = {"a prompt": IndexScores(64, 4096)}
INDEX_TOPK = {"a row for an SM": IndexTopk()}
every_decoding = pytest.mark.parametrize("kernel", DECODE.values(), ids=DECODE)
every_8bit = pytest.mark.parametrize("kernel", DECODE_8BIT.values(), ids=DECODE_8BIT)
every_of_keys = pytest.mark.parametrize("kernel", OF_KEYS.values(), ids=OF_KEYS)
every_by_rows = pytest.mark.parametrize("kernel", BY_ROWS.values(), ids=BY_ROWS)
every_of_lists = pytest.mark.parametrize("kernel", OF_LISTS.values(), ids=OF_LISTS)
every_prefill = pytest.mark.parametrize("kernel", PREFILL.values(), ids=PREFILL)
every_backward = pytest.mark.parametrize("kernel", BACKWARD.values(), ids=BACKWARD)
every_merge_of_ranks = pytest.mark.parametrize("kernel", MERGE_RANKS.values(), ids=MERGE_RANKS)
every_index_scores = pytest.mark.parametrize("kernel", INDEX_SCORES.values(), ids=INDEX_SCORES)
every_merge = pytest.mark.parametrize("kernel", MERGE.values(), ids=MERGE)


class Report(NamedTuple):
    """The CUDA text of a kernel, and what ptxas says of it."""

    text: str
    said: str

    def count(self, what: str) -> int:
        """The sum of the numbers before these words."""
        return sum(int(number) for number in re.findall(rf"(\d+) bytes {what}", self.said))


def missing(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, in CI")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def nvcc() -> str:
    """From PATH, CUDA_HOME or the wheels of nvidia-cuda-nvcc."""
    wheel = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvcc")
    for place in (shutil.which("nvcc"), os.path.join(os.environ.get("CUDA_HOME", ""), "bin", "nvcc"), str(wheel)):
        if place and os.access(place, os.X_OK):
            return place
    missing("no nvcc")
    raise AssertionError


@pytest.fixture(scope="module")
def launch() -> Any:
    try:
        from tilelang_mla import launch
    except ImportError as error:
        missing(f"no TileLang: {error}")
    return launch


Kept = Callable[[list[Any], Callable[[], str]], str]


@pytest.fixture(scope="module")
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """Makes a text, or finds it again if all that it is made from is the same; from one run to the next in a cache."""
    cache = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("kept") if cache is None else cache.mkdir("tilelang-mla")

    def find(made_from: list[Any], make: Callable[[], str]) -> str:
        place = folder / sha256(json.dumps(made_from).encode()).hexdigest()
        if not place.exists():
            whole = place.with_suffix(f".{os.getpid()}")
            whole.write_text(make())
            whole.replace(place)
        return place.read_text()

    return find


def lowered(launch: Any, name: str, program: Any) -> str:
    """The CUDA source that TileLang makes of a kernel."""
    from tilelang import tvm
    from tilelang.engine.lower import lower

    from tilelang_mla.kernels.passes import Fewer

    context = tvm.transform.PassContext(opt_level=3, config=launch.PASS_CONFIGS, instruments=[Fewer(name)])
    with context, tvm.target.Target(launch.TARGET), launch.quick_proofs():
        return str(lower(program, target=launch.TARGET).kernel_source)


def specs(target: str) -> list[GeneratedSource]:
    """The cases that ``python -m kernel_reference.testing.codegen --compare REV`` compares, by their source."""
    if target != "sm_90":
        return []
    from tilelang_mla import launch

    return [
        GeneratedSource(f"{kernel.name}, {name}", partial(_source_of, launch, kernel.name, kernel.constants))
        for kernels in (
            DECODE,
            DECODE_8BIT,
            OF_KEYS,
            BY_ROWS,
            OF_LISTS,
            PREFILL,
            BACKWARD,
            MERGE,
            MERGE_RANKS,
            INDEX_SCORES,
            INDEX_TOPK,
        )
        for name, kernel in kernels.items()
    ]


def _source_of(launch: Any, kind: str, constants: dict[str, Any]) -> str:
    return lowered(launch, kind, launch.text_of(kind, **constants))


@pytest.fixture(scope="module")
def text(launch: Any, kept: Kept) -> Callable[..., str]:
    """Lowers a kernel to CUDA."""
    import tilelang

    made: dict[Any, str] = {}

    def make(name: str, constants: dict[str, Any]) -> str:
        key = (name, *constants.items())
        if key not in made:
            program = launch.text_of(name, **constants)
            settings = [tilelang.__version__, launch.TARGET, launch.PASS_CONFIGS]
            made[key] = kept([*settings, program.script(show_meta=True)], lambda: lowered(launch, name, program))
        return made[key]

    return make


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, nvcc: str, text: Callable[..., str], kept: Kept,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Any, Report]:  # fmt: skip
    """What nvcc makes of the kernels of all tests that run, in one file: TileLang's headers take most of its time."""
    import tilelang

    home = Path(tilelang.__file__).parent
    version = subprocess.check_output([nvcc, "--version"], text=True)
    flags = ["-std=c++20", "-O3", "--use_fast_math", "-w", "-cubin", "-gencode=arch=compute_90a,code=sm_90a"]
    flags += ["-DENABLE_BF16", "--ptxas-options=--verbose,--warn-on-spills"]
    tests = [item for item in request.session.items if "reports" in getattr(item, "fixturenames", ())]
    kernels = dict.fromkeys(item.callspec.params["kernel"] for item in tests if item.path == request.path)  # type: ignore[attr-defined]
    texts = {kernel: text(kernel.name, kernel.constants) for kernel in kernels}
    halves = [written.partition('extern "C"') for written in texts.values()]
    bodies = [re.sub(r"\b\w+_kernel\b", f"kernel_{i}", begin + body) for i, (_, begin, body) in enumerate(halves)]
    whole = "\n".join([*dict.fromkeys(headers for headers, _, _ in halves), *bodies])

    def said() -> str:
        source = tmp_path_factory.mktemp("kernels") / "kernels.cu"
        source.write_text(whole)
        headers = [f"-I{home / 'src'}", f"-I{home / '3rdparty/cutlass/include'}"]
        command = [nvcc, *flags, *headers, str(source), "-o", str(source.with_suffix(".cubin"))]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-2000:]
        return ran.stdout + ran.stderr

    everything = kept([tilelang.__version__, version, flags, whole], said)
    _, *parts = re.split(r"Compiling entry function '(\w+)'", everything)
    of_entries = dict(zip(parts[::2], parts[1::2], strict=True))
    # Warnings do not always name their kernel: they are everyone's.
    warnings = "\n".join(line for line in everything.splitlines() if re.search(r"C75\d\d", line))
    return {kernel: Report(texts[kernel], of_entries[f"kernel_{i}"] + warnings) for i, kernel in enumerate(kernels)}


def shared_memory(text: str) -> int:
    """From where the buffers lie: the last one's begin, and the whole size that the text does not tell, at most."""
    return max([int(offset) for offset in re.findall(r"buf_dyn_shmem \+ (\d+)", text)], default=0)


def assert_clean(report: Report, spilled: int = 0) -> None:
    """Without warnings, and with at most so many bytes spilled."""
    assert max(report.count(f"spill {what}") for what in ("stores", "loads")) <= spilled, report.said
    assert spilled or report.count("stack frame") == 0, report.said
    # C7508: setmaxnreg ignored. C7510 to C7514: products of a warpgroup one after the other.
    assert not re.search(r"C75\d\d", report.said), report.said
    assert re.search(r"Used \d+ registers", report.said), report.said


def words(report: Report) -> set[str]:
    return set(re.findall(r"tl::(\w+)", report.text))


@every_decoding
def test_decoding_issues_wgmma_and_asynchronous_loads_without_spills(reports, kernel) -> None:
    made = reports[kernel]
    assert_clean(made)
    roles = {"wgmma_ss", "wgmma_rs", "warpgroup_reg_alloc", "warpgroup_reg_dealloc", "tma_load", "tma_store"}
    assert roles <= words(made)
    assert ("cp_async_gs_conditional<16>" in made.text) == kernel.gather
    assert made.text.count("tma_load(kv_desc") == (0 if kernel.gather else 3)


@every_8bit
def test_caches_of_8_bits_are_copied_asynchronously_and_widened_in_pairs_without_spills(reports, kernel) -> None:
    made = reports[kernel]
    assert_clean(made)
    assert {"wgmma_ss", "wgmma_rs", "warpgroup_reg_alloc", "warpgroup_reg_dealloc", "tma_store"} <= words(made)
    assert "cp_async_gs_conditional<16>" in made.text
    assert "cvt_fp8x2_to_float2" in made.text
    weights = 2 * kernel.tiles.block_m * kernel.tiles.block_n
    assert shared_memory(made.text) + weights + 1024 <= kernel.tiles.shared_memory(kernel.problem)


@every_of_keys
def test_keys_as_rows_are_loaded_and_widened_for_operands_in_registers_without_spills_in_loops(reports, kernel) -> None:
    """Of 32 rows and more a few numbers that are used once a work item are spilled, and the producer's of 64."""
    made = reports[kernel]
    assert_clean(made, spilled={16: 0, 32: 16, 64: 192}[kernel.rows])
    assert {"wgmma_rs", "warpgroup_reg_alloc", "warpgroup_reg_dealloc"} <= words(made)
    assert "cp.async.bulk" in made.text
    assert "cvt.rn.f16x2.e4m3x2" in made.text
    assert ("mla::narrow::values" in made.text) == kernel.narrow
    # What lies last are 32 bytes of work items.
    assert shared_memory(made.text) + 64 + 1024 <= kernel.tiles.shared_memory(kernel.problem)


@every_by_rows
def test_keys_by_rows_are_loaded_and_widened_without_spills_in_the_loop_over_blocks(reports, kernel) -> None:
    """A few numbers that are used once a work item are spilled, by one release of nvcc or another."""
    made = reports[kernel]
    assert_clean(made, spilled=48)
    assert {"wgmma_ss", "wgmma_rs", "warpgroup_reg_alloc", "warpgroup_reg_dealloc", "tma_store"} <= words(made)
    # Of the lookups alone; blocks are loaded by functions of rows.cuh.
    assert "cp_async_gs_conditional" not in made.text
    assert ("mla::rows::widen_right" if kernel.cache else "mla::rows::copy_rows") in made.text
    # Of two parts three roles synchronise twice, one of them in two places.
    assert made.text.count("tl::cluster_sync()") == (6 if kernel.known == "joined" else 2)
    # Each role stores partial results.
    assert len(re.findall(r"mla::rows::store_part<256>\(", made.text)) == (2 if kernel.known == "even" else 0)
    # Lanes of a warp call together: no call is guarded by what one of them knows.
    assert not re.search(r"if \(.*place.*\{\s*mla::rows", made.text)
    weights = 2 * kernel.tiles.block_m * kernel.tiles.block_n
    assert shared_memory(made.text) + weights + 1024 <= kernel.tiles.shared_memory(kernel.problem)


@every_of_lists
def test_prompts_of_listed_keys_issue_wgmma_and_tma_stores_without_spills(reports, kernel) -> None:
    made = reports[kernel]
    assert_clean(made)
    assert "rows::copy_rows" in made.text
    weights = 0
    if kernel.heads > 16:
        assert {"wgmma_ss", "wgmma_rs", "warpgroup_reg_alloc", "warpgroup_reg_dealloc", "tma_store"} <= words(made)
        weights = 2 * kernel.tiles.block_m * kernel.tiles.block_n
    assert shared_memory(made.text) + weights + 1024 <= kernel.tiles.shared_memory(kernel.problem)


@every_prefill
def test_prefill_issues_wgmma_and_tma_loads_without_spills(reports, kernel) -> None:
    made = reports[kernel]
    assert_clean(made)
    assert {"wgmma_ss", "wgmma_rs", "warpgroup_reg_alloc", "warpgroup_reg_dealloc", "tma_load"} <= words(made)


@every_backward
def test_gradients_issue_wgmma_and_tma_loads_without_spills_in_their_loops(reports, kernel) -> None:
    """Of keys, a few numbers that are used once a block are spilled beside two accumulators."""
    made = reports[kernel]
    assert_clean(made, spilled=48 if kernel.name == "backward_of_keys" else 0)
    if kernel.name == "delta":
        return
    assert {"wgmma_ss", "wgmma_rs", "warpgroup_reg_alloc", "warpgroup_reg_dealloc", "tma_load"} <= words(made)
    plan = plan_backward(kernel.problem, H200)
    assert shared_memory(made.text) + 1024 <= plan.shared_memory(kernel.problem) <= H200.shared_memory
    begun = int(re.findall(r"Used (\d+) registers", made.said)[0]) * 3
    less, more = sorted(int(number) for number in re.findall(r"warpgroup_reg_(?:de)?alloc<(\d+)>", made.text))
    assert less + 2 * more <= begun


@every_merge
def test_the_combine_kernel_loads_vectors_of_16_bytes_without_spills(reports, kernel) -> None:
    assert_clean(reports[kernel])
    assert "*(float4*)(parts" in reports[kernel].text


@every_index_scores
def test_scores_of_keys_are_wgmma_of_e4m3_on_tma_loads_without_spills(reports, kernel) -> None:
    made = reports[kernel]
    assert_clean(made)
    assert {"wgmma_ss", "tma_load"} <= words(made)
    assert "kFloat8_e4m3" in made.text
    plan = plan_index_scores(kernel.problem, H200)
    # A program that asks for more registers than it began with would wait forever.
    begun = int(re.findall(r"Used (\d+) registers", made.said)[0]) * (plan.warpgroups + 1)
    asked = [int(number) for number in re.findall(r"warpgroup_reg_(?:de)?alloc<(\d+)>", made.text)]
    assert sum(sorted(asked)[:1]) + plan.warpgroups * max(asked, default=0) <= begun
    assert shared_memory(made.text) + 256 <= plan.shared_memory(kernel.problem) <= H200.shared_memory


@every_merge_of_ranks
def test_ranks_are_merged_without_spills(reports, kernel) -> None:
    assert_clean(reports[kernel])


@every_decoding
def test_shared_memory_of_decoding_is_what_plans_say_and_what_a_block_may_have(text, kernel) -> None:
    tiles = kernel.tiles
    assert tiles.shared_memory(kernel.problem) <= H200.shared_memory
    # What lies last are the weights.
    weights = 2 * tiles.block_m * tiles.block_n
    begins = shared_memory(text("decode", kernel.constants))
    assert begins + weights + 1024 <= tiles.shared_memory(kernel.problem)


@every_prefill
def test_shared_memory_of_prefill_is_what_plans_say_and_what_a_block_may_have(text, kernel) -> None:
    plan = kernel.plan
    assert plan.shared_memory(kernel.problem) <= H200.shared_memory
    values = 2 * plan.num_stages * plan.block_n * kernel.head_dim_v
    begins = shared_memory(text("prefill", kernel.constants))
    assert begins + values + 1024 <= plan.shared_memory(kernel.problem)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("prefill", PREFILL["DeepSeek"]), ("decode_8bit", DECODE_8BIT["one scale"])],
    ids=["prefill", "decoding"],
)
def test_buffers_of_different_roles_lie_apart(text, name, kernel) -> None:
    """Roles run side by side: what one no longer needs another still reads."""
    offsets = re.findall(r"buf_dyn_shmem \+ (\d+)", text(name, kernel.constants))
    assert len(offsets) == len(set(offsets)) > 3


def test_the_plan_of_any_sizes_fits_in_shared_memory() -> None:
    for dim_nope in range(64, 513, 64):
        for dim_rope in range(0, 129, 32):
            tiles = decode_tiles(16, dim_nope, dim_rope, None, H200)
            assert tiles.shared_memory(DecodeProblem(16, dim_nope, dim_rope, 1, 1, 4096, 64)) <= H200.shared_memory
    for head_dim in range(32, 257, 32):
        for head_dim_v in range(64, 257, 64):
            prompt = PrefillProblem(8, 8, head_dim, head_dim_v, 1000, 2, 600)
            assert plan_prefill(prompt, H200).shared_memory(prompt) <= H200.shared_memory


def test_nothing_but_sizes_dtype_and_blocks_is_a_constant_of_a_kernel(launch) -> None:
    """A constant more would be a compilation more in the middle of serving."""
    few = DecodeProblem(16, 512, 64, 1, 1, 8192, 64)
    many = DecodeProblem(128, 512, 64, 4, 300, 131072, 128)
    tiles = DecodeTiles(64, 64, 2, 1, 0)
    assert launch.decode_constants(few, tiles, BF16) == launch.decode_constants(
        many, DecodeTiles(64, 64, 2, 7, 99), BF16
    )
    prompts = (PrefillProblem(128, 128, 192, 128, 8192, 1, 8192), PrefillProblem(16, 4, 192, 128, 77, 9, 20, False))
    assert len({str(launch.prefill_constants(prompt, PrefillPlan(128, 128, 2), BF16)) for prompt in prompts}) == 1


def test_what_the_command_builds_is_what_calls_of_deepseek_ask_for(launch) -> None:
    built = list(wanted(["bfloat16"], [(512, 64)], [(192, 128)], caches=("e4m3", "656"), sparse=True))
    for page, tokens in itertools.product((1, 16, 64, 128), (1, 2)):
        problem = DecodeProblem(128, 512, 64, tokens, 4, 8192, page)
        tiles = decode_tiles(problem.rows, 512, 64, 8192, H200)
        assert ("decode", launch.decode_constants(problem, tiles, BF16)) in built
    for cache, heads in itertools.product(("e4m3", "656"), (1, 20, 64, 128, 192)):
        problem = DecodeProblem(heads, 512, 64, 1, 4, 8192, 64, cache=cache)
        tiles = tiles_8bit(problem, decode_tiles(heads, 512, 64, 8192, H200), H200)
        assert ("decode_8bit", launch.decode_8bit_constants(problem, tiles, BF16)) in built
        if cache == "656":
            joins = replace(tiles, num_splits=2, spare_parts=0).joins(problem)
            for known in ("", *(["joined"] if joins else [])):
                assert ("decode_sparse", launch.sparse_constants(problem, tiles, BF16, known)) in built
            # Tiles of 32 rows have none, and none is built.
            assert (("decode_sparse", launch.sparse_constants(problem, tiles, BF16, "even")) in built) == (heads != 20)
            if few := tiles_of_few_lists(replace(problem, capacity=2048), H200):
                assert ("decode_sparse", launch.sparse_constants(problem, few, BF16, "even")) in built
    for heads, tokens in ((128, 8192), (16, 512)):
        prompt = PrefillProblem(heads, heads, 192, 128, tokens, 1, tokens, tokens_k=8192)
        assert ("prefill", launch.prefill_constants(prompt, plan_prefill(prompt, H200), BF16)) in built
    assert ("merge_ranks", {"dim_nope": 128, "dtype": BF16, "of_float32": True}) in built
    assert ("merge", {"dim_nope": 512, "dtype": BF16}) in built


def test_what_the_command_builds_of_gradients_is_what_calls_of_deepseek_ask_for(launch) -> None:
    built = list(wanted(["bfloat16"], [], [(192, 128), (256, 256)], gradients=True))
    assert [(kernel.name, kernel.constants) for kernel in BACKWARD.values()] == [built[i] for i in (4, 5, 3)]
    # Heads of 256 are too wide.
    assert [name for name, _ in built[6:]] == ["prefill", "prefill", "merge_ranks"]


def test_what_the_command_builds_of_the_indexer_is_what_its_calls_ask_for(launch) -> None:
    from tilelang_mla.indexer.launch import scores_constants, topk_constants

    built = list(wanted([], [], [], indexer=[32, 64]))
    for heads in (32, 64):
        for tokens, each in ((1, 1), (256, 2), (12, 3), (4096, 0), (9, 9)):
            problem = IndexProblem(heads, tokens, 1, each, 64, 7, 2**17, 2**17, True)
            constants = scores_constants(problem, plan_index_scores(problem, H200))
            assert ("index_scores", constants) in built
    for tokens, width in ((1, 4096), (4096, 2**17), (4096, 2**18)):
        problem_of_list = TopkProblem(tokens, width, 2048, 1, 64)
        assert ("index_topk", topk_constants(problem_of_list, H200)) in built
