"""Are batches of any make the recurrence, through the public functions? As many as ``--random-cases`` asks for.

Each layer is a handful of kernels to compile; another batch of it is not.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from kernel_reference.testing.guards import assert_bitwise_equal
from lightning_attn import (
    Snapshots,
    lightning_attention,
    lightning_attention_varlen,
    lightning_commit,
    lightning_decode,
    lightning_verify,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Cases that share a layer's kernels. By 25, 500 cases drew twenty layers, and none had gradients of float32 that begin
# at a state of more than 128 columns.
OF_A_LAYER = 8
SIZES = (16, 24, 40, 64, 64, 72, 80, 96, 112, 128, 128, 192, 256)


def layer_of(random_case: int) -> random.Random:
    """What draws the layer of this case, the same one for all its cases."""
    return random.Random(f"layer {random_case // OF_A_LAYER}")


def drawn_length(rng: random.Random, longest: int) -> int:
    return rng.choice([0, 1, 2, 63, 64, 65, rng.randint(1, 200), rng.randint(1, longest)])


def drawn_slots(rng: random.Random, count: int, num_slots: int) -> list[int]:
    """A slot for each sequence, -1 for a fifth of them."""
    return [-1 if rng.random() < 0.2 else slot for slot in rng.sample(range(num_slots), count)]


def test_a_random_ragged_batch_is_the_recurrence(tensors, device, random_case) -> None:
    rng = layer_of(random_case)
    layer = {
        "heads": rng.choice([(1, 1), (2, 2), (2, 4), (3, 1), (8, 8)]), "sizes": tuple(rng.choices(SIZES, k=2)),
        "dtype": rng.choice([BF16, BF16, FP16, FP32]), "pool_dtype": rng.choice([FP32, FP32, BF16, FP16]),
        "pool": rng.choice(["packed", "packed", "gaps", "transposed", "heads last"]), "fused": rng.random() < 0.5,
        "index_dtype": rng.choice([torch.int32, torch.int64]), "scale": rng.choice([1.0, 0.3]),
    }  # fmt: skip
    marks = rng.choice([0, 0, 1, 2])
    rng = random.Random(random_case)
    torch.manual_seed(random_case)
    longest = 400 if device.type == "cpu" else 3000
    lengths = [drawn_length(rng, longest) for _ in range(rng.randint(0, 4 if device.type == "cpu" else 10))]
    count = len(lengths)
    num_slots = 2 + (2 + marks) * count
    slots = drawn_slots(rng, count, num_slots)
    batch = tensors.ragged(
        lengths, slots=slots, num_slots=num_slots, initial=[rng.random() < 0.5 for _ in lengths],
        rows_after=rng.choice([0, 0, 3]), **layer,
    )  # fmt: skip
    free = iter([slot for slot in range(num_slots) if slot not in slots])
    positions = [[rng.randint(1, n) if n and rng.random() < 0.7 else -1 for _ in range(marks)] for n in lengths]
    targets = [[next(free) if position > 0 else -1 for position in row] for row in positions]
    snapshot = None
    if marks:
        both = (torch.tensor(rows, dtype=torch.int64, device=device) for rows in (positions, targets))
        snapshot = Snapshots(*(x.reshape(count, marks) for x in both))
    lightning_attention_varlen(
        batch.q, batch.k, batch.v, batch.slopes, batch.cu_seqlens, state_pool=batch.pool.tensor, slots=batch.slots,
        has_initial_state=batch.has_initial_state, scale=batch.scale, out=batch.out.tensor, snapshot=snapshot,
    )  # fmt: skip
    taken = [(i, p, targets[i][j]) for i in batch.live for j, p in enumerate(positions[i]) if p > 0]
    batch.check(snapshots=taken)


def test_gradients_of_a_random_batch_are_the_recurrences(tensors, device, random_case) -> None:
    rng = layer_of(random_case)
    heads, sizes, dtype = rng.choice([1, 2, 4, 8]), rng.choices(SIZES, k=2), rng.choice([BF16, BF16, FP16, FP32])
    rng = random.Random(random_case)
    torch.manual_seed(random_case)
    on_cpu = device.type == "cpu"
    rows, tokens = rng.randint(1, 2 if on_cpu else 4), max(1, drawn_length(rng, 400 if on_cpu else 3000))
    slopes, (d, e) = tensors.slopes(heads), sizes
    q, k = (tensors.normal(rows, heads, tokens, d, dtype=dtype) for _ in range(2))
    v, d_out = (tensors.normal(rows, heads, tokens, e, dtype=dtype) for _ in range(2))
    history, d_state = (tensors.normal(rows, heads, d, e) for _ in range(2))

    def gradients(*leaves: torch.Tensor, form: Any = None) -> tuple[torch.Tensor, ...]:
        leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)
        if form is None:
            out, states = lightning_attention(*leaves[:3], slopes, kv_history=leaves[3])
            state = states[:, :, 0]
        else:
            out, state = tensors.padded(*leaves[:3], slopes, leaves[3], 1.0, form)
        return torch.autograd.grad((out, state), leaves, (d_out.to(out.dtype), d_state.to(state.dtype)))

    def forms_of(*leaves: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        plains = [gradients(*leaves, form=form) for form in (tensors.plain, tensors.otherwise)]
        return [gradients(*(leaf.double() for leaf in leaves), form=tensors.exact), *plains]

    leaves = (q, k, v, history)
    names = ("dq", "dk", "dv", "d_history")
    for name, got, wanted in zip(names, gradients(*leaves), tensors.wanted(forms_of, leaves), strict=True):
        tensors.assert_rounded(got, wanted, apart=(0, 1), what=name)


def test_random_drafts_have_the_bits_of_decoding(tensors, device, random_case) -> None:
    rng = layer_of(random_case)
    tokens = rng.choice([1, 2, 3, 4, 8, 16])
    layer = {
        "heads": rng.choice([(1, 1), (2, 2), (2, 4), (3, 1), (8, 8), (24, 24)]),
        "sizes": tuple(rng.choices(SIZES, k=2)), "dtype": rng.choice([BF16, BF16, FP16, FP32]),
        "pool_dtype": rng.choice([FP32, FP32, BF16, FP16]),
        "pool": rng.choice(["packed", "packed", "gaps", "transposed"]), "scale": rng.choice([1.0, 0.3]),
    }  # fmt: skip
    rng = random.Random(random_case)
    torch.manual_seed(random_case)
    count = rng.randint(1, 4 if device.type == "cpu" else 12)
    slots = drawn_slots(rng, count, 2 * count)
    drafts = tensors.ragged([tokens] * count, slots=slots, num_slots=2 * count, **layer)
    q, k, v, out = (x.unflatten(0, (count, tokens)) for x in (drafts.q, drafts.k, drafts.v, drafts.out.tensor))
    accepted = [rng.randint(0, tokens) for _ in slots]
    pool, scale = drafts.pool.tensor, drafts.scale
    lightning_verify(q, k, v, pool, drafts.slots, drafts.slopes, scale=scale, out=out)
    assert_bitwise_equal(pool, drafts.before, what="the pool that was verified")
    counts = torch.tensor(accepted, dtype=torch.int32, device=device)
    lightning_commit(k, v, pool, drafts.slots, drafts.slopes, counts)
    # Laid out as the drafts' pool: of other strides a compiler makes other sums, and a clone closes gaps.
    step = torch.empty_strided(pool.size(), pool.stride(), dtype=pool.dtype, device=device).copy_(drafts.before)
    outs = []
    wanted = drafts.before.clone()
    for t in range(tokens):
        outs.append(lightning_decode(q[:, t], k[:, t], v[:, t], step, drafts.slots, drafts.slopes, scale=scale))
        for i in drafts.live:
            if accepted[i] == t + 1:
                wanted[slots[i]] = step[slots[i]]
    assert_bitwise_equal(out, torch.stack(outs, dim=1), what="the verified outputs")
    assert_bitwise_equal(pool, wanted, what="the committed states")
    drafts.out.check(written=True)
    drafts.pool.check(written=False)
