"""Do the programs of a pair, each of which waits for keys of the other's, find alike work? The text in C tells."""

import os
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(autouse=True)
def _with_tilelang() -> None:
    try:
        import tilelang  # noqa: F401
    except ImportError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no TileLang: {error}")


def blocks_of_parts(bounds: Sequence[int], lengths: Sequence[int], order: Sequence[int]) -> list[int]:
    """Blocks of keys that a program finds of each part of a plan, its threads one after the other."""
    import tilelang
    import tilelang.language as tl
    from tilelang.cpu.language import Kernel

    from tilelang_mla.kernels.c import Language
    from tilelang_mla.kernels.decode.groups import PLANNED, Inputs, Launch, Sizes, Work, read_work
    from tilelang_mla.kernels.decode.schedule import Owner, look_for_owner, note_nothing, owner_of, tell_part

    T, parts = Language(), max(bounds)
    S = Sizes(512, 64, T.bfloat16, 64, 2, True, "656", by_rows=True, paired=True)
    given = [torch.tensor(numbers, dtype=torch.int32) for numbers in (bounds, lengths, order)]
    table = torch.zeros(len(lengths), 1024, dtype=torch.int32)
    blocks = torch.full((parts,), -1, dtype=torch.int32)

    @tl.prim_func
    def find(
        kv: tl.Tensor((1, 64, 1), tl.float32),
        block_table: tl.Tensor(table.shape, tl.int32),
        first_part: tl.Tensor(given[0].shape, tl.int32),
        seqlens_k: tl.Tensor(given[1].shape, tl.int32),
        threads: tl.Tensor(given[2].shape, tl.int32),
        found_blocks: tl.Tensor(blocks.shape, tl.int32),
    ):
        with Kernel(1):
            found, told = tl.alloc_local((5,), tl.int32), tl.alloc_local((2, 8), tl.int32)
            inputs = Inputs(None, kv, seqlens_k, block_table, first_part, None)
            launch = Launch(1.0, 1, 0, parts, 1, PLANNED, 0, 0, 1, 1, 0, 1)
            for part in tl.serial(parts):
                note_nothing(S, found)
                for i in tl.serial(len(order)):
                    begin, end, length = owner_of(T, launch, inputs, threads[i])
                    own = Owner(begin, end, length)
                    look_for_owner(T, S, launch, inputs, found, part, own, threads[i], len(order))
                tell_part(T, S, launch, inputs, SimpleNamespace(found=found, told=told), 0, part, 0)
                work = Work(*read_work(T, told, 0))
                found_blocks[part] = work.steps

    kernel = tilelang.compile(find, target="c", execution_backend="cython")
    kernel(torch.zeros(1, 64, 1), table, *given, blocks)
    return blocks.tolist()


def test_a_part_has_as_many_blocks_whichever_thread_is_the_last_to_find_it() -> None:
    """Bounds that do not rise give a part to two sequences: it is nobody's. Three threads look at five."""
    lengths = [640, 128, 1280, 64, 65]
    for order in ([0, 1, 2], [2, 1, 0]):
        assert blocks_of_parts([0, 4, 3, 6, 7, 8], lengths, order) == [2, 3, 2, 0, 7, 7, 1, 2], order
