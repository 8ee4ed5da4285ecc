"""Is any call the attention? Layers and their batches, drawn from one integer: all that a serving engine may do.

On a GPU: ``pytest packages/prefix-prefill/tests/test_random.py --random-cases 500 -n 14 --dist worksteal``. A layer's
kernels take half a minute to compile there, so that many cases in a row are of one layer, and each of so many processes
begins with cases in a row; ``--random-cases 500:1000`` are of other layers.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from prefix_prefill.plan import PrefillPlan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Cases that share a layer's kernels, on a GPU.
OF_A_LAYER = 18


def drawn_layer(rng: random.Random) -> dict[str, Any]:
    """What a layer's calls have in common: most of it is compiled in."""
    layout = rng.choice(["NHD", "NHD", "HND", "x-packed"])
    packed = layout == "x-packed"
    # There 16 bytes of a head's elements lie together.
    head_dim = rng.choice([32, 64, 128] if packed else [40, 64, 72, 80, 96, 128, 128, 128, 192, 256, 320])
    head_dim_v = rng.choice([None, None, None, 64, 128])
    cache_dtype = rng.choice([None, None, None, E4M3, E5M2])
    kinds = ["number", "tensor", "heads", "tokens"]
    draft = rng.random() < 0.15
    return {
        "heads": rng.choice([(1, 1), (8, 1), (8, 2), (6, 2), (4, 4), (16, 2), (20, 1)]),
        "head_dim": head_dim, "head_dim_v": head_dim_v, "page_layout": layout,
        "page": rng.choice([1, 3, 8, 16, 16, 16, 24, 32, 48, 64, 256]),
        "dtype": rng.choice([BF16, BF16, BF16, FP16, FP32]), "cache_dtype": cache_dtype,
        "cached": rng.random() < 0.6, "causal": rng.random() < 0.85,
        "window": (rng.random() < 0.4, rng.random() < 0.3), "softcap": rng.choice([0.0, 0.0, 5.0, 30.0]),
        "softmax_scale": rng.choice([None, None, None, 0.3, -0.1]), "sinks": rng.random() < 0.4,
        "alibi": rng.random() < 0.15, "draft_mask": draft, "lse": rng.random() < 0.7,
        "k_scale": rng.choice(kinds) if cache_dtype else None, "v_scale": rng.choice(kinds) if cache_dtype else None,
        "out_scale": rng.choice([None, None, None, None, 0.02]), "skip_decode": rng.random() < 0.15,
        "fused": head_dim_v is None and rng.random() < 0.3,
        "interleaved": head_dim_v is None and not packed and rng.random() < 0.3,
        "index_dtype": rng.choice([torch.int32, torch.int32, torch.int64]),
    }  # fmt: skip


def drawn_sequence(rng: random.Random, most_new: int, small: bool) -> tuple[int, int]:
    """Its tokens in the cache and its new ones."""
    kind = rng.choice(["decoding", "decoding", "decoding", "chunk", "prompt", "nothing new", "far"])
    context = 0 if kind == "prompt" else rng.choice([1, 15, 16, 127, 128, rng.randint(0, 3000)])
    new = {"decoding": 1, "nothing new": 0, "far": 1}.get(kind, rng.choice([2, 5, 64, rng.randint(2, 300)]))
    if kind == "far":
        context = rng.randint(5000, 20000)
    if small:
        context, new = context % 50, new % 20
    return context, min(new, most_new)


def drawn_batch(rng: random.Random, layer: dict[str, Any], small: bool) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    """Lengths, and what else differs from call to call."""
    most_new = 63 if layer["draft_mask"] else 10**6
    lengths = [drawn_sequence(rng, most_new, small) for _ in range(rng.choice([1, 1, 2, 3, 5, 8]))]
    sides = [rng.choice([0, 1, 9, 127, 128, rng.randint(0, 2000)]) if there else -1 for there in layer["window"]]
    return lengths, {
        "window": None if sides == [-1, -1] else tuple(sides), "rows_after": rng.choice([0, 0, 1, 70]),
        "softcap": layer["softcap"] * rng.choice([1.0, 1.5]), "extra_columns": rng.choice([0, 1, 40]),
    }  # fmt: skip


def test_a_random_call_is_the_attention(tensors, kernels, device, random_case: int) -> None:
    small = device.type == "cpu"
    # Interpreted, nothing is compiled.
    layer = drawn_layer(random.Random(f"layer {random_case if small else random_case // OF_A_LAYER}"))
    rng = random.Random(random_case)
    lengths, options = drawn_batch(rng, layer, small)
    splits = rng.choice([0, 0, 0, 1, 2, 7])
    print(layer, options, lengths, splits)
    batch = tensors.batch(lengths, **{**layer, **options})
    left = -1 if batch.window is None else batch.window[0]
    if left >= 0:
        # What no row sees is poison.
        for i, (context, _) in enumerate(lengths):
            batch.spoil(i, range(context - left))
    plan = PrefillPlan(16, 16, max(splits, 1), 4, 1) if small else None
    if batch.q.shape[0]:
        kernels.prefill(batch, plan, 0 if small else splits)
        batch.check(most=3)


def test_layers_of_all_kinds_are_drawn() -> None:
    layers = [drawn_layer(random.Random(f"layer {i}")) for i in range(200)]
    for name, value in (("page", 1), ("head_dim", 320), ("draft_mask", True), ("k_scale", "tokens"), ("dtype", FP32)):
        assert any(layer[name] == value for layer in layers), name
