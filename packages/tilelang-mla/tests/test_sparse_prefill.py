"""Is sparse prefill attention to the keys that tokens list? By the public function, and by the kernel's text in C."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_reference.testing.contract import check_compiles, check_opcheck
from kernel_reference.testing.guards import assert_bitwise_equal, canaried, poison_
from kernel_reference.testing.numerics import assert_close_to_oracle
from tilelang_mla import DecodeTiles, PrefillPlan, flash_mla, flash_mla_sparse_fwd
from tilelang_mla.plan import DecodeProblem, DeviceLimits
from tilelang_mla.sparse.arguments import SparsePrefillOptions, SparsePrefillTensors, check_sparse_prefill
from tilelang_mla.sparse.tiles import of_few_heads, sparse_prefill_tiles, takes

Tensor = torch.Tensor
BF16 = torch.bfloat16
V32, V4 = 576, 512  # of DeepSeek's versions: latents of 512, with a rope behind them or in them
every_width = pytest.mark.parametrize("width", [V32, V4], ids=["DeepSeek-V3.2", "DeepSeek-V4"])


class Prompt:
    """Query tokens, keys, and a list for each token; keys that no list names are NaN."""

    def __init__(self, width: int = V32, *, tokens: int = 7, heads: int = 5, keys: int = 150, topk: int = 70,
                 device: Any = "cpu") -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(width + topk)
        self.indices = torch.randint(keys, (tokens, 1, topk), generator=generator, dtype=torch.int32)
        self.indices[torch.rand(tokens, 1, topk, generator=generator) < 0.2] = -1
        self.indices[0, 0, :3] = torch.tensor([keys, 2**31 - 1, -(2**31)])
        self.indices[-1] = -1
        kv = torch.randn(keys, 1, width, generator=generator).bfloat16()
        named = torch.zeros(keys, dtype=torch.bool)
        named[self.indices[(self.indices >= 0) & (self.indices < keys)].long()] = True
        kv[~named] = math.nan
        self.q, self.kv = torch.randn(tokens, heads, width, generator=generator).bfloat16().to(device), kv.to(device)
        self.indices = self.indices.to(device)
        # The last but one is longer than a list can be.
        lengths = [topk, topk // 3, 0, 1, *[topk - 1] * (tokens - 6), topk + 1, topk]
        self.topk_length = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.attn_sink = torch.linspace(-3, 3, heads).to(device)
        self.attn_sink[0] = -math.inf

    def run(self, **options: Any) -> Any:
        return flash_mla_sparse_fwd(self.q, self.kv, self.indices, 0.05, **options)

    def check(self, got: Any, topk_length: Tensor | None = None, attn_sink: Tensor | None = None, **_: Any) -> None:
        assert (got.max_logits.dtype, got.lse.dtype) == (torch.float32, torch.float32)
        tokens = len(self.q)
        # Of many those of the first and last turns of programs.
        for i in (i for i in range(tokens) if i < 8 or i in (131, 132, 265) or tokens - i < 5):
            listed = self.indices[i, 0].long()
            count = len(listed) if topk_length is None else int(topk_length[i])
            listed = listed[: count if count <= len(listed) else 0]
            keys = self.kv[listed[(listed >= 0) & (listed < len(self.kv))], 0]
            if not len(keys):
                assert not bool(got.out[i].any())
                assert bool((got.lse[i] == -torch.inf).all())
                assert bool((got.max_logits[i] == -torch.inf).all())
                continue
            scores = self.q[i].double() @ keys.mT.double() * 0.05
            lse = scores.logsumexp(-1)
            share = 1 if attn_sink is None else torch.sigmoid(lse - attn_sink.double())[:, None]
            exact = scores.softmax(-1) @ keys[:, :512].double() * share
            weights = torch.exp(scores - scores.amax(-1, keepdim=True)).float()
            plain = weights.to(BF16).float() @ keys[:, :512].float() / weights.sum(-1, keepdim=True) * share
            assert_close_to_oracle(got.out[i], exact, plain.to(BF16))
            torch.testing.assert_close(got.lse[i].double(), lse, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(got.max_logits[i].double(), scores.amax(-1), rtol=1e-4, atol=1e-4)


@every_width
def test_each_token_attends_to_the_keys_it_lists(device, width) -> None:
    prompt = Prompt(width, device=device)
    for given in ({}, {"topk_length": prompt.topk_length}, {"attn_sink": prompt.attn_sink}):
        prompt.check(prompt.run(**given), **given)
    of_engines = flash_mla.flash_mla_sparse_fwd(prompt.q, prompt.kv, prompt.indices, 0.05)
    assert_bitwise_equal(of_engines[0], prompt.run().out)


@pytest.mark.sanitize
def test_heads_of_a_wider_result_are_written_in_place_and_nothing_beside_them(device) -> None:
    prompt = Prompt(device=device)
    out = canaried((7, 5, 512), BF16, prompt.q.device, row_padding=8)
    got = prompt.run(out=out.tensor)
    assert got.out is out.tensor
    prompt.check(got)
    out.check()


def test_no_keys_no_tokens_and_scales_of_0_and_below(device) -> None:
    prompt = Prompt(device=device)
    for kv, indices in ((prompt.kv[:0], prompt.indices), (prompt.kv, prompt.indices[..., :0].contiguous())):
        out, max_logits, lse = flash_mla_sparse_fwd(prompt.q, kv, indices, 0.05)
        assert not bool(out.any())
        assert bool(((lse == -torch.inf) & (max_logits == -torch.inf)).all())
    assert flash_mla_sparse_fwd(prompt.q[:0], prompt.kv, prompt.indices[:0], 0.05).out.shape == (0, 5, 512)
    below = flash_mla_sparse_fwd(-prompt.q, prompt.kv, prompt.indices, -0.05)
    assert_bitwise_equal(below.out, prompt.run().out)
    even = flash_mla_sparse_fwd(prompt.q, prompt.kv, prompt.indices, 0.0)
    torch.testing.assert_close(even.max_logits[:-1], torch.zeros_like(even.lse[:-1]), rtol=0, atol=1e-20)


@pytest.mark.gpu
@every_width
@pytest.mark.parametrize("heads", [1, 8, 16, 64, 80, 128])
def test_kernels_attend_to_the_keys_that_tokens_list(device, width, heads) -> None:
    for topk, keys in ((70, 150), (2048, 5000), (64, 1)):
        prompt = Prompt(width, heads=heads, topk=topk, keys=keys, tokens=300, device=device)
        for plan in (None, DecodeTiles(64, 64, 2), DecodeTiles(64, 64, 2, by_rows=True)):
            for given in ({}, {"topk_length": prompt.topk_length, "attn_sink": prompt.attn_sink}):
                prompt.check(prompt.run(**given, plan=plan), **given)


def test_random_lists_of_a_prompt_are_the_definition(device, random_case) -> None:
    rng = random.Random(random_case)
    on_gpu = device.type != "cpu"
    prompt = Prompt(
        rng.choice([V32, V4]), heads=rng.choice([1, 3, 8, 16, 32, 64, 80, 128]), device=device,
        tokens=rng.randint(6, 600 if on_gpu else 12), keys=rng.choice([1, 150, 5000] if on_gpu else [1, 150]),
        topk=rng.choice([3, 64, 2048, rng.randint(3, 3000)] if on_gpu else [3, 64, 130]),
    )  # fmt: skip
    given = {name: getattr(prompt, name) for name in ("topk_length", "attn_sink") if rng.random() < 0.5}
    prompt.check(prompt.run(**given), **given)


@pytest.mark.gpu
@every_width
def test_a_token_has_the_same_bits_alone_and_in_any_prompt(device, width) -> None:
    prompt = Prompt(width, heads=16, topk=500, keys=3000, tokens=400, device=device)
    whole, again = prompt.run(), prompt.run()
    for i in (0, 3, 398):
        own = slice(i, i + 1)
        alone = flash_mla_sparse_fwd(prompt.q[own], prompt.kv, prompt.indices[own].contiguous(), 0.05)
        for one, of_all, of_again in zip(alone, whole, again, strict=True):
            assert_bitwise_equal(one, of_all[own])
            assert_bitwise_equal(of_all[own], of_again[own])


@pytest.mark.parametrize("rope", [32, 0], ids=["rope", "no rope"])
def test_the_kernel_hides_what_is_no_key_and_tells_the_largest_score(device, rope) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU the kernel itself runs")
    try:
        from tilelang_mla.kernels import c
    except ImportError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no TileLang: {error}")
    torch.manual_seed(2)
    tokens, heads, keys, topk, dim = 6, 70, 50, 100, 64
    attend = c.kernel("prefill_sparse", dim_nope=dim, dim_rope=rope, block_n=64, num_stages=2)
    q, kv = torch.randn(tokens, heads, dim + rope), torch.randn(keys, 1, dim + rope)
    indices = torch.randint(-5, keys + 5, (tokens, topk), dtype=torch.int32)
    indices[2] = -1
    lengths, sink = torch.tensor([100, 3, 100, 0, 65, 200], dtype=torch.int32), torch.linspace(-3, 3, heads)
    for counted, sunk in ((0, 1), (1, 0)):
        out, max_logits, lse = (
            poison_(torch.empty(shape)) for shape in ((tokens, heads, dim), (tokens, heads), (tokens, heads, 1))
        )
        attend(q, kv, indices, lengths, sink, out, max_logits, lse, 0.1, counted, sunk, 5)
        for i in range(tokens):
            count = int(lengths[i]) if counted else topk
            own = indices[i, : count if count <= topk else 0].long()
            listed = kv[own[(own >= 0) & (own < keys)], 0].double()
            scores = q[i].double() @ listed.mT * (0.1 * math.log(2))
            log_of = scores.logsumexp(-1)
            want = scores.softmax(-1) @ listed[:, :dim]
            if sunk:
                want = want * torch.where(log_of == -math.inf, 0, torch.sigmoid(log_of - sink))[:, None]
            largest = scores.amax(-1) if len(listed) else log_of
            for got, wanted in ((out[i], want), (lse[i, :, 0], log_of), (max_logits[i], largest)):
                torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_kernel_is_handed_what_it_is_made_for(launch, monkeypatch) -> None:
    from tilelang_mla.sparse import launch as own_launch

    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "kernel", lambda *name, **constants: lambda *handed: given.append(handed))
    monkeypatch.setattr(launch, "device_limits", lambda _: DeviceLimits(132))
    wide, ints = torch.randn(300, 16, 1024).bfloat16(), torch.zeros(300, 1, 20, dtype=torch.int32)
    for more, q in ((False, wide[:, :1, :576]), (True, wide[:, :, 3:579])):
        heads = q.shape[1]
        logits = [torch.zeros(300, heads) for _ in range(2)]
        tensors = SparsePrefillTensors(
            q.contiguous(), wide[:9, :1, :576], ints, ints[:, 0, 0].contiguous() if more else None,
            torch.zeros(heads) if more else None, q[..., :512], *logits,
        )  # fmt: skip
        problem, plan = check_sparse_prefill(tensors, SparsePrefillOptions(512, -0.1))
        own_launch.prepare_prefill_sparse(problem, plan, tensors)(*tensors)
        handed = given.pop()
        constants = own_launch.prefill_sparse_constants(problem, DecodeTiles(64, 64, 2, by_rows=True), BF16)
        text = launch.text_of("prefill_sparse", **constants)
        assert len(handed) == len(text.params)
        for parameter, argument in zip(text.params, handed, strict=True):
            if parameter in text.buffer_map:
                buffer = text.buffer_map[parameter]
                assert (len(buffer.shape), str(buffer.dtype)) == (argument.ndim, str(argument.dtype)[6:]), parameter
        assert all(stride % 8 == 0 for place in (0, 1, 5) for stride in handed[place].stride()[:-1])
        # What no descriptor tells of is written elsewhere first; a scale below 0 is q's.
        assert (handed[5].data_ptr() == tensors.out.data_ptr()) == (not more)
        torch.testing.assert_close(handed[0], -tensors.q, rtol=0, atol=0)
        assert handed[8:] == (pytest.approx(0.1 / math.log(2)), int(more), int(more), 132)


def test_the_plan_is_of_whole_lists_and_fits() -> None:
    limits = DeviceLimits(132)
    for rope, heads in ((64, 128), (64, 16), (64, 64), (0, 128)):
        problem = DecodeProblem(heads, 512, rope, 1, 4096, 2048, 1, pages=65536)
        tiles = sparse_prefill_tiles(problem, limits)
        assert (tiles.num_parts(4096), tiles.block_n, tiles.num_stages, tiles.early) == (4096, 64, 2, heads > 16)
        # Of few heads keys are the rows of MMAs, in no other kernel.
        few = heads == 16
        assert takes(tiles, problem)
        assert of_few_heads(tiles, problem) == few
        assert tiles.covers(problem) == tiles.loads_by_rows(problem) == (not few)
        assert tiles.shared_memory(problem) <= limits.shared_memory
    assert not tiles.loads_by_rows(replace(problem, cache="e4m3"))


def test_the_op_passes_opcheck_and_compiles_once_for_two_numbers_of_tokens(device) -> None:
    prompts = [Prompt(tokens=tokens, device=device) for tokens in (7, 9)]
    given = [[p.q, p.kv, p.indices, p.topk_length, p.attn_sink] for p in prompts]
    q = given[0][0]
    logits = [q.new_zeros(7, 5, dtype=torch.float32) for _ in range(2)]
    check_opcheck(
        torch.ops.tilelang_mla.prefill_sparse.default, [(*given[0], q[..., :512].contiguous(), *logits, 512, 0.2, None)]
    )

    def attend(q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor, attn_sink: Tensor) -> Any:
        return tuple(flash_mla_sparse_fwd(q, kv, indices, 0.05, 512, attn_sink, topk_length))

    check_compiles(attend, *given)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q of a batch": ({"q": lambda p: p.q[None]}, ValueError, r"^q must be \[Tq, Hq, d_qk\]"),
    "q of float32": ({"q": lambda p: p.q.float()}, TypeError, r"^q.dtype must be"),
    "an odd rope": ({"q": lambda p: p.q[..., :520]}, ValueError, r"^q must be of d_v = 512 elements and a multiple of"),
    "values of 500": ({"d_v": lambda _: 500}, ValueError, r"^d_v must be a multiple of 64 from 64 to 512"),
    "keys in float16": ({"kv": lambda p: p.kv.half()}, TypeError, r"^kv.dtype must be"),
    "keys of other heads": ({"kv": lambda p: p.kv.expand(-1, 2, -1)}, ValueError, r"^kv must be \[Tk, 1, 576\]"),
    "lists of few": ({"indices": lambda p: p.indices[:2]}, ValueError, r"^indices must be \[7, 1, topk\]"),
    "lists in int64": ({"indices": lambda p: p.indices.long()}, TypeError, r"^indices.dtype must be int32"),
    "lists apart": ({"indices": lambda p: p.indices[..., ::2]}, ValueError, r"^indices must be contiguous"),
    "lengths of few": ({"topk_length": lambda p: p.topk_length[:2]}, ValueError, r"^topk_length must be \[7\]"),
    "sinks of few": ({"attn_sink": lambda p: p.attn_sink[:2]}, ValueError, r"^attn_sink must be \[5\]"),
    "a scale of NaN": ({"sm_scale": lambda _: math.nan}, ValueError, r"^sm_scale must be finite"),
    "a result in q": ({"out": lambda p: p.q[..., :512]}, ValueError, r"^out must"),
    "a result of others": ({"out": lambda p: p.q[:2, :, :512].clone()}, ValueError, r"^out must be"),
    "a plan of parts": ({"plan": lambda _: DecodeTiles(64, 64, 2, 3)}, ValueError, r"^plan must be one of whole lists"),
    "a plan of few heads in one stage": (
        {"plan": lambda _: DecodeTiles(16, 64, 1, by_rows=True)}, ValueError, r"^plan must be one of whole lists"
    ),
    "a plan of others": ({"plan": lambda _: PrefillPlan(128, 64, 2)}, TypeError, r"^plan must be"),
    "gradients": ({"q": lambda p: p.q.requires_grad_()}, ValueError, r"^q must be without gradient"),
    "an array": ({"kv": lambda p: p.kv.tolist()}, TypeError, r"^kv must be a torch.Tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "match"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_refused_by_name(changed, error, match) -> None:
    prompt = Prompt()
    given = {"q": prompt.q, "kv": prompt.kv, "indices": prompt.indices, "sm_scale": 0.05}
    with pytest.raises(error, match=match):
        flash_mla_sparse_fwd(**{**given, **{name: value(prompt) for name, value in changed.items()}})
