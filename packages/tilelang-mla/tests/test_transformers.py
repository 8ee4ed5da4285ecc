"""Do DeepSeek's and GLM's models in transformers say the same with this package's attention?"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("nox -s engines has transformers", allow_module_level=True)

from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    DynamicCache,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    StaticCache,
)

from kernel_reference.testing.numerics import assert_close_to_oracle
from kernel_reference.testing.readme import python_blocks, run_block
from kernel_reference.testing.transformers import Models, assert_the_same_from_the_hub, make_models
from tilelang_mla.integrations.transformers import NAME, LatentCache, LatentLayer, enable
from tilelang_mla.layers import LatentAttention

# The smallest latent and rope that the kernels have; V3 has a dense layer and one of experts.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "kv_lora_rank": 64, "q_lora_rank": 48, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 64, "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
DEEPSEEK_V3 = DeepseekV3Config(**SIZES, first_k_dense_replace=1, num_mtp_layers=0)
DEEPSEEK_V2 = DeepseekV2Config(**SIZES | {"q_lora_rank": None, "num_hidden_layers": 1}, first_k_dense_replace=1)
GLM_4_7_FLASH = Glm4MoeLiteConfig(**SIZES | {"v_head_dim": 128, "num_hidden_layers": 1})
# Lists of fewer keys than there are; GLM-5's second layer takes the lists of the first.
LISTS: dict[str, Any] = SIZES | {"index_topk": 6, "index_n_heads": 4, "index_head_dim": 32}
DEEPSEEK_V3_2 = DeepseekV32Config(**LISTS, mlp_layer_types=["dense", "sparse"])
GLM_5 = GlmMoeDsaConfig(**LISTS, mlp_layer_types=["dense", "sparse"], indexer_types=["full", "shared"])


# Models and prompts are on the GPU where there is one.
pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(scope="module")
def models() -> Models:
    torch.manual_seed(0)
    return make_models(DEEPSEEK_V3, enable, torch.bfloat16, NAME)


@pytest.fixture(scope="module", params=[DEEPSEEK_V2, GLM_4_7_FLASH], ids=["DeepSeek-V2", "GLM-4.7-Flash"])
def others(request: pytest.FixtureRequest) -> Models:
    torch.manual_seed(0)
    return make_models(request.param, enable, torch.bfloat16, NAME)


@pytest.fixture(scope="module", params=[DEEPSEEK_V3_2, GLM_5], ids=["DeepSeek-V3.2", "GLM-5"])
def indexed(request: pytest.FixtureRequest) -> Models:
    torch.manual_seed(0)
    return make_models(request.param, enable, torch.bfloat16, NAME)


class Lists(torch.nn.Module):
    """In place of an indexer, whose choice among near scores depends on rounding: of the keys seen always the same."""

    def forward(self, hidden_states: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        mask = others[2]
        seen = mask if mask.dtype == torch.bool else mask == 0
        liked = torch.arange(mask.shape[2]) * 7 % 11
        scores = torch.where(seen, liked, -1)
        return scores.topk(min(6, mask.shape[2])).indices.to(torch.int32)


@pytest.fixture(scope="module")
def listed(indexed: Models) -> Models:
    listed = copy.deepcopy(indexed)
    for model in (listed.ours, listed.theirs, listed.exact):
        for layer in model.model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer = Lists()
    return listed


def prompts(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(2, 64, (batch, tokens))


def make_cache(kind: type, model: Any) -> Any:
    if kind is LatentCache and not isinstance(model.model.layers[0].self_attn, LatentLayer):
        kind = StaticCache
    return kind(model.config, max_cache_len=20) if kind is not DynamicCache else DynamicCache(config=model.config)


def test_prefill_is_as_exact_as_that_of_transformers(models: Models) -> None:
    ids = prompts(2, 21)
    models.assert_close(lambda model: model(ids, use_cache=False).logits)


def test_gradients_of_a_prompt_are_as_exact_as_those_of_transformers(models: Models) -> None:
    ids, along = prompts(2, 21), torch.randn(2, 21, 64)

    def gradients(model: Any) -> torch.Tensor:
        weights = [layer.self_attn.kv_b_proj.weight for layer in model.model.layers]
        logits = model(ids, use_cache=False).logits
        return torch.stack(torch.autograd.grad(logits, weights, along.to(logits.dtype)))

    with enable():
        ours = gradients(models.ours)
    assert_close_to_oracle(ours, gradients(models.exact).double(), gradients(models.theirs))


def assert_steps_are_close(models: Models, kind: type) -> None:
    ids = prompts(3, 14)

    def steps(model: Any) -> torch.Tensor:
        cache = make_cache(kind, model)
        parts = ids.split([7, 1, 1, 4, 1], 1)
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)

    models.assert_close(steps)


@pytest.mark.parametrize("kind", [LatentCache, StaticCache, DynamicCache])
def test_decode_over_the_latents_is_as_exact_as_that_of_transformers(models: Models, kind: type) -> None:
    assert_steps_are_close(models, kind)


def test_other_models_with_latents_are_as_exact(others: Models) -> None:
    assert isinstance(others.ours.model.layers[0].self_attn, LatentLayer)
    assert_steps_are_close(others, LatentCache)


@pytest.mark.parametrize("kind", [LatentCache, StaticCache, DynamicCache])
def test_tokens_attend_to_the_keys_that_the_indexer_lists(listed: Models, kind: type) -> None:
    assert isinstance(listed.ours.model.layers[1].self_attn, LatentLayer)
    assert_steps_are_close(listed, kind)


def test_a_prompt_of_lists_is_as_exact_as_that_of_transformers(listed: Models) -> None:
    ids = prompts(2, 21)
    listed.assert_close(lambda model: model(ids, use_cache=False).logits)


def test_lists_leave_out_padding(listed: Models) -> None:
    ids, mask = prompts(2, 18), torch.ones(2, 18, dtype=torch.int64)
    # Not the first ones: rows that see nothing are NaN in transformers' own attention.
    mask[0, 3:8] = 0
    listed.assert_close(lambda model: model(ids, attention_mask=mask, use_cache=False).logits)


def test_generate_with_an_indexer_gives_what_transformers_would(indexed: Models) -> None:
    ids = prompts(2, 9)
    indexed.assert_generates(ids, 5)
    indexed.assert_generates(ids, 5, past_key_values=LatentCache(indexed.ours.config, max_cache_len=16))


def test_masks_of_ones_own_are_refused_where_keys_are_listed(listed: Models) -> None:
    with torch.no_grad(), enable(), pytest.raises(ValueError, match=r"^attention_mask must be None or a 2-D mask"):
        listed.ours(prompts(2, 5), attention_mask=torch.zeros(2, 1, 5, 5))


def test_a_latent_cache_holds_a_token_as_one_row(models: Models) -> None:
    cache = LatentCache(models.ours.config, max_cache_len=8)
    with torch.no_grad(), enable():
        models.ours(prompts(2, 3), past_key_values=cache)
    assert cache.layers[0].keys.shape == (2, 1, 8, 64 + 32)
    assert cache.layers[0].values.numel() == 0
    assert int(cache.get_seq_length()) == 3


def test_generate_gives_what_transformers_would(models: Models) -> None:
    ids = prompts(2, 6)
    models.assert_generates(ids, 5)
    models.assert_generates(ids, 5, past_key_values=LatentCache(models.ours.config, max_cache_len=16))


@pytest.mark.torch_compile
def test_generate_compiles_decoding_in_one_graph() -> None:
    # Experts, one by one, are what torch.compile refuses.
    config = copy.deepcopy(DEEPSEEK_V3)
    config.num_hidden_layers = 1
    models = make_models(config, enable, torch.bfloat16, NAME)
    models.assert_compiles(prompts(2, 6), 4, lambda: LatentCache(config, max_cache_len=16))


def test_a_model_made_meanwhile_still_runs_with_transformers_own_attention(models: Models) -> None:
    ids = prompts(1, 5)
    with torch.no_grad(), enable():
        models.ours.set_attn_implementation("eager")
        told = models.ours(ids).logits
        models.ours.set_attn_implementation(NAME)
        assert torch.equal(told, models.theirs(ids).logits)


def test_what_is_not_covered_is_refused_by_name(models: Models) -> None:
    ids = prompts(2, 5)
    models.assert_refuses_padding_masks_and_dropout(ids)
    with torch.no_grad(), enable():
        whole = AutoModelForCausalLM.from_config(copy.deepcopy(DEEPSEEK_V3), attn_implementation=NAME)
        with pytest.raises(TypeError, match=r"^q.dtype must be bfloat16 or float16, got torch.float32"):
            whole(ids)
    # Prompts have gradients, steps over a cache none.
    cache = LatentCache(models.ours.config, max_cache_len=8)
    with enable():
        with torch.no_grad():
            models.ours(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"^q must be .*no_grad"):
            models.ours(ids[:, :1], past_key_values=cache)


def test_a_model_that_was_not_made_meanwhile_is_told_so(models: Models) -> None:
    model = AutoModelForCausalLM.from_config(copy.deepcopy(DEEPSEEK_V3))
    with enable(), torch.no_grad():
        model.set_attn_implementation(NAME)
        with pytest.raises(ValueError, match=r"for models made inside enable\(\)"):
            model(prompts(1, 3))


def test_it_cannot_be_enabled_twice_and_leaves_nothing_behind(models: Models) -> None:
    models.assert_enabled_by_one_call_at_a_time(NAME, prompts(1, 3))


def test_the_example_in_the_readme_runs() -> None:
    [block] = [block for block in python_blocks(Path(__file__).parents[1] / "README.md") if "integrations" in block]
    assert run_block(block) == "[1, 4] [1, 1, 64, 576]\n"


def test_kernelize_puts_the_layer_of_the_hub_in(tmp_path: Path) -> None:
    q, pages = torch.randn(2, 1, 16, 576).bfloat16(), torch.randn(3, 64, 1, 576).bfloat16()
    given = (q, pages, torch.tensor([70, 9]).int(), torch.tensor([[2, 0], [1, 1]]).int(), 512, 192**-0.5)
    assert_the_same_from_the_hub("tilelang_mla", tmp_path, LatentAttention, *given)
