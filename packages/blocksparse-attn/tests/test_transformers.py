"""Does MiniMax-M3 in transformers say the same with ``attn_implementation="blocksparse_attn"``?"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("nox -s engines has transformers", allow_module_level=True)

from transformers import (
    AutoModelForImageTextToText,
    Cache,
    DynamicCache,
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    StaticCache,
)

from blocksparse_attn.integrations import contiguous
from blocksparse_attn.integrations.transformers import NAME, Indexer, enable
from blocksparse_attn.layers import SelectedAttention
from kernel_reference.testing.readme import python_blocks, run_block
from kernel_reference.testing.transformers import Models, assert_the_same_from_the_hub, dry_timings, make_models

# Two of up to six blocks, of four tokens, are selected: the last one and another. There are no experts: in the form
# that float64 needs they cannot be compiled in one graph.
SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=48, dense_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=2,
    layer_types=["full_attention", "minimax_m3_sparse"], mlp_layer_types=["dense"] * 2,
    initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
VISION: dict[str, Any] = dict(
    hidden_size=48, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)


# Models and prompts are on the GPU where there is one.
pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(scope="module")
def models() -> Models:
    torch.manual_seed(0)
    return make_models(MiniMaxM3VLTextConfig(**SIZES), enable, attn_implementation=NAME)


def prompts(batch: int, tokens: int) -> torch.Tensor:
    # The last of 64 stand for images.
    return torch.randint(2, 60, (batch, tokens))


@pytest.mark.parametrize("tokens", [16, 23])
def test_a_prompt_without_a_cache_is_as_exact_as_in_transformers(models: Models, tokens: int) -> None:
    ids = prompts(2, tokens)
    models.assert_close(lambda model: model(ids, use_cache=False).logits)


@pytest.mark.parametrize(
    "make_cache",
    [
        lambda config: StaticCache(config, max_cache_len=24),
        lambda config: StaticCache(config, max_cache_len=22),
        lambda config: DynamicCache(config=config),
    ],
    ids=["whole blocks", "part of a block", "grows"],
)
def test_chunks_and_single_tokens_over_a_cache_are_as_exact_as_in_transformers(
    models: Models, make_cache: Callable[[Any], Cache]
) -> None:
    ids = prompts(2, 21)

    def chunks(model: Any) -> torch.Tensor:
        cache = make_cache(model.config)
        parts = ids.split([3, 1, 11, 1, 1, 3, 1], 1)
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)

    models.assert_close(chunks)


@pytest.mark.parametrize("local_blocks", [0, 1, 2])
def test_the_indexer_selects_the_blocks_that_it_selects_in_transformers(
    models: Models, local_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Scores of two tokens at a time.
    monkeypatch.setattr(contiguous, "_SCORES", 2 * 2 * 2 * 23)
    hidden, positions = torch.randn(2, 23, 48), torch.arange(23).expand(2, 23)
    lists = []
    for model, indexer in ((models.ours, Indexer), (models.theirs, Indexer.__base__)):
        layer = model.model.layers[1].self_attn.indexer
        assert type(layer) is indexer
        monkeypatch.setattr(layer, "local_blocks", local_blocks)
        lists.append(layer(hidden, model.model.rotary_emb(hidden, positions), None, positions))
    assert torch.equal(*lists)
    assert lists[0].shape == (2, 2, 23, 2)
    assert int(lists[0].min()) == -1


def test_an_image_reaches_the_language_model_where_the_vision_tower_keeps_its_attention() -> None:
    torch.manual_seed(0)
    ids = prompts(1, 13)
    ids[0, 3] = 60

    def logits(attention: Any, weights: dict[str, Any] | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
        config = MiniMaxM3VLConfig(
            text_config=dict(SIZES), vision_config=dict(VISION), projector_hidden_size=48, image_token_index=60,
            video_token_index=61,
        )  # fmt: skip
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention).eval()
        model.load_state_dict(weights or model.state_dict())
        return model(input_ids=ids, pixel_values=image, image_grid_thw=grid).logits, model.state_dict()

    # Four patches of 14 x 14 are one token.
    image, grid = torch.randn(4, 3 * 2 * 14 * 14), torch.tensor([[1, 2, 2]])
    with torch.no_grad(), enable():
        theirs, weights = logits("eager")
        ours, _ = logits({"text_config": NAME, "vision_config": "sdpa"}, weights)
        with pytest.raises(ValueError, match=r"^is_causal must be True, got False$"):
            logits(NAME)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_loss_has_the_gradients_that_it_has_in_transformers(models: Models) -> None:
    ids = prompts(2, 13)
    found = []
    with enable():
        for model in (models.ours, models.theirs):
            model(ids, use_cache=False).logits.square().mean().backward()
            found.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
            model.zero_grad()
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
    assert float(found[1].norm()) > 0


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generate_gives_what_transformers_would(models: Models, cache: str) -> None:
    models.assert_generates(prompts(2, 9), 6, cache_implementation=cache)


@pytest.mark.torch_compile
def test_generate_compiles_decoding_in_one_graph(models: Models) -> None:
    models.assert_compiles(prompts(2, 6), 4, lambda: StaticCache(models.ours.config, max_cache_len=16))


def test_what_is_not_covered_is_refused_by_name(models: Models) -> None:
    ids = prompts(2, 5)
    models.assert_refuses_padding_masks_and_dropout(ids)
    models.assert_refuses_packed_sequences_and_weights(ids)
    window = pytest.raises(ValueError, match=r"^sliding_window must be None, got 7$")
    with torch.no_grad(), enable(), window:
        models.ours(ids, sliding_window=7)


def test_it_cannot_be_enabled_twice_and_leaves_nothing_behind(models: Models) -> None:
    models.assert_enabled_by_one_call_at_a_time(NAME, prompts(1, 3))


def test_the_example_in_the_readme_runs() -> None:
    [block] = [block for block in python_blocks(Path(__file__).parents[1] / "README.md") if "integrations" in block]
    assert run_block(block) == "[1, 4]\n"


def test_the_benchmark_runs_and_finds_both_sides_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timings = dry_timings(Path(__file__).parents[1] / "benchmarks" / "engines.py", tmp_path)
    assert [(timing["tokens"], timing["cached"]) for timing in timings] == [(16, 0), (1, 32)] * 2
    assert "MiniMax-M3" in capsys.readouterr().out


def test_kernelize_puts_the_layer_of_the_hub_in(tmp_path: Path) -> None:
    rows, cache = torch.randn(4, 4, 16).bfloat16(), torch.randn(4, 16, 2, 16).bfloat16()
    lists = torch.tensor([[0, 1], [1, 2], [0, 2], [2, -1]]).int()[:, None].expand(-1, 2, -1).contiguous()
    table = torch.tensor([[3, 0, 2]]).int()
    given = (rows, cache, cache.flip(0), lists, 16, table, torch.tensor([0, 4]).int(), torch.tensor([45]).int())
    assert_the_same_from_the_hub("blocksparse_attn", tmp_path, SelectedAttention, *given)
