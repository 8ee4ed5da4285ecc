"""Do the public functions do what they promise? On the device: the kernels on a GPU, else the reference.

Every comparison is with the recurrence in float64, beside what plain PyTorch of the same dtype makes of it.
"""

from __future__ import annotations

import inspect
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_attn
from kernel_reference.checks import validate_values
from kernel_reference.models import MINIMAX_01
from kernel_reference.recurrence import linear_attention, linear_attention_chunked
from kernel_reference.testing.guards import assert_bitwise_equal, poisoned
from kernel_reference.testing.memory import much_memory
from lightning_attn import (
    LightningResult,
    Snapshots,
    lightning_attention,
    lightning_attention_varlen,
    lightning_commit,
    lightning_decode,
    lightning_verify,
    linear_decode_forward_triton,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
# Empty, one token, and round the ends of the blocks that a kernel may work in.
LENGTHS = {
    0: (64, 64), 1: (128, 128), 15: (16, 48), 64: (80, 80), 255: (64, 64), 256: (96, 64), 257: (48, 80),
    300: (128, 128), 600: (64, 96), 4097: (64, 64),
}  # fmt: skip
SIZES = [
    *[(size, size) for size in (16, 48, 64, 80, 96, 128, 192, 256)],
    (16, 256), (256, 16), (48, 80), (80, 48), (64, 128), (128, 64), (192, 96), (17, 33), (100, 250), (255, 31),
]  # fmt: skip
HEADS = [(4, 4), (2, 6), (6, 2), (1, 4), (4, 1)]
RAGGED = [70, 0, 1, 129, 64, 0, 5, 300]
on_a_gpu = pytest.mark.gpu
TP8 = MINIMAX_01.tensor_parallel(8)


def name_of(value: object) -> str:
    return str(getattr(value, "name", value)).replace(" ", "-").removeprefix("torch.")


def prefill(batch, **options):
    """The ragged batch through the kernel, into guarded memory."""
    batch_options = {"has_initial_state": batch.has_initial_state, "out": batch.out.tensor, "scale": batch.scale}
    got = lightning_attention_varlen(
        batch.q, batch.k, batch.v, batch.slopes, batch.cu_seqlens, state_pool=batch.pool.tensor, slots=batch.slots,
        **{**batch_options, **options},
    )  # fmt: skip
    assert got is {**batch_options, **options}["out"] or options["out"] is None
    return got


def decode(batch):
    """The same of a batch whose sequences have one token each."""
    got = lightning_decode(
        batch.q, batch.k, batch.v, batch.pool.tensor, batch.slots, batch.slopes, scale=batch.scale,
        out=batch.out.tensor,
    )  # fmt: skip
    assert got is batch.out.tensor
    return got


def drafts(batch, x):
    """[B * T, heads, elements] as [B, T, heads, elements]."""
    tokens = batch.lengths[0] if batch.lengths else 1
    return x.unflatten(0, (len(batch.lengths), tokens))


def verify(batch) -> None:
    q, k, v, out = (drafts(batch, x) for x in (batch.q, batch.k, batch.v, batch.out.tensor))
    got = lightning_verify(q, k, v, batch.pool.tensor, batch.slots, batch.slopes, scale=batch.scale, out=out)
    assert got is out


def commit(batch, accepted: list[int], dtype=torch.int32) -> None:
    accepted = torch.tensor(accepted, dtype=dtype, device=batch.q.device)
    k, v = drafts(batch, batch.k), drafts(batch, batch.v)
    assert lightning_commit(k, v, batch.pool.tensor, batch.slots, batch.slopes, accepted) is None


def laid_out(tensor: torch.Tensor, order: tuple[int, ...], step: int = 1) -> torch.Tensor:
    """The same values with the dimensions in this order in memory, NaN between every two if ``step`` is 2."""
    wide = poisoned([*[tensor.shape[dim] for dim in order], step], tensor.dtype, tensor.device)
    view = wide[..., 0].permute([order.index(dim) for dim in range(tensor.ndim)])
    return view.copy_(tensor)


def inputs(tensors, batch, heads, tokens, sizes, dtype, *, carried=True):
    """q, k, v [b, h, n, d|e], the decays and a state to carry or None."""
    d, e = sizes
    q, k = (tensors.normal(batch, heads, tokens, d, dtype=dtype) for _ in range(2))
    v = tensors.normal(batch, heads, tokens, e, dtype=dtype)
    return q, k, v, tensors.slopes(heads), tensors.normal(batch, heads, d, e) if carried else None


def check_attention(tensors, q, k, v, ed, history, **options) -> LightningResult:
    """One call of the drop-in function against the recurrence, on what it is said to return."""
    kept = None if history is None else history.clone()
    got = lightning_attention(q, k, v, ed, kv_history=history, **options)
    b, h, n, d = q.shape
    e = v.shape[3]
    assert got._fields == ("out", "kv")
    assert got.out.shape == (b, h, n, e)
    assert got.out.dtype == q.dtype
    assert got.out.is_contiguous()
    assert got.kv.shape == (b, h, 1, d, e)
    assert got.kv.dtype == torch.float32
    wanted = tensors.attend(q, k, v, ed, history, options.get("scale", 1.0))
    tensors.assert_rounded(got.out, wanted.out, apart=(0, 1), what="out")
    tensors.assert_rounded(got.kv[:, :, -1], wanted.state, apart=(0, 1), what="kv")
    if history is not None:
        assert_bitwise_equal(history, kept, what="kv_history after the call")
    return got


def test_the_oracle_in_chunks_is_the_literal_recurrence(tensors) -> None:
    q, k, v = (tensors.normal(300, 8, 32).double() for _ in range(3))
    options = {"initial_state": tensors.normal(2, 8, 32, 32).double(), "cu_seqlens": torch.tensor([0, 257, 300])}
    literal = linear_attention(q, k, v, tensors.slopes(8), **options)
    chunked = linear_attention_chunked(q, k, v, tensors.slopes(8), **options)
    for got, wanted in zip(chunked, literal, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


def test_the_plain_version_in_float32_is_the_reference_in_float32(tensors) -> None:
    q, k, v, slopes, history = inputs(tensors, 2, 4, 150, (32, 48), FP32)
    got = tensors.padded(q, k, v, slopes, history, 0.5, tensors.plain)
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    ends = torch.tensor([0, 150, 300])
    wanted = linear_attention_chunked(
        *packed, slopes, cu_seqlens=ends, initial_state=history, scale=0.5, compute_dtype=FP32
    )
    torch.testing.assert_close(got[0].transpose(1, 2).flatten(0, 1), wanted.out)
    torch.testing.assert_close(got[1], wanted.state)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("carried", [False, True], ids=["from zeros", "carried"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_prefill_is_the_recurrence_at_any_length(tensors, tokens, carried, dtype) -> None:
    batch = 1 if tokens > 600 else 2
    # The first four rates are those that differ most.
    heads = 4 if tensors.device.type == "cpu" else 8
    check_attention(tensors, *inputs(tensors, batch, heads, tokens, LENGTHS[tokens], dtype, carried=carried))


@pytest.mark.parametrize("sizes", SIZES, ids=name_of)
def test_prefill_takes_any_head_sizes_of_k_and_v_equal_or_not(tensors, sizes) -> None:
    for dtype in (BF16, FP32):
        check_attention(tensors, *inputs(tensors, 1, 4, 130, sizes, dtype))


@on_a_gpu
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 1024), (1, 16387), (3, 2500)])
@pytest.mark.parametrize("model", [MINIMAX_01, TP8], ids=name_of)
@much_memory()
def test_prefill_at_model_shapes(tensors, model, batch, tokens) -> None:
    sizes = (model.head_qk, model.head_v)
    q, k, v, _, history = inputs(tensors, batch, model.num_heads, tokens, sizes, BF16)
    slopes = lightning_attn.slopes(MINIMAX_01.num_heads, 3, 80)[: model.num_heads].to(tensors.device)
    check_attention(tensors, q, k, v, slopes, history, scale=0.5)


@pytest.mark.parametrize("shape", [(4,), (4, 1, 1), (1, 4, 1, 1), (4, 1)], ids=str)
def test_the_decays_may_have_any_shape_of_one_element_a_head(tensors, shape) -> None:
    q, k, v, slopes, history = inputs(tensors, 2, 4, 70, (32, 32), BF16)
    wanted = check_attention(tensors, q, k, v, slopes, history)
    got = check_attention(tensors, q, k, v, slopes.view(shape), history)
    for one, other in zip(got, wanted, strict=True):
        assert_bitwise_equal(one, other)
    batch = tensors.ragged([3, 70], rows_after=1)
    batch.slopes = batch.slopes.view(shape)
    prefill(batch)
    batch.check()


@pytest.mark.parametrize("block_size", [1, 7, 64, 256, 4096])
def test_block_size_is_accepted_and_without_effect(tensors, block_size) -> None:
    q, k, v, slopes, history = inputs(tensors, 1, 4, 300, (48, 32), BF16)
    wanted = lightning_attention(q, k, v, slopes, 256, history)
    got = lightning_attention(q, k, v, slopes, block_size, history)
    for one, other in zip(got, wanted, strict=True):
        assert_bitwise_equal(one, other)


def test_the_drop_in_functions_keep_the_arguments_that_engines_pass_by_position_and_name() -> None:
    attention = [*inspect.signature(lightning_attention).parameters.values()]
    assert [p.name for p in attention[:6]] == ["q", "k", "v", "ed", "block_size", "kv_history"]
    assert [p.default for p in attention[4:6]] == [256, None]
    decoding = [*inspect.signature(linear_decode_forward_triton).parameters.values()]
    assert [p.name for p in decoding[:7]] == ["q", "k", "v", "kv_caches", "slope_rate", "slot_idx", "BLOCK_SIZE"]
    assert decoding[6].default == 32
    assert all(p.kind == p.KEYWORD_ONLY for p in decoding[7:])


def test_the_scale_multiplies_outputs_and_not_states(tensors) -> None:
    for dtype in (BF16, FP32):
        check_attention(tensors, *inputs(tensors, 2, 4, 70, (32, 48), dtype), scale=0.17)
        batch = tensors.ragged([70, 1, 9], dtype=dtype, scale=0.17)
        prefill(batch)
        batch.check()


@pytest.mark.parametrize("carried", [False, True], ids=["from zeros", "carried"])
def test_no_tokens_return_the_history_or_zeros(tensors, carried) -> None:
    q, k, v, slopes, history = inputs(tensors, 3, 4, 0, (48, 32), BF16, carried=carried)
    got = check_attention(tensors, q, k, v, slopes, history)
    wanted = history if carried else torch.zeros(3, 4, 48, 32, device=tensors.device)
    assert_bitwise_equal(got.kv[:, :, 0], wanted)
    if carried:
        assert got.kv.untyped_storage().data_ptr() != history.untyped_storage().data_ptr()


def test_empty_batches_work_everywhere(tensors) -> None:
    got = lightning_attention(*inputs(tensors, 0, 4, 9, (32, 16), BF16)[:4])
    assert got.out.shape == (0, 4, 9, 16)
    assert got.kv.shape == (0, 4, 1, 32, 16)
    for rows_after in (0, 3):
        batch = tensors.ragged([], rows_after=rows_after)
        prefill(batch)
        batch.check()
    for lengths in ([0], [0, 0, 0]):
        batch = tensors.ragged(lengths, initial=False)
        prefill(batch)
        batch.check()
    batch = tensors.ragged([])
    decode(batch)
    batch.check()
    verify(batch)
    batch.check(states=[])
    commit(batch, [])
    batch.check(states=[])
    q, pool = tensors.normal(0, 4, 1, 32), tensors.normal(5, 4, 32, 32)
    slots = torch.zeros(0, dtype=torch.int32, device=tensors.device)
    assert linear_decode_forward_triton(q, q, q, pool, tensors.slopes(4), slots).shape == (0, 128)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("cut", [1, 130, 192])
def test_prefill_prefill_in_pieces_and_decoding_token_by_token_agree(tensors, cut, dtype) -> None:
    """Each with the oracle of the whole: what they differ by is rounding."""
    tokens = 200
    whole = tensors.ragged([tokens], heads=(8, 8), sizes=(64, 48), dtype=dtype)
    slot = whole.slot_of[0]

    def again(lengths, pool):
        """The next tokens, with the state where the last call left it."""
        first = again.done
        again.done += lengths[0]
        ends = torch.tensor([0, lengths[0]], dtype=torch.int32, device=tensors.device)
        q, k, v = (x[first : again.done] for x in (whole.q, whole.k, whole.v))
        return lightning_attention_varlen(
            q, k, v, whole.slopes, ends, state_pool=pool, slots=whole.slots, has_initial_state=True
        )

    prefill(whole)
    whole.check()

    again.done = 0
    pool = whole.before.clone()
    whole.check_out(torch.cat([again([cut], pool), again([tokens - cut], pool)]))
    whole.pool.tensor[slot] = pool[slot]
    whole.check()

    if cut == 1:
        # The same whatever the cut.
        pool = whole.before.clone()
        outs = [
            lightning_decode(*(x[t : t + 1] for x in (whole.q, whole.k, whole.v)), pool, whole.slots, whole.slopes)
            for t in range(tokens)
        ]
        whole.check_out(torch.cat(outs), products=FP32, chunk=1)
        whole.pool.tensor[slot] = pool[slot]
        whole.check(products=FP32, chunk=1)

    q, k, v = (x.transpose(0, 1)[None] for x in (whole.q, whole.k, whole.v))
    first = lightning_attention(
        q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], whole.slopes, kv_history=whole.before[slot][None]
    )
    second = lightning_attention(
        q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], whole.slopes, kv_history=first.kv[:, :, -1]
    )
    whole.check_out(torch.cat([first.out, second.out], dim=2)[0].transpose(0, 1))
    whole.pool.tensor[slot] = second.kv[0, :, -1]
    whole.check()


@pytest.mark.parametrize("pool_dtype", [FP32, BF16, FP16], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_ragged_prefill_is_the_recurrence_from_and_into_shuffled_slots(tensors, dtype, pool_dtype) -> None:
    initial = [True, True, False, True, False, False, True, True]
    batch = tensors.ragged(
        RAGGED, sizes=(64, 48), dtype=dtype, pool_dtype=pool_dtype, initial=initial, slots=[7, 0, 3, 9, 10, 1, 2, 5],
        num_slots=12, rows_after=5,
    )  # fmt: skip
    prefill(batch)
    batch.check()


@pytest.mark.parametrize("initial", [True, False])
def test_one_answer_may_speak_for_all_initial_states(tensors, initial) -> None:
    batch = tensors.ragged(RAGGED, initial=initial)
    prefill(batch, has_initial_state=initial)
    batch.check()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=name_of)
@pytest.mark.parametrize("initial", [True, False])
def test_padded_sequences_of_a_ragged_batch_give_zeros_and_write_nothing(tensors, initial, index_dtype) -> None:
    batch = tensors.ragged(
        RAGGED, initial=initial, slots=[2, -1, 0, -1, 6, 4, -1, 1], rows_after=3, index_dtype=index_dtype
    )
    prefill(batch)
    batch.check()
    batch = tensors.ragged([3, 70], slots=[-1, -1], index_dtype=index_dtype)
    prefill(batch)
    batch.check()


def test_a_sequence_of_no_tokens_keeps_the_bits_of_its_slot_with_or_without_an_initial_state(tensors) -> None:
    for initial in (True, False):
        batch = tensors.ragged([0, 65, 0, 0], initial=initial)
        prefill(batch)
        batch.check()


@pytest.mark.parametrize(
    "lengths",
    [[1, 70, 1, 1, 300, 0, 1], [1] * 9, [1, 1, 2, 1, 3], [64, 1, 128, 1], [300, 1]],
    ids=str,
)
def test_prefill_and_decode_rows_mix_in_one_call(tensors, lengths) -> None:
    for dtype in (BF16, FP32):
        batch = tensors.ragged(lengths, sizes=(48, 64), dtype=dtype, rows_after=2)
        prefill(batch)
        batch.check()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_fewer_heads_of_qk_or_of_v_are_read_by_several(tensors, heads) -> None:
    for dtype in (BF16, FP32):
        batch = tensors.ragged([70, 1, 130], heads=heads, sizes=(48, 32), dtype=dtype, slots=[3, 0, 4])
        prefill(batch)
        batch.check()
        batch = tensors.ragged([1] * 5, heads=heads, sizes=(48, 32), dtype=dtype, slots=[3, 0, -1, 4, 7])
        decode(batch)
        batch.check(products=FP32)
        batch = tensors.ragged([4] * 5, heads=heads, sizes=(48, 32), dtype=dtype, slots=[3, 0, -1, 4, 7])
        verify(batch)
        batch.check(states=[0] * 5)
        commit(batch, [4, 1, 2, 0, 3])
        batch.check(states=[4, 1, 2, 0, 3], products=FP32)


@pytest.mark.parametrize("heads", [(4, 4), (2, 4), (4, 2)], ids=str)
def test_q_k_and_v_may_be_slices_of_one_tensor(tensors, heads) -> None:
    for lengths in ([70, 0, 1, 130], [1] * 4):
        batch = tensors.ragged(lengths, heads=heads, sizes=(64, 48), fused=True, rows_after=1)
        assert batch.q.untyped_storage().data_ptr() == batch.v.untyped_storage().data_ptr()
        prefill(batch)
        batch.check()
    batch = tensors.ragged([1] * 4, heads=heads, sizes=(64, 48), fused=True)
    decode(batch)
    batch.check(products=FP32)
    batch = tensors.ragged([3] * 4, heads=heads, sizes=(64, 48), fused=True)
    verify(batch)
    commit(batch, [3] * 4)
    batch.check(products=FP32, out=False)
    batch.check_out(batch.out.tensor)
    heads = heads[0]
    fused = tensors.normal(2, 70, heads, 3 * 64, dtype=BF16)
    q, k, v = (x.transpose(1, 2) for x in fused.split(64, dim=-1))
    check_attention(tensors, q, k, v, tensors.slopes(heads), None)


@pytest.mark.parametrize("pool", ["packed", "gaps", "transposed", "heads last"])
def test_pools_of_any_strides_are_read_and_written_in_place_and_nothing_between(tensors, pool) -> None:
    for pool_dtype in (FP32, BF16):
        options = {"sizes": (48, 32), "pool": pool, "pool_dtype": pool_dtype, "slots": [4, -1, 0, 2]}
        batch = tensors.ragged([70, 2, 1, 130], initial=[True, True, True, False], **options)
        prefill(batch)
        batch.check()
        batch = tensors.ragged([1] * 4, **options)
        decode(batch)
        batch.check(products=FP32)
        batch = tensors.ragged([5] * 4, **options)
        verify(batch)
        batch.check(states=[0] * 4)
        commit(batch, [5, 5, 2, 0])
        batch.check(states=[5, 5, 2, 0], products=FP32)


def test_results_are_new_packed_tensors_where_no_out_is_given(tensors) -> None:
    batch = tensors.ragged([70, 0, 1, 9], slots=[1, 2, -1, 0], rows_after=2, fused=True)
    got = prefill(batch, out=None)
    assert got.is_contiguous()
    assert got.dtype == BF16
    batch.check_out(got)
    batch.check(out=False)
    batch = tensors.ragged([4] * 3, fused=True)
    shaped = [drafts(batch, x) for x in (batch.q, batch.k, batch.v)]
    got = lightning_verify(*shaped, batch.pool.tensor, batch.slots, batch.slopes)
    assert got.is_contiguous()
    batch.check_out(got.flatten(0, 1))
    got = lightning_decode(*(x[:3] for x in (batch.q, batch.k, batch.v)), batch.pool.tensor, batch.slots, batch.slopes)
    assert got.is_contiguous()
    assert got.shape == (3, 4, 64)


SNAPSHOTS = {
    "aligned, in order": [[64, 128, 192, 256]],
    "unaligned, in order": [[1, 63, 65, 200]],
    "in any order": [[256, 1, 300, 64, 129, 128]],
    "of all its tokens": [[300, -1]],
    "unused": [[-1, -1, 17]],
}


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=name_of)
@pytest.mark.parametrize("positions", SNAPSHOTS.values(), ids=SNAPSHOTS)
def test_snapshots_hold_the_state_after_so_many_tokens(tensors, positions, index_dtype) -> None:
    for dtype in (BF16, FP32):
        batch = tensors.ragged([300], sizes=(48, 64), dtype=dtype, num_slots=12, index_dtype=index_dtype)
        run_with_snapshots(batch, positions)


def test_sequences_of_a_ragged_batch_each_leave_their_own_snapshots(tensors) -> None:
    positions = [[64, 1], [-1, -1], [1, -1], [129, 100], [-1, 64], [-1, -1], [3, 5], [300, 256]]
    for pool in ("packed", "transposed"):
        for pool_dtype in (FP32, BF16):
            batch = tensors.ragged(
                RAGGED, heads=(2, 4), num_slots=30, initial=[True, False] * 4, pool=pool, pool_dtype=pool_dtype,
                rows_after=3,
            )  # fmt: skip
            run_with_snapshots(batch, positions)


def test_padded_sequences_and_snapshots_without_a_slot_write_none(tensors) -> None:
    batch = tensors.ragged([70, 65, 9], slots=[3, -1, 0], num_slots=12)
    run_with_snapshots(batch, [[64, 70], [64, 2], [3, 9]], unused=[(0, 1), (2, 0)])


def run_with_snapshots(batch, positions, unused=()) -> None:
    """Each position with a slot of its own, -1 for those that are not used."""
    free = iter([slot for slot in torch.randperm(batch.num_slots).tolist() if slot not in batch.slot_of])
    slots = [
        [next(free) if position >= 0 and (i, j) not in unused else -1 for j, position in enumerate(row)]
        for i, row in enumerate(positions)
    ]
    indices = {"dtype": batch.slots.dtype, "device": batch.q.device}
    prefill(batch, snapshot=Snapshots(torch.tensor(positions, **indices), torch.tensor(slots, **indices)))
    taken = [
        (i, position, slots[i][j]) for i in batch.live for j, position in enumerate(positions[i]) if slots[i][j] >= 0
    ]
    batch.check(snapshots=taken)


@given(data=st.data())
def test_ragged_batches_of_any_make(tensors, data) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**32), label="seed"))
    lengths = draw(st.lists(st.one_of(st.just(0), st.just(1), st.integers(2, 200)), max_size=6), label="lengths")
    count, num_slots = len(lengths), 2 * len(lengths) + 2
    permuted = torch.randperm(num_slots).tolist()
    padded = draw(st.lists(st.booleans(), min_size=count, max_size=count), label="padded")
    batch = tensors.ragged(
        lengths,
        heads=draw(st.sampled_from([(2, 2), (2, 4), (3, 1)]), label="heads"),
        sizes=draw(st.sampled_from([(64, 64), (48, 80)]), label="sizes"),
        dtype=draw(st.sampled_from([BF16, FP32]), label="dtype"),
        pool=draw(st.sampled_from(["packed", "gaps", "transposed"]), label="pool"),
        slots=[-1 if out else slot for out, slot in zip(padded, permuted, strict=False)],
        num_slots=num_slots,
        initial=draw(st.lists(st.booleans(), min_size=count, max_size=count), label="initial"),
        rows_after=draw(st.integers(0, 2), label="rows after"),
        fused=draw(st.booleans(), label="fused"),
        scale=draw(st.sampled_from([1.0, 0.3]), label="scale"),
    )
    positions = [[draw(st.integers(1, n))] if n and draw(st.booleans()) else [-1] for n in lengths]
    free = permuted[count:]
    indices = {"dtype": torch.int64, "device": tensors.device}
    snapshot = Snapshots(
        torch.tensor(positions, **indices).reshape(count, 1), torch.tensor(free[:count], **indices)[:, None]
    )
    with validate_values():
        prefill(batch, snapshot=snapshot)
    batch.check(snapshots=[(i, positions[i][0], free[i]) for i in batch.live if positions[i][0] > 0])


@on_a_gpu
@pytest.mark.parametrize("model", [MINIMAX_01, TP8], ids=name_of)
@much_memory()
def test_ragged_prefill_at_model_shapes(tensors, model) -> None:
    lengths = [1, 1, 4096, 0, 777, 1, 2048, 300, 1, 64, 1, 1, 1500, 1, 3, 1]
    slots = torch.randperm(64)[: len(lengths)].tolist()
    slots[4] = -1
    batch = tensors.ragged(
        lengths, heads=(model.num_heads, model.num_heads), sizes=(model.head_qk, model.head_v), slots=slots,
        num_slots=64, initial=[True, False] * 8, fused=True, rows_after=40,
    )  # fmt: skip
    run_with_snapshots(batch, [[n if n > 1 else -1, n // 2 if n > 1 else -1] for n in lengths])


@on_a_gpu
@pytest.mark.parametrize("sequences", [1, 32, 200])
@pytest.mark.parametrize("model", [MINIMAX_01, TP8], ids=name_of)
def test_decoding_and_verifying_at_model_shapes(tensors, model, sequences) -> None:
    options = {"heads": (model.num_heads, model.num_heads), "sizes": (model.head_qk, model.head_v), "fused": True}
    batch = tensors.ragged([1] * sequences, **options)
    decode(batch)
    batch.check(products=FP32)
    batch = tensors.ragged([7] * sequences, **options)
    verify(batch)
    batch.check(states=[0] * sequences)
    accepted = [i % 8 for i in range(sequences)]
    commit(batch, accepted)
    batch.check(states=accepted, products=FP32)


@pytest.mark.parametrize("pool_dtype", [FP32, BF16, FP16], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_decoding_is_one_step_of_the_recurrence_in_place(tensors, dtype, pool_dtype) -> None:
    """Beside plain float32: nothing but the output, and a state in a pool of 16 bits, is ever rounded to 16 bits."""
    batch = tensors.ragged(
        [1] * 6, heads=(8, 8), dtype=dtype, pool_dtype=pool_dtype, slots=[5, -1, 0, 7, -1, 2], scale=0.3
    )
    decode(batch)
    batch.check(products=FP32)


@pytest.mark.parametrize("sizes", SIZES, ids=name_of)
def test_decoding_and_verifying_take_any_head_sizes(tensors, sizes) -> None:
    dtype = DTYPES[SIZES.index(sizes) % 3]
    batch = tensors.ragged([1] * 4, sizes=sizes, dtype=dtype)
    decode(batch)
    batch.check(products=FP32)
    batch = tensors.ragged([5] * 3, sizes=sizes, dtype=dtype)
    verify(batch)
    batch.check(states=[0] * 3)
    commit(batch, [5, 0, 3])
    batch.check(states=[5, 0, 3], products=FP32)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=name_of)
@pytest.mark.parametrize("shape", [(4,), (4, 1, 1), (1, 4, 1, 1)], ids=str)
def test_the_drop_in_decoding_returns_rows_of_all_heads(tensors, shape, index_dtype) -> None:
    for dtype, pool_dtype, sizes in ((BF16, FP32, (64, 64)), (FP16, FP16, (48, 80)), (FP32, FP32, (96, 16))):
        batch = tensors.ragged(
            [1] * 5, sizes=sizes, dtype=dtype, pool_dtype=pool_dtype, slots=[5, 2, -1, 7, 0], index_dtype=index_dtype
        )
        got = drop_in(batch, shape)
        assert got.shape == (5, 4 * sizes[1])
        assert got.dtype == dtype
        batch.check_out(got.unflatten(1, (4, sizes[1])), products=FP32)
        batch.check(out=False, products=FP32)


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
def test_block_size_is_without_effect_in_decoding(tensors, block_size) -> None:
    batch = tensors.ragged([1] * 3, sizes=(80, 80))
    got = drop_in(batch, BLOCK_SIZE=block_size)
    batch.check_out(got.unflatten(1, (4, 80)), products=FP32)
    batch.check(out=False, products=FP32)


def drop_in(batch, shape=(-1,), **options):
    """[B, heads, elements] as engines have them: [B, heads, 1, elements]."""
    q, k, v = (x[:, :, None] for x in (batch.q, batch.k, batch.v))
    return linear_decode_forward_triton(
        q, k, v, batch.pool.tensor, batch.slopes.view(shape), batch.slots, **options
    )  # fmt: skip


@pytest.mark.parametrize("tokens", range(1, 17))
def test_verifying_gives_what_decoding_would_and_leaves_the_bits_of_the_pool(tensors, tokens) -> None:
    for dtype in (BF16, FP32):
        batch = tensors.ragged([tokens] * 4, sizes=(64, 48), dtype=dtype, slots=[4, 0, -1, 6], scale=0.4)
        verify(batch)
        batch.check(states=[0] * 4)
        pool = batch.before.clone()
        q, k, v = (drafts(batch, x) for x in (batch.q, batch.k, batch.v))
        outs = [
            lightning_decode(q[:, t], k[:, t], v[:, t], pool, batch.slots, batch.slopes, scale=0.4)
            for t in range(tokens)
        ]
        batch.check_out(torch.stack(outs, dim=1).flatten(0, 1), products=FP32, chunk=1)


@pytest.mark.parametrize("pool_dtype", [FP32, BF16, FP16], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_verifying_and_committing_have_the_bits_of_decoding_the_accepted_tokens(tensors, dtype, pool_dtype) -> None:
    tokens, accepted = 6, [6, 0, 3, 1, 5, 2, 4]
    slots = [8, 1, 0, 5, -1, 3, 9]
    batch = tensors.ragged(
        [tokens] * 7, heads=(8, 8), sizes=(48, 64), dtype=dtype, pool_dtype=pool_dtype, slots=slots, num_slots=11
    )
    verify(batch)
    commit(batch, accepted, torch.int64 if dtype == FP32 else torch.int32)
    batch.check(states=accepted, products=FP32, chunk=1, stored=pool_dtype, out=False)
    batch.check_out(batch.out.tensor, products=FP32, chunk=1, stored=pool_dtype)
    q, k, v, verified = (drafts(batch, x) for x in (batch.q, batch.k, batch.v, batch.out.tensor))
    pool, every = batch.before.clone(), batch.before.clone()
    for t in range(tokens):
        now = torch.tensor([slot if t < most else -1 for slot, most in zip(slots, accepted, strict=True)])
        lightning_decode(q[:, t], k[:, t], v[:, t], pool, now.int().to(tensors.device), batch.slopes)
        out = lightning_decode(q[:, t], k[:, t], v[:, t], every, batch.slots, batch.slopes)
        assert_bitwise_equal(verified[:, t], out, what=f"the output of draft {t}")
    assert_bitwise_equal(batch.pool.tensor, pool, what="the committed states")


@pytest.mark.parametrize("pool_dtype", [FP32, BF16, FP16], ids=name_of)
def test_a_state_that_nothing_advances_keeps_every_bit_of_nans_and_negative_zeros_too(tensors, pool_dtype) -> None:
    def batch_of(lengths, slots=(4, 0, 2)):
        batch = tensors.ragged(lengths, slots=slots, pool_dtype=pool_dtype)
        batch.pool.tensor.view(torch.int32 if pool_dtype == FP32 else torch.int16).random_()
        batch.pool.tensor[4] = -0.0
        batch.before.copy_(batch.pool.tensor)
        return batch

    batch = batch_of([3, 3, 3])
    verify(batch)
    batch.check(states=[0] * 3, out=False)
    for accepted in ([0, 0, 0], [4, -1, 0]):
        with validate_values(False):
            commit(batch, accepted)
        batch.check(states=[0] * 3, out=False)
    for lengths, slots in (([0, 0, 0], (4, 0, 2)), ([1, 1, 1], (-1, -1, -1))):
        batch = batch_of(lengths, slots)
        prefill(batch)
        if lengths[0]:
            decode(batch)
        batch.check(states=[0] * 3)


def test_verifying_and_committing_round_after_round_equals_decoding(tensors) -> None:
    """Three rounds of drafts, of which some are taken: the state and the next round's outputs are the recurrence's."""
    rounds, tokens = [[4, 0, 2], [1, 4, 0], [3, 3, 3]], 4
    taken = [sum(row) for row in zip(*rounds, strict=True)]
    true = tensors.ragged(taken, sizes=(48, 64))
    slots, pool = true.slots, true.before.clone()
    outs = [[], [], []]
    begins = list(true.begins)
    for accepted in rounds:
        q, k, v = (tensors.normal(3, tokens, *x.shape[1:], dtype=BF16) for x in (true.q, true.k, true.v))
        for i, most in enumerate(accepted):
            for x, own in ((q, true.q), (k, true.k), (v, true.v)):
                x[i, :most] = own[begins[i] : begins[i] + most]
            begins[i] += most
        out = lightning_verify(q, k, v, pool, slots, true.slopes)
        for i, most in enumerate(accepted):
            outs[i].append(out[i, :most])
        counts = torch.tensor(accepted, dtype=torch.int32, device=tensors.device)
        lightning_commit(k, v, pool, slots, true.slopes, counts)
    true.check_out(torch.cat([one for own in outs for one in own]))
    true.pool.tensor.copy_(pool)
    true.check(out=False)


ORDERS = {
    "reversed": (lambda rank: tuple(reversed(range(rank))), 1),
    "last two swapped": (lambda rank: (*range(rank - 2), rank - 1, rank - 2), 1),
    "first two swapped": (lambda rank: (1, 0, *range(2, rank)), 1),
    "every second element": (lambda rank: tuple(range(rank)), 2),
}


def in_turn(tensors_given, turn: int) -> list[torch.Tensor]:
    """Each with strides of another kind."""
    kinds = [*ORDERS.values()]
    chosen = [kinds[(turn + i) % len(kinds)] for i in range(len(tensors_given))]
    return [laid_out(x, order(x.ndim), step) for x, (order, step) in zip(tensors_given, chosen, strict=True)]


@pytest.mark.parametrize("turn", range(4), ids=[*ORDERS])
def test_prefill_reads_tensors_of_any_strides(tensors, turn) -> None:
    for dtype in (BF16, FP32):
        *qkv, slopes, history = inputs(tensors, 2, 4, 70, (48, 64), dtype)
        *qkv, history = in_turn([*qkv, history], turn)
        check_attention(tensors, *qkv, slopes, history)
        batch = tensors.ragged([70, 1, 9], sizes=(48, 64), dtype=dtype)
        batch.q, batch.k, batch.v, out = in_turn([batch.q, batch.k, batch.v, batch.out.tensor], turn)
        prefill(batch, out=out)
        batch.check_out(out)
        batch.check(out=False)


def test_prefill_reads_expanded_tensors(tensors) -> None:
    slopes, history = tensors.slopes(4), tensors.normal(1, 1, 32, 48).expand(3, 4, -1, -1)
    q = tensors.normal(1, 4, 70, 32, dtype=BF16).expand(3, -1, -1, -1)
    k = tensors.normal(3, 1, 70, 32, dtype=BF16).expand(-1, 4, -1, -1)
    v = tensors.normal(3, 4, 1, 48, dtype=BF16).expand(-1, -1, 70, -1)
    check_attention(tensors, q, k, v, slopes, history)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("num_heads", [4, 12])
def test_inputs_keep_their_bits(tensors, num_heads, tokens) -> None:
    batch = tensors.ragged([tokens] * 3, heads=(num_heads, num_heads))
    given = (batch.q, batch.k, batch.v, batch.slopes, batch.slots, batch.cu_seqlens, batch.has_initial_state)
    kept = [x.clone() for x in given]
    prefill(batch)
    verify(batch)
    commit(batch, [tokens] * 3)
    if tokens == 1:
        decode(batch)
    for one, other in zip(given, kept, strict=True):
        assert_bitwise_equal(one, other, what="an input")


def test_values_that_are_right_pass_validate_values(tensors) -> None:
    batch = tensors.ragged([70, 0, 9, 1], slots=[2, -1, -1, 0], num_slots=9, rows_after=2)
    with validate_values():
        run_with_snapshots(batch, [[64, 70], [-1, -1], [9, 1], [1, -1]])
        check_attention(tensors, *inputs(tensors, 1, 4, 9, (32, 32), BF16))
        batch = tensors.ragged([4] * 3, slots=[-1, 3, -1])
        verify(batch)
        commit(batch, [0, 4, 9][:2] + [1])
        batch.check(states=[0, 4, 0], products=FP32, out=False)
        batch = tensors.ragged([1] * 3, slots=[-1, 3, -1])
        decode(batch)
        batch.check(products=FP32)


def geometric(heads: int) -> list[float]:
    return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 7, 8, 12, 16, 20, 24, 40, 48, 64, 80, 96, 100, 128])
def test_slopes_are_those_of_a_power_of_two_heads_and_every_second_one_of_twice_as_many(heads) -> None:
    power = 2 ** (heads.bit_length() - 1)
    wanted = torch.tensor(geometric(power) + geometric(2 * power)[::2][: heads - power], dtype=torch.float64)
    got = lightning_attn.slopes(heads)
    assert got.dtype == torch.float32
    assert got.device.type == "cpu"
    assert got.shape == (heads,)
    assert ((got.double() / wanted - 1).abs() <= 2 * torch.finfo(FP32).eps).all()


def test_slopes_of_8_and_12_heads_as_numbers() -> None:
    assert lightning_attn.slopes(8).tolist() == [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
    assert lightning_attn.slopes(12)[:8].tolist() == lightning_attn.slopes(8).tolist()
    rates = [math.sqrt(0.5), math.sqrt(0.5) / 2, math.sqrt(0.5) / 4, math.sqrt(0.5) / 8]
    assert lightning_attn.slopes(12)[8:].tolist() == pytest.approx(rates, rel=2**-23)


@pytest.mark.parametrize(("layer", "layers"), [(0, 80), (3, 80), (79, 80), (0, 1), (1, 2)])
@pytest.mark.parametrize("heads", [8, 12, 64])
def test_slopes_of_a_layer_are_less_the_deeper_it_lies(heads, layer, layers) -> None:
    factor = 1 - layer / (layers - 1) + 1e-5 if layers > 1 else 1 + 1e-5
    got, base = lightning_attn.slopes(heads, layer, layers), lightning_attn.slopes(heads)
    assert got.dtype == torch.float32
    assert ((got.double() / (base.double() * factor) - 1).abs() <= 2 * torch.finfo(FP32).eps).all()
    assert torch.equal(lightning_attn.slopes(heads, layer_idx=layer, num_layers=layers), got)


@pytest.mark.parametrize(
    ("layer", "layers", "factor"),
    [(0, 32, 1 + 1 / 31 + 1e-5), (1, 32, 1 + 1e-5), (31, 32, 1 / 31 + 1e-5), (0, 1, 2 + 1e-5)],
)
def test_slopes_of_ling_and_ring_count_layers_from_minus_1(layer, layers, factor) -> None:
    base = lightning_attn.slopes(16)
    got = lightning_attn.slopes(16, layer, layers, family="bailing")
    assert ((got.double() / (base.double() * factor) - 1).abs() <= 2 * torch.finfo(FP32).eps).all()


def test_the_first_of_32_layers_differs_by_family_as_the_models_do() -> None:
    """Head 0 of 16, by the modelling code of each."""
    assert lightning_attn.slopes(16, 0, 32)[0].item() == pytest.approx(0.70711, abs=1e-5)
    assert lightning_attn.slopes(16, 0, 32, family="minimax")[0].item() == pytest.approx(0.70711, abs=1e-5)
    assert lightning_attn.slopes(16, 0, 32, family="bailing")[0].item() == pytest.approx(0.72992, abs=1e-5)
    assert torch.equal(lightning_attn.slopes(16, family="bailing"), lightning_attn.slopes(16))


def gradients(tensors, leaves, slopes, d_out, d_kv, form):
    """Of q, k, v and the history (if any): by the public function, or by autograd through exact or plain."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    history = leaves[3] if len(leaves) > 3 else None
    if form is None:
        out, kv = lightning_attention(*leaves[:3], slopes, kv_history=history)
        kv = kv[:, :, 0]
    else:
        out, kv = tensors.padded(*leaves[:3], slopes, history, 1.0, form)
    results, cotangents = [], []
    for result, cotangent in ((out, d_out), (kv, d_kv)):
        if cotangent is not None:
            results.append(result)
            cotangents.append(cotangent.to(result.dtype))
    found = torch.autograd.grad(results, leaves, cotangents, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


def wanted_gradients(tensors, leaves, slopes, d_out, d_kv):
    """Of each leaf, beside those of the plain versions."""

    def forms_of(*leaves):
        plains = [gradients(tensors, leaves, slopes, d_out, d_kv, form) for form in (tensors.plain, tensors.otherwise)]
        return [gradients(tensors, [x.double() for x in leaves], slopes, d_out, d_kv, tensors.exact), *plains]

    return tensors.wanted(forms_of, leaves)


def check_gradients(tensors, leaves, slopes, d_out, d_kv) -> None:
    got = gradients(tensors, leaves, slopes, d_out, d_kv, None)
    wanted = wanted_gradients(tensors, leaves, slopes, d_out, d_kv)
    for name, one, forms in zip(("dq", "dk", "dv", "d_history"), got, wanted, strict=False):
        tensors.assert_rounded(one, forms, apart=(0, 1), what=name)


def leaves_and_cotangents(tensors, batch, heads, tokens, sizes, dtype, *, carried=True):
    q, k, v, slopes, history = inputs(tensors, batch, heads, tokens, sizes, dtype, carried=carried)
    d_out, d_kv = torch.randn_like(v), tensors.normal(batch, heads, *sizes)
    return [q, k, v, *([history] if carried else [])], slopes, d_out, d_kv


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=name_of)
@pytest.mark.parametrize("carried", [False, True], ids=["from zeros", "carried"])
@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (1, (64, 64)), (15, (32, 48)), (64, (64, 64)), (65, (48, 80)), (100, (80, 48)), (257, (64, 128)),
        (300, (128, 128)),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_are_those_of_the_recurrence(tensors, tokens, sizes, carried, dtype) -> None:
    check_gradients(tensors, *leaves_and_cotangents(tensors, 1, 8, tokens, sizes, dtype, carried=carried))


@pytest.mark.parametrize("sizes", [(16, 256), (256, 16), (96, 96), (192, 64), (17, 33), (256, 256)], ids=name_of)
def test_gradients_at_any_head_sizes(tensors, sizes) -> None:
    check_gradients(tensors, *leaves_and_cotangents(tensors, 1, 4, 130, sizes, BF16))


@on_a_gpu
@pytest.mark.parametrize(("batch", "tokens"), [(1, 4097), (2, 1000)])
@much_memory()
def test_gradients_at_model_shapes(tensors, batch, tokens) -> None:
    sizes = (MINIMAX_01.head_qk, MINIMAX_01.head_v)
    check_gradients(tensors, *leaves_and_cotangents(tensors, batch, MINIMAX_01.num_heads, tokens, sizes, BF16))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)
@pytest.mark.parametrize("carried", [False, True], ids=["from zeros", "carried"])
@pytest.mark.parametrize("used", ["out", "kv"])
def test_a_loss_may_use_the_output_alone_or_the_state_alone(tensors, used, carried, dtype) -> None:
    leaves, slopes, d_out, d_kv = leaves_and_cotangents(tensors, 2, 4, 100, (48, 64), dtype, carried=carried)
    check_gradients(tensors, leaves, slopes, d_out if used == "out" else None, d_kv if used == "kv" else None)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=name_of)
def test_gradients_may_arrive_with_any_strides_expanded_ones_too(tensors, dtype) -> None:
    leaves, slopes, d_out, d_kv = leaves_and_cotangents(tensors, 2, 4, 70, (32, 48), dtype)
    for turn in range(4):
        check_gradients(tensors, leaves, slopes, *in_turn([d_out, d_kv], turn))
    one_row, one_number = d_out[:, :, :1].expand_as(d_out), d_kv[:1, :1, :1, :1].expand_as(d_kv)
    check_gradients(tensors, leaves, slopes, one_row, one_number)
    check_gradients(tensors, leaves, slopes, d_out[:1, :1, :1, :1].expand_as(d_out), None)


def test_gradients_of_strided_and_expanded_inputs(tensors) -> None:
    leaves, slopes, d_out, d_kv = leaves_and_cotangents(tensors, 2, 4, 70, (32, 48), BF16)
    wanted = wanted_gradients(tensors, leaves, slopes, d_out, d_kv)
    for turn in range(4):
        strided = [x.requires_grad_() for x in in_turn(leaves, turn)]
        out, kv = lightning_attention(*strided[:3], slopes, kv_history=strided[3])
        got = torch.autograd.grad([out, kv], strided, [d_out, d_kv[:, :, None]])
        for one, leaf, forms in zip(got, strided, wanted, strict=True):
            assert one.shape == leaf.shape
            tensors.assert_rounded(one, forms, apart=(0, 1))


@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "kv_history"])
def test_a_gradient_is_made_where_one_is_asked_for(tensors, place) -> None:
    leaves, slopes, d_out, d_kv = leaves_and_cotangents(tensors, 1, 4, 70, (32, 48), BF16)
    wanted = wanted_gradients(tensors, [*leaves], slopes, d_out, d_kv)
    leaves[place].requires_grad_()
    out, kv = lightning_attention(*leaves[:3], slopes, kv_history=leaves[3])
    torch.autograd.backward([out, kv], [d_out, d_kv[:, :, None]])
    assert [leaf.grad is not None for leaf in leaves] == [i == place for i in range(4)]
    got = leaves[place].grad
    assert got.dtype == leaves[place].dtype
    tensors.assert_rounded(got, wanted[place], apart=(0, 1))


def test_results_with_gradients_are_those_without_bit_for_bit(tensors) -> None:
    q, k, v, slopes, history = inputs(tensors, 2, 4, 130, (48, 64), BF16)
    wanted = lightning_attention(q, k, v, slopes, kv_history=history)
    assert not wanted.out.requires_grad
    got = lightning_attention(q.clone().requires_grad_(), k, v, slopes, kv_history=history)
    assert got.out.requires_grad
    assert got.kv.requires_grad
    for one, other in zip(got, wanted, strict=True):
        assert_bitwise_equal(one, other)
    with torch.no_grad():
        assert not lightning_attention(q.requires_grad_(), k, v, slopes).out.requires_grad


def test_gradients_of_no_tokens_pass_the_state_on(tensors) -> None:
    leaves, slopes, d_out, d_kv = leaves_and_cotangents(tensors, 2, 4, 0, (32, 48), BF16)
    got = gradients(tensors, leaves, slopes, d_out, d_kv, None)
    assert [one.shape for one in got] == [leaf.shape for leaf in leaves]
    assert torch.equal(got[3], d_kv)


# What kernels of this kind have got wrong, one test each; offsets past 2^31 are in test_guards.


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=name_of)
def test_trap_a_token_of_a_later_chunk_sees_the_first_one_decayed_by_their_distance_and_not_exp_s_more(
    tensors, dtype
) -> None:
    tokens, slopes = 300, torch.tensor([0.02, 0.003, 0.0007, 0.0], device=tensors.device)
    q, k, v, _, _ = inputs(tensors, 1, 4, tokens, (64, 64), dtype, carried=False)
    # The first token alone has a key, so that the output is one term.
    k[:, :, 1:] = 0
    places = torch.arange(tokens, device=tensors.device).double()
    weight = torch.exp(-slopes.double()[:, None] * places)[..., None]

    def forms_of(q, k, v):
        term = weight * (q.double() @ k[:, :, :1].double().mT) * v[:, :, :1].double()
        return [(term,), (tensors.padded(q, k, v, slopes, form=tensors.plain)[0],)]

    (wanted,) = tensors.wanted(forms_of, [q, k, v])
    tensors.assert_rounded(lightning_attention(q, k, v, slopes).out, wanted, apart=(0, 1))
    check_attention(tensors, *inputs(tensors, 1, 4, tokens, (64, 64), dtype)[:3], 10 * slopes, None)


@pytest.mark.parametrize("tokens", [1, 2, 65])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=name_of)
def test_trap_the_first_token_sees_a_carried_state_decayed_once_and_not_whole(tensors, dtype, tokens) -> None:
    slopes = torch.tensor([1.0, 0.3, 0.02, 0.0], device=tensors.device)
    q, k, v, _, history = inputs(tensors, 1, 4, tokens, (64, 48), dtype)
    k.zero_()
    places = torch.arange(1, tokens + 1, device=tensors.device).double()
    weight = torch.exp(-slopes.double()[:, None] * places)[..., None]

    def forms_of(q, history):
        term = weight * (q.double() @ history.double())
        return [(term,), (tensors.padded(q, k, v, slopes, history, form=tensors.plain)[0],)]

    (wanted,) = tensors.wanted(forms_of, [q, history])
    got = lightning_attention(q, k, v, slopes, kv_history=history).out
    tensors.assert_rounded(got, wanted, apart=(0, 1))
    batch = tensors.ragged([tokens, 1], sizes=(64, 48), dtype=dtype, slopes=slopes)
    batch.k.zero_()
    prefill(batch)
    batch.check()


@pytest.mark.parametrize("size", [16, 48, 80, 96, 192, 256])
def test_trap_head_sizes_other_than_64_and_128_are_computed_whole(tensors, size) -> None:
    batch = tensors.ragged([70, 1], sizes=(size, size))
    prefill(batch)
    batch.check()


def test_trap_padded_rows_are_zeros_and_not_what_the_memory_held(tensors) -> None:
    """The allocator hands back memory full of NaN, which an output that is not written would show."""
    for tokens, rows in ((1, 6), (8, 48)):
        batch = tensors.ragged([tokens] * 6, slots=[3, -1, 0, -1, -1, 1])
        q, k, v = (drafts(batch, x) for x in (batch.q, batch.k, batch.v))
        for call in (
            lambda b=batch: lightning_attention_varlen(
                b.q, b.k, b.v, b.slopes, b.cu_seqlens, state_pool=b.before.clone(), slots=b.slots,
                has_initial_state=True,
            ),
            lambda b=batch, qkv=(q, k, v): lightning_verify(*qkv, b.before, b.slots, b.slopes).flatten(0, 1),
            *([lambda b=batch: drop_in(b).unflatten(1, (4, 64))] if tokens == 1 else []),
        ):  # fmt: skip
            # Freed at once, so that the next allocation of its size finds it.
            poisoned((rows, 4, 64), BF16, tensors.device)
            batch.check_out(call())


@pytest.mark.parametrize("turn", range(4), ids=[*ORDERS])
def test_trap_q_k_v_pool_and_output_are_each_addressed_with_strides_of_their_own(tensors, turn) -> None:
    for dtype in (BF16, FP32):
        for pool in ("packed", "transposed", "heads last", "gaps"):
            batch = tensors.ragged([1] * 4, sizes=(48, 80), dtype=dtype, pool=pool, slots=[2, -1, 0, 5])
            batch.q, batch.k, batch.v = in_turn([batch.q, batch.k, batch.v], turn)
            got = drop_in(batch)
            batch.check_out(got.unflatten(1, (4, 80)), products=FP32)
            batch.check(out=False, products=FP32)
            batch = tensors.ragged([5] * 4, sizes=(48, 80), dtype=dtype, pool=pool, slots=[2, -1, 0, 5])
            q, k, v, out = in_turn([drafts(batch, x) for x in (batch.q, batch.k, batch.v, batch.out.tensor)], turn)
            lightning_verify(q, k, v, batch.pool.tensor, batch.slots, batch.slopes, out=out)
            batch.check_out(out.flatten(0, 1))
            accepted = torch.tensor([5, 1, 2, 0], dtype=torch.int32, device=tensors.device)
            lightning_commit(k, v, batch.pool.tensor, batch.slots, batch.slopes, accepted)
            batch.check(states=[5, 1, 2, 0], products=FP32, out=False)


@pytest.mark.parametrize("size", [16, 33, 48, 80, 96, 100, 250])
@pytest.mark.parametrize("block_size", [32, 64])
def test_trap_a_block_size_that_does_not_divide_the_head_drops_no_column(tensors, block_size, size) -> None:
    batch = tensors.ragged([1] * 3, sizes=(size, size), slots=[2, -1, 0])
    got = drop_in(batch, BLOCK_SIZE=block_size)
    batch.check_out(got.unflatten(1, (4, size)), products=FP32)
    batch.check(out=False, products=FP32)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=name_of)
def test_trap_the_product_of_k_and_v_is_formed_in_float32_where_it_is_exact(tensors, dtype) -> None:
    batch = tensors.ragged([1] * 4, sizes=(64, 48), dtype=dtype)
    batch.pool.tensor.zero_()
    k, v = (x.float() for x in (batch.k, batch.v))
    product = k[..., :, None] * v[..., None, :]
    assert not torch.equal(product, product.to(dtype).float())
    decode(batch)
    assert torch.equal(batch.pool.tensor[batch.slots.long()], product)
    batch.pool.tensor.zero_()
    drop_in(batch)
    assert torch.equal(batch.pool.tensor[batch.slots.long()], product)
    batch.pool.tensor.zero_()
    commit(batch, [1] * 4)
    assert torch.equal(batch.pool.tensor[batch.slots.long()], product)


@pytest.mark.parametrize("lengths", [[0, 0, 4, 0], [1, 0, 2, 1], [0, 2], [1, 1, 1, 5, 0, 0, 0, 0], [0] * 70 + [70]])
def test_trap_a_ragged_batch_of_mean_length_1_with_a_longer_sequence_is_not_decoding(tensors, lengths) -> None:
    assert sum(lengths) in (len(lengths), len(lengths) - 1)
    for initial in (True, False):
        batch = tensors.ragged(lengths, initial=initial)
        prefill(batch)
        batch.check()


def test_trap_16_bit_inputs_keep_the_decay_in_float32(tensors) -> None:
    """0.0123456 would be 0.01233 in bfloat16: after 300 tokens, an eighth of a percent of all that is kept."""
    slopes = torch.tensor([0.0123456, 0.0543211, 0.9911, 0.00123457], device=tensors.device)
    assert not torch.equal(slopes, slopes.bfloat16().float())
    for dtype in (BF16, FP16):
        q, k, v, _, history = inputs(tensors, 1, 4, 300, (64, 64), dtype)
        check_attention(tensors, q, k, v, slopes, history)
        batch = tensors.ragged([1] * 3, dtype=dtype, slopes=slopes)
        decode(batch)
        batch.check(products=FP32)
        batch = tensors.ragged([16] * 3, dtype=dtype, slopes=slopes)
        commit(batch, [16] * 3)
        batch.check(out=False, products=FP32)
    # Without keys the state is the decayed history, to the last bits of float32. Many heads, since each has one error;
    # chunks of 50 for the plain version, since 64 times a rate would be exact.
    q, k, v, _, history = inputs(tensors, 1, 32, 300, (16, 16), BF16)
    slopes = 0.05 * torch.rand(32, device=tensors.device)
    kv = lightning_attention(q, torch.zeros_like(k), v, slopes, kv_history=history).kv[:, :, -1]
    forms = (tensors.exact, partial(tensors.plain, chunk=50))

    def forms_of(history):
        return [(tensors.padded(q, torch.zeros_like(k), v, slopes, history, form=form)[1],) for form in forms]

    (wanted,) = tensors.wanted(forms_of, [history])
    tensors.assert_rounded(kv, wanted, apart=(0, 1))


@pytest.mark.parametrize("steep", [8.0, 50.0, 300.0, 1e30])
def test_trap_steep_decays_do_not_overflow_for_no_exponent_is_above_0(tensors, steep) -> None:
    slopes = torch.tensor([steep, 0.01, steep / 3, steep], device=tensors.device)
    for dtype in (BF16, FP16, FP32):
        q, k, v, _, history = inputs(tensors, 1, 4, 300, (48, 64), dtype)
        got = check_attention(tensors, q, k, v, slopes, history)
        assert bool(got.out.isfinite().all())
        batch = tensors.ragged([16] * 3, sizes=(48, 64), dtype=dtype, slopes=slopes)
        verify(batch)
        batch.check(states=[0] * 3)
        commit(batch, [16, 0, 9])
        batch.check(states=[16, 0, 9], products=FP32)
    leaves, _, d_out, d_kv = leaves_and_cotangents(tensors, 1, 4, 100, (48, 64), FP32)
    check_gradients(tensors, leaves, slopes, d_out, d_kv)


@pytest.mark.parametrize("steep", [1.0, 3.0, 8.0, 50.0])
def test_a_steep_decay_forgets_a_large_state_to_the_last_bits(tensors, steep) -> None:
    """What is left of it is as exact as the decay, not as the state was."""
    slopes = torch.tensor([steep, steep / 2, steep / 4, 1e-4], device=tensors.device)
    for tokens in (1, 65):
        batch = tensors.ragged([tokens] * 3, sizes=(64, 48), slopes=slopes)
        batch.pool.tensor.mul_(1e4)
        batch.before.copy_(batch.pool.tensor)
        prefill(batch)
        batch.check()
    for call, tokens in ((decode, 1), (lambda batch: commit(batch, [3] * 3), 3)):
        batch = tensors.ragged([tokens] * 3, sizes=(64, 48), slopes=slopes)
        batch.pool.tensor.mul_(1e4)
        batch.before.copy_(batch.pool.tensor)
        call(batch)
        batch.check(products=FP32, out=tokens == 1)
