"""Is any call the attention? Layers and their batches, drawn from one integer: all that a model may do.

On a GPU: ``pytest packages/blocksparse-attn/tests/test_random.py --random-cases 500 -n 14 --dist worksteal``. A layer's
kernels take half a minute to compile there, so that many cases in a row are of one layer; ``--random-cases 500:1000``
are of other layers.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from blocksparse_attn import AttentionPlan, SelectedPlan

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# Cases that share a layer's kernels, on a GPU.
OF_A_LAYER = 18
HEADS = [(1, 1), (4, 4), (8, 2), (6, 2), (16, 1), (24, 2), (12, 4)]
HEAD_SIZES = [40, 64, 64, 72, 80, 96, 128, 128, 128, 192, 256]
# (q_block, k_block): one is a multiple of the other.
BLOCKS = [
    (16, 16),
    (32, 32),
    (16, 48),
    (48, 48),
    (64, 64),
    (64, 64),
    (128, 64),
    (32, 128),
    (128, 128),
    (256, 128),
    (64, 256),
]
PAGES = [1, 3, 16, 16, 24, 32, 64, 64, 128, 256]


def drawn_layer(rng: random.Random) -> dict[str, Any]:
    """What all calls of a layer under a block mask have in common: most of it is compiled in."""
    kind = rng.choice(["ragged", "paged", "paged", "padded"])
    head_dim = rng.choice(HEAD_SIZES)
    layout = rng.choice(["NHD", "NHD", "HND", "x-packed"])
    packed = kind == "paged" and layout == "x-packed"
    return {
        # Where pages are x-packed, 16 bytes of a head's elements lie together.
        "kind": kind, "head_dim": rng.choice([64, 128]) if packed else head_dim,
        "head_dim_v": None if packed or rng.random() < 0.7 else rng.choice([32, 64, 128]),
        "heads": rng.choice(HEADS), "dtype": rng.choice([BF16, BF16, BF16, FP16, FP32]),
        "blocks": rng.choice(BLOCKS),
        "one_layout": rng.random() < 0.3, "page": rng.choice(PAGES), "page_layout": layout,
        "side": rng.choice(["left", "right", "both"]), "window": rng.random() < 0.3,
        "softcap": rng.choice([0.0, 0.0, 0.0, 5.0, 30.0]), "softmax_scale": rng.choice([None, None, None, 0.3, -0.1]),
        "sinks": rng.random() < 0.4, "lse": rng.random() < 0.7, "index_dtype": rng.choice([torch.int32, torch.int64]),
        "scattered": rng.random() < 0.3,
    }  # fmt: skip


def drawn_selected_layer(rng: random.Random) -> dict[str, Any]:
    """The same of selected attention."""
    dtype = rng.choice([BF16, BF16, FP16, FP32])
    # Keys of 8 bits are for queries of 16.
    cache = rng.choice([None, None, E4M3]) if dtype != FP32 else None
    block = rng.choice([1, 4, 16, 32, 64, 64, 128, 128])
    return {
        "heads": rng.choice([*HEADS, (64, 4), (64, 1)]), "head_dim": rng.choice([64, 128, 128, 256, 80]),
        "head_dim_v": rng.choice([None, None, 48, 128]), "block": block,
        "topk": rng.choice([1, 3, 16, 100]) if block < 16 else rng.choice([1, 2, 4, 16]), "page": rng.choice(PAGES),
        "dtype": dtype, "cache": cache, "causal": rng.random() < 0.8,
        "scales": rng.choice(["", "numbers", "one", "heads"]) if cache else "", "sinks": rng.random() < 0.4,
        "page_layout": rng.choice(["NHD", "HND"]),
    }  # fmt: skip


def plan_of_prompts(layer: dict[str, Any]) -> SelectedPlan | None:
    """The plan of long prompts, longer than those here, if a layer has it: block by block behind what is shared."""
    heads, kv = layer["heads"]
    others = layer["dtype"] == FP32 or layer["cache"] or layer["head_dim"] > 128
    if others or layer["block"] < 64 or heads // kv > 16:
        return None
    sizes = layer["head_dim"] in (64, 128) and layer["head_dim_v"] in (None, layer["head_dim"])
    shared = sizes and heads // kv in (4, 8, 16) and layer["page"] % 8 == 0
    return SelectedPlan(64, layer["block"], 1, 4, 1, by_blocks=4096, shared=shared)


def drawn_lengths(rng: random.Random, *, padded: bool, small: bool) -> list[tuple[int, int]]:
    """Of each sequence, its older tokens and its new ones."""
    lengths = []
    for _ in range(rng.choice([1, 1, 2, 3, 5, 8])):
        kind = rng.choice(["decoding", "decoding", "chunk", "prompt", "nothing new", "far"])
        context = 0 if kind == "prompt" else rng.choice([1, 15, 16, 127, 128, rng.randint(0, 1500)])
        new = {"decoding": 1, "nothing new": 0, "far": 1}.get(kind, rng.choice([2, 5, 64, rng.randint(2, 300)]))
        if kind == "far":
            context = 600 if padded else rng.randint(3000, 9000)
        lengths.append((context % 50, new % 20) if small else (context, new))
    return lengths


def test_a_random_call_under_a_mask_is_the_attention(tensors, kernels, device, random_case: int) -> None:
    small = device.type == "cpu"
    # Interpreted, nothing is compiled.
    layer = drawn_layer(random.Random(f"layer {random_case if small else random_case // OF_A_LAYER}"))
    rng = random.Random(random_case)
    lengths = drawn_lengths(rng, padded=layer["kind"] == "padded", small=small)
    splits = rng.choice([0, 0, 0, 1, 2, 7])
    window = (rng.choice([0, 1, 9, 127, 128, rng.randint(0, 2000)]), -1) if layer["window"] else None
    after = {} if layer["kind"] == "padded" else {"rows_after": rng.choice([0, 0, 1, 70])}
    print(layer, window, after, lengths, splits)
    scattered = layer.pop("scattered")
    batch = tensors.batch(lengths, **{**layer, "window": window}, **after)
    if small:
        kernels.attend(batch, AttentionPlan(16, 16, max(1, splits), 4, 1))
    else:
        batch.run(replace(batch.layout, scattered=scattered), num_splits=splits or None)
    batch.check(most=3)


def test_a_random_call_over_selected_blocks_is_the_attention(selected, device, random_case: int) -> None:
    small = device.type == "cpu"
    layer = drawn_selected_layer(random.Random(f"layer {random_case if small else random_case // OF_A_LAYER}"))
    rng = random.Random(random_case)
    # Lists are made one by one on the host.
    lengths = [(older, min(new, 100)) for older, new in drawn_lengths(rng, padded=False, small=small)]
    share, rows_after = rng.choice([0.0, 0.5, 0.9]), rng.choice([0, 1, 70])
    plan = plan_of_prompts(layer) if rng.random() < 0.5 and not small else None
    print(layer, lengths, share, rows_after, plan)
    batch = selected(lengths, **layer, share=share, rows_after=rows_after)
    got = batch.call(out=batch.out.tensor, return_lse=True, plan=plan)
    batch.out.check()
    batch.check(got.out, got.lse)


def test_layers_of_all_kinds_are_drawn() -> None:
    masked = [drawn_layer(random.Random(f"layer {i}")) for i in range(200)]
    for name, value in (
        ("page", 1),
        ("head_dim", 72),
        ("kind", "padded"),
        ("page_layout", "x-packed"),
        ("window", True),
        ("scattered", True),
    ):
        assert any(layer[name] == value for layer in masked), name
    chosen = [drawn_selected_layer(random.Random(f"layer {i}")) for i in range(200)]
    for name, value in (("block", 1), ("cache", E4M3), ("head_dim", 256), ("causal", False), ("heads", (64, 1))):
        assert any(layer[name] == value for layer in chosen), name
