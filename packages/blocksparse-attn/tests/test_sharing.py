"""Do the kernels around attention to a shared cache give what torch does?"""

from __future__ import annotations

import pytest
import torch

from blocksparse_attn.sharing import ops, reference

Tensor = torch.Tensor


@pytest.mark.parametrize(("world", "size", "block", "causal"), [(2, 16, 16, True), (3, 32, 16, False), (4, 8, 1, True)])
def test_own_lists_are_those_of_the_reference(device: str, world: int, size: int, block: int, causal: bool) -> None:
    from blocksparse_attn.sharing.launch import prepare_own_lists

    generator = torch.Generator().manual_seed(world)
    bounds = torch.tensor([0, 3, 3, 4, 9])
    lengths = torch.tensor([200, 0, 1, 77]).int()
    rows = 11
    indices = torch.randint(-1, 200 // block + 3, (rows, 2, 21), generator=generator).int()
    table = torch.randint(0, 99, (4, 7), generator=generator).int()
    for cu, seqlens in ((bounds.int(), lengths), (bounds, torch.tensor([200, 5, -3, 2]))):
        given = [x.to(device) for x in (indices.transpose(0, 1).contiguous().transpose(0, 1), table, cu, seqlens)]
        for rank in range(world):
            numbers = (world, rank, size, block, causal)
            wanted, got = (
                [
                    torch.full_like(given[0], 7, memory_format=torch.contiguous_format),
                    given[1].new_full((rows, 7), 7), given[3].new_full((rows,), 7), given[2].new_full((rows + 1,), 7),
                    torch.full((rows,), 7, dtype=torch.int32, device=device),
                ]
                for _ in range(2)
            )  # fmt: skip
            reference.own_lists(*given, *wanted, *numbers)
            prepare_own_lists((*given, *got), numbers)(*given, *got)
            for mine, other in zip(got, wanted, strict=True):
                assert torch.equal(mine, other)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 24), (torch.float32, 17), (torch.float16, 128)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_messages_are_packed_and_merged_as_the_reference_does(
    device: str, dtype: torch.dtype, size: int, with_sinks: bool
) -> None:
    from blocksparse_attn.sharing.launch import prepare_merge_parts, prepare_pack_parts

    torch.manual_seed(5)
    world, rows, heads = 3, 5, 6
    parts, pad = [], 4 // dtype.itemsize
    for part in range(world):
        out, lse = torch.randn(rows, heads, size).to(dtype), 3 * torch.randn(heads, rows)
        # Parts that saw nothing, as attention and as FlashMLA write it, of any content; a row that nobody saw.
        lse[part, 1], lse[part + 1, 2], lse[:, 3] = -torch.inf, torch.inf, -torch.inf
        out[1, part], out[3] = torch.nan, torch.inf
        out, lse = out.to(device), lse.to(device)
        wanted, got = (torch.zeros(world, rows, heads // world, size + pad, dtype=dtype, device=device) for _ in "ab")
        reference.pack_parts(out, lse, wanted)
        prepare_pack_parts((out, lse, got))(out, lse, got)
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
        parts.append(got[1])
    sinks = torch.randn(heads // world).to(device) if with_sinks else None
    inside = torch.tensor([1, 1, 1, 0, 1], dtype=torch.int32, device=device)
    given = (torch.stack(parts), sinks, inside)
    outs = [torch.zeros(rows, heads // world, size, dtype=dtype, device=device) for _ in range(2)]
    lses = [torch.zeros(heads // world, rows, device=device) for _ in range(2)]
    reference.merge_parts(*given, outs[0], lses[0])
    prepare_merge_parts((*given, outs[1], lses[1]))(*given, outs[1], lses[1])
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(outs[1], outs[0], **near)
    torch.testing.assert_close(lses[1], lses[0], rtol=1e-5, atol=1e-6)
    assert outs[1][3].eq(0).all()
    assert lses[1][:, 3].eq(-torch.inf).all()


def test_the_ops_are_what_torch_expects() -> None:
    op = getattr(torch.ops, ops._library.ns)
    indices, table, cu = torch.zeros(3, 2, 4).int(), torch.zeros(2, 5).int(), torch.tensor([0, 1, 3])
    own = (indices.clone(), torch.zeros(3, 5).int(), torch.zeros(3).int(), torch.zeros(4).long(), torch.zeros(3).int())
    given = (indices, table, cu, torch.tensor([40, 9]).int(), *own)
    parts, lse = torch.zeros(2, 3, 2, 17), torch.zeros(4, 3)
    merged = (torch.zeros(3, 2, 16), torch.zeros(2, 3))
    for checked, arguments in (
        (op.own_lists, (*given, 2, 1, 16, 16, True)), (op.pack_parts, (torch.randn(3, 4, 16), lse, parts)),
        (op.merge_parts, (parts, torch.zeros(2), own[4], *merged)),
    ):  # fmt: skip
        torch.library.opcheck(checked.default, arguments, test_utils=("test_schema", "test_faketensor"))
