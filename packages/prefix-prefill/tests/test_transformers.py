"""Do decoders in transformers say the same with ``attn_implementation="prefix_prefill"``?"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("nox -s engines has transformers", allow_module_level=True)

from transformers import DynamicCache, Gemma2Config, GptOssConfig, LlamaConfig, StaticCache

from kernel_reference.testing.readme import python_blocks, run_block
from kernel_reference.testing.transformers import Models, assert_the_same_from_the_hub, dry_timings, make_models
from prefix_prefill.integrations.transformers import NAME, enable
from prefix_prefill.layers import PagedAttention

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
# GQA; a soft cap and every other layer with a window; sinks, windows and experts.
LLAMA = LlamaConfig(**SIZES)
GEMMA2 = Gemma2Config(**SIZES, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
GPT_OSS = GptOssConfig(**SIZES, sliding_window=5, num_local_experts=2, num_experts_per_tok=1)


# Models and prompts are on the GPU where there is one.
pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(scope="module", params=[LLAMA, GEMMA2, GPT_OSS], ids=["Llama", "Gemma 2", "gpt-oss"])
def models(request: pytest.FixtureRequest) -> Models:
    torch.manual_seed(0)
    return make_models(request.param, enable, attn_implementation=NAME)


@pytest.fixture(scope="module")
def llama() -> Models:
    torch.manual_seed(0)
    return make_models(LLAMA, enable, attn_implementation=NAME)


def prompts(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(2, 64, (batch, tokens))


def test_a_prompt_without_a_cache_is_as_exact_as_in_transformers(models: Models) -> None:
    ids = prompts(2, 13)
    models.assert_close(lambda model: model(ids, use_cache=False).logits)


def test_chunks_and_single_tokens_over_a_static_cache_are_as_exact_as_in_transformers(models: Models) -> None:
    ids = prompts(2, 16)

    def chunks(model: Any) -> torch.Tensor:
        cache = StaticCache(model.config, max_cache_len=20)
        # Windows of 5 fill up within a chunk, and later tokens roll them.
        parts = ids.split([3, 1, 6, 1, 1, 3, 1], 1)
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)

    models.assert_close(chunks)


def test_generate_gives_what_transformers_would(models: Models) -> None:
    models.assert_generates(prompts(2, 6), 6, cache_implementation="static")


@pytest.mark.torch_compile
def test_generate_compiles_decoding_in_one_graph(llama: Models) -> None:
    llama.assert_compiles(prompts(2, 6), 4, lambda: StaticCache(llama.ours.config, max_cache_len=16))


def test_a_cache_that_grows_is_refused_after_the_prompt(llama: Models) -> None:
    cache = DynamicCache(config=llama.ours.config)
    with torch.no_grad(), enable():
        llama.ours(prompts(1, 4), past_key_values=cache)
        with pytest.raises(ValueError, match=r"^past_key_values must be a StaticCache .*got a cache that grows$"):
            llama.ours(prompts(1, 1), past_key_values=cache)


def test_what_is_not_covered_is_refused_by_name(llama: Models) -> None:
    ids = prompts(2, 5)
    llama.assert_refuses_padding_masks_and_dropout(ids)
    llama.assert_refuses_packed_sequences_and_weights(ids)
    selected = pytest.raises(ValueError, match=r"^block_indices must be None, got one \(selected attention\)$")
    with torch.no_grad(), enable(), selected:
        llama.ours(ids, block_indices=torch.zeros(2, 1, 5, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^q must be .*no_grad"), enable():
        llama.ours(ids)


def test_it_cannot_be_enabled_twice_and_leaves_nothing_behind(llama: Models) -> None:
    llama.assert_enabled_by_one_call_at_a_time(NAME, prompts(1, 3))


def test_the_example_in_the_readme_runs() -> None:
    [block] = [block for block in python_blocks(Path(__file__).parents[1] / "README.md") if "integrations" in block]
    assert run_block(block) == "[1, 4]\n"


def test_the_benchmark_runs_and_finds_both_sides_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timings = dry_timings(Path(__file__).parents[1] / "benchmarks" / "engines.py", tmp_path)
    assert [(timing["tokens"], timing["cached"]) for timing in timings] == [(16, 0), (1, 32), (4, 32)]
    assert "Llama-3-8B" in capsys.readouterr().out


def test_kernelize_puts_the_layer_of_the_hub_in(tmp_path: Path) -> None:
    rows, cache = torch.randn(7, 4, 16).bfloat16(), torch.randn(3, 16, 2, 16).bfloat16()
    table = torch.tensor([[2, 0], [1, 1]]).int()
    bounds, lengths = torch.tensor([0, 4, 7]).int(), torch.tensor([21, 3]).int()
    given = (rows, rows[:, :2], rows[:, 2:], cache, cache.flip(0), table, bounds, lengths, 4)
    assert_the_same_from_the_hub("prefix_prefill", tmp_path, PagedAttention, *given)
