"""Is attention over keys that several ranks share that over all of them, whatever the exchange?"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernel_reference import peers
from kernel_reference.attention import attention
from kernel_reference.partials import EXCHANGES, Partial, exchange_partials, gathered_heads, merge_partials
from kernel_reference.testing.codegen import KernelSpec, compile_specs
from kernel_reference.testing.distributed import SentBytes, peers_of_one_machine, run

Tensor = torch.Tensor
N, H, D = 5, 8, 16


def parts_of(world: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Partial]:
    """Parts [world, N, H, ...] over unequal shares of 37 keys, of which rank 0 has none; and the whole in float64.

    scale: of scores; some overflow as powers of e.
    """
    q, k, v = (torch.randn(n, H, D, dtype=torch.float64) for n in (N, 37, 37))
    cuts = [0, 0, *range(11, 11 + 9 * (world - 2), 9), 37]
    outs, lses = [], []
    for begin, end in pairwise(cuts):
        part = attention(q, k[begin:end], v[begin:end], softmax_scale=scale)
        outs.append(part.out if end > begin else torch.full((N, H, D), torch.nan))
        lses.append(part.lse.T)
    whole = attention(q, k, v, softmax_scale=scale)
    return torch.stack(outs).to(dtype), torch.stack(lses).float(), Partial(whole.out, whole.lse.T)


@pytest.mark.parametrize("scale", [0.25, 100.0])
@pytest.mark.parametrize("world", [2, 4])
def test_merged_parts_are_the_attention_over_all_keys(world: int, scale: float) -> None:
    out, lse, whole = parts_of(world, torch.float32, scale)
    merged = merge_partials(out, lse)
    torch.testing.assert_close(merged.out.double(), whole.out, rtol=0, atol=2e-4 if scale > 1 else 2e-6)
    torch.testing.assert_close(merged.lse.double(), whole.lse, rtol=1e-6, atol=1e-6)


def test_parts_that_saw_nothing_are_left_out_and_nan_stays() -> None:
    out, lse = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2)
    lse[:, 0], out[:, 0] = -torch.inf, torch.nan
    # As FlashMLA says that it saw nothing.
    lse[1, 1], out[1, 1] = torch.inf, torch.nan
    lse[2, 3, 1] = torch.nan
    merged = merge_partials(out, lse)
    assert torch.equal(merged.out[0], torch.zeros(2, 8))
    assert torch.equal(merged.lse[0], torch.full((2,), -torch.inf))
    assert torch.isfinite(merged.out[1:3]).all()
    assert merged.out[3, 1].isnan().all()
    assert torch.isfinite(merged.out[3, 0]).all()


def _formula(world: int, heads: str, exchange: str, size: int) -> float:
    if exchange == "all_to_all":
        return (world - 1) * N * H * (D * size + 4) / (world if heads == "sharded" else 1)
    return (world - 1) * N * H * 4 + (1 if heads == "sharded" else 2) * (world - 1) / world * N * H * D * 4


def _exchanges(rank: int, world: int, parts: dict[torch.dtype, tuple[Tensor, Tensor, Partial]]) -> None:
    each = H // world
    for dtype, (out, lse, whole) in parts.items():
        mine = Partial(out[rank], lse[rank])
        for exchange in EXCHANGES[:2]:
            for heads in ("sharded", "replicated"):
                own = slice(rank * each, (rank + 1) * each) if heads == "sharded" else slice(None)
                with SentBytes() as counted:
                    got = exchange_partials(mine, None, heads=heads, exchange=exchange)
                assert counted.sent == _formula(world, heads, exchange, dtype.itemsize)
                assert got.out.dtype == dtype
                atol = 2e-6 if dtype == torch.float32 else 8e-3
                torch.testing.assert_close(got.out.double(), whole.out[:, own], rtol=0, atol=atol)
                torch.testing.assert_close(got.lse.double(), whole.lse[:, own], rtol=1e-6, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"^exchange must be one that goes by collectives where tensors are not on GPUs"
    ):
        exchange_partials(mine, None, exchange="symmetric")
    with pytest.raises(ValueError, match=r"^q must be of a number of heads that the world of \d divides, got "):
        exchange_partials(Partial(torch.zeros(N, 9, D), torch.zeros(N, 9)), None)
    with pytest.raises(ValueError, match=r"^exchange must be one of "):
        exchange_partials(mine, None, exchange="gossip")
    empty = Partial(torch.zeros(0, H, D), torch.zeros(0, H))
    assert exchange_partials(empty, None).out.shape == (0, each, D)
    alone = [torch.distributed.new_group([one]) for one in range(world)]
    assert exchange_partials(mine, alone[rank], exchange="symmetric") is mine


@pytest.mark.parametrize("world", [2, 4])
def test_every_exchange_gives_the_whole_and_sends_what_its_table_says(world: int) -> None:
    parts = {dtype: parts_of(world, dtype, 0.25) for dtype in (torch.float32, torch.bfloat16)}
    run(world, _exchanges, world, parts)


def _place(rank: int, world: int, dtype: torch.dtype) -> None:
    """Rows of all ranks in a random order, of which one goes nowhere; of q, k and v that lie beside each other."""
    rows, nowhere = 7, world * 7 + 3
    for times in range(2):
        torch.manual_seed(times)
        k, v = torch.randn(world, rows, 3, 3, 8).to(dtype)[..., 1:, :].unbind(3)
        places = torch.randperm(nowhere)[: world * rows].view(world, rows)
        places[-1, 2] = nowhere
        got = peers.place_rows(k[rank], v[rank], places[rank], nowhere, None)
        here = places.flatten() < nowhere
        wanted = torch.stack([k, v], 2).flatten(0, 1)[here]
        assert torch.equal(got[places.flatten()[here]], wanted)
        torch.distributed.barrier()


def _to_peers(rank: int, world: int, dtype: torch.dtype, buffers: Tensor) -> None:
    from kernel_reference.peers import kernels

    torch.manual_seed(0)
    each = H // world
    parts = [parts_of(world, dtype, scale) for scale in (100.0, 0.25)]
    with peers_of_one_machine(buffers):
        for heads in ("sharded", "replicated")[: 4 // world]:
            own = slice(rank * each, (rank + 1) * each) if heads == "sharded" else slice(None)
            # Each exchange overwrites what the last one left.
            for times, (out, lse, _) in enumerate(parts):
                q = torch.randn(2, 3, H, D, dtype=dtype)
                if heads == "sharded":
                    assert torch.equal(gathered_heads(q[:, :, own], None, "symmetric"), q), times
                    assert torch.equal(gathered_heads(q[:, :, own], None), q)
                # Bits that are never sent: another NaN in their place.
                out[-1, 3].view(torch.int16)[..., 5] = -1
                # Heads that lie apart, and logarithms by head.
                mine = Partial(out[rank].repeat_interleave(2, 1)[:, ::2], lse[rank].T.contiguous().T)
                memory = peers._memory("parts", 0, None, None)
                halves = memory.own.view(2, -1)
                turn = int(memory.calls) // kernels.CALL.value % 2
                # Of the next call, in which a peer may be already.
                halves[1 - turn].fill_(7)
                got = exchange_partials(mine, None, heads=heads, exchange="symmetric")
                wanted = merge_partials(out[:, :, own], lse[:, :, own])
                atol = 2e-6 if dtype == torch.float32 else 8e-3
                torch.testing.assert_close(got.out, wanted.out, rtol=0, atol=atol, equal_nan=True)
                torch.testing.assert_close(got.lse, wanted.lse, rtol=1e-6, atol=1e-6)
                # What was read is gone, so that nothing is read twice.
                assert (halves[turn] == peers._EMPTY_BYTE).all()
                assert (halves[1 - turn] == 7).all()
                halves[1 - turn].fill_(peers._EMPTY_BYTE)
                torch.distributed.barrier()
        _place(rank, world, dtype)
        with pytest.raises(ValueError, match=r"^buffers must have \d+ bytes a rank of heads"):
            gathered_heads(torch.zeros(4096, 1, 8), None, "symmetric")
        assert gathered_heads(torch.zeros(0, each, D), None, "symmetric").shape == (0, H, D)
        empty = Partial(torch.zeros(0, H, D), torch.zeros(0, H))
        assert exchange_partials(empty, None, exchange="symmetric").out.shape == (0, each, D)


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_kernels_write_to_the_memory_of_peers_and_wait_for_them(world: int, dtype: torch.dtype) -> None:
    # Once, and not in every fork.
    pytest.importorskip("kernel_reference.peers.kernels")
    run(world, _to_peers, world, dtype, torch.zeros(world, 2**16, dtype=torch.uint8).share_memory_())


@pytest.mark.codegen
def test_kernels_of_peers_compile_for_gpus() -> None:
    kernels = pytest.importorskip("kernel_reference.peers.kernels")
    out, lse, calls = torch.zeros(5, 8, 128, dtype=torch.bfloat16), torch.zeros(5, 8), torch.zeros(1, dtype=torch.int32)
    peers_of = kernels.Peers((2**40, 2**41), 2**20)
    exchange = kernels.ExchangeConfig(2, 4, 128, 128, 8, 256, True, True)
    gather = kernels.GatherConfig(2, 256, 256, True)
    strides, bits = kernels.PartStrides(*out.stride()[:2], *lse.stride()), out.flatten(1).view(torch.int32)
    specs = [
        KernelSpec.of_call(kernels.exchange_and_merge, (out, lse, out, lse, calls, 1, 5, strides, peers_of, exchange)),
        KernelSpec.of_call(
            kernels.gather_rows,
            (bits, bits, calls, 1, 5, 512, 512, kernels.WholeStrides(1024, 512), peers_of, gather),
        ),
    ]
    pools = kernels.Pools((2**40, 2**41), (2**42,) * 2)
    places, config = torch.zeros(5, dtype=torch.int64), kernels.PlaceConfig(2, 128, 128, 16, True)
    specs.append(KernelSpec.of_call(kernels.place_rows, (bits, bits, places, 1, 5, 256, 128, 128, pools, config)))
    for report in compile_specs(specs, ("sm_90",), processes=1):
        assert not report.error, report.error
        assert not report.spills
        if report.spec == "place_rows":
            # What is written, and has been read, all GPUs see before the signal.
            assert "MEMBAR.ALL.SYS" in report.opcodes
        else:
            # What peers write is read past the L1 cache.
            assert any(name.startswith("LDG.E") and name.endswith("STRONG.SYS") for name in report.opcodes)


def _symmetric(rank: int) -> None:
    torch.manual_seed(0)
    for rows, heads, size in ((5, 8, 16), (64, 128, 512), (3, 32, 128)):
        out, lse = torch.randn(rows, heads, size, dtype=torch.bfloat16), torch.randn(rows, heads)
        mine = Partial((out + rank).cuda(), (lse - rank).cuda())
        own = slice(rank * heads // 2, (rank + 1) * heads // 2)
        for times in range(20):
            for kind in ("sharded", "replicated"):
                q = (out + times).cuda()
                if kind == "sharded":
                    assert torch.equal(gathered_heads(q[:, own], None, "symmetric"), q)
                wanted = exchange_partials(mine, None, heads=kind)
                got = exchange_partials(mine, None, heads=kind, exchange="symmetric")
                torch.testing.assert_close(got.out, wanted.out, rtol=8e-3, atol=1e-6)
                torch.testing.assert_close(got.lse, wanted.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_symmetric_memory_gives_what_the_collective_does() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run(2, _symmetric, backend="nccl", deadline=300)
