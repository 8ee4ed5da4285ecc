"""Does MiniMax-Text-01 in transformers say the same with this package's lightning attention?"""

from __future__ import annotations

import contextlib
import copy
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("nox -s engines has transformers", allow_module_level=True)

from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention

from kernel_reference import hub
from kernel_reference.testing.readme import python_blocks, run_block
from kernel_reference.testing.transformers import Models, kernelized, make_models
from lightning_attn.integrations.transformers import LightningLayer, enable

# A prompt has more than one of transformers' blocks. The first layer is one of attention: transformers takes the length
# of the cache from it.
MINIMAX = MiniMaxConfig(
    vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=2, block_size=8, initializer_range=0.2,
    layer_types=["full_attention", "linear_attention", "linear_attention"], bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip


# Models and prompts are on the GPU where there is one.
pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(scope="module")
def models() -> Models:
    torch.manual_seed(0)
    return make_models(MINIMAX, enable)


def prompts(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(2, 64, (batch, tokens))


def test_models_made_meanwhile_have_the_layer_of_this_package_and_others_have_not(models: Models) -> None:
    assert LightningLayer in {type(module) for module in models.ours.modules()}
    assert LightningLayer not in {type(module) for module in models.theirs.modules()}


def test_prefill_is_as_exact_as_that_of_transformers(models: Models) -> None:
    ids = prompts(2, 21)
    models.assert_close(lambda model: model(ids, use_cache=False).logits)


def test_chunks_and_single_tokens_continue_a_cache(models: Models) -> None:
    ids = prompts(3, 25)

    def chunks(model: Any) -> torch.Tensor:
        cache = MiniMaxCache()
        parts = ids.split([11, 9, 1, 1, 2, 1], 1)
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)

    models.assert_close(chunks)


def test_the_state_is_kept_in_float32_whatever_the_dtype_of_the_model() -> None:
    torch.manual_seed(0)
    half = make_models(MINIMAX, enable, torch.bfloat16)
    cache = MiniMaxCache()
    with torch.no_grad():
        half.ours(prompts(1, 5), past_key_values=cache)
        before = cache.get_linear_cache(1)
        half.ours(prompts(1, 1), past_key_values=cache)
    assert before.dtype == cache.get_linear_cache(1).dtype == torch.float32
    half.assert_generates(prompts(2, 9), 4)


def test_left_padding_is_kept_out_of_the_states(models: Models) -> None:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    hidden = torch.randn(2, 9, 64)

    def layer(model: Any) -> torch.Tensor:
        out, _ = model.model.layers[1].self_attn(hidden.to(model.dtype), None, mask)
        return out

    models.assert_close(layer)


def test_generate_gives_what_transformers_would(models: Models) -> None:
    models.assert_generates(prompts(2, 10), 6)


def test_gradients_of_a_prompt_are_those_of_transformers(models: Models) -> None:
    ids = prompts(1, 10)

    def gradient(model: Any) -> torch.Tensor:
        with torch.enable_grad():
            loss = model(ids, labels=ids, use_cache=False).loss
            return torch.autograd.grad(loss, [model.model.layers[1].self_attn.qkv_proj.weight])[0]

    models.assert_close(gradient)


def test_a_decode_step_that_records_gradients_is_refused(models: Models) -> None:
    cache = MiniMaxCache()
    with torch.no_grad():
        models.ours(prompts(1, 3), past_key_values=cache)
    with pytest.raises(ValueError, match=r"^q must be .*no_grad"):
        models.ours(prompts(1, 1), past_key_values=cache)


def test_it_cannot_be_enabled_twice_and_leaves_nothing_behind() -> None:
    with enable(), pytest.raises(ValueError, match=r"^a call of enable\(\) must be the only one at a time"):
        enable()
    enable().close()


def test_the_example_in_the_readme_runs() -> None:
    [block] = [block for block in python_blocks(Path(__file__).parents[1] / "README.md") if "integrations" in block]
    assert run_block(block) == "LightningLayer [1, 4]\n"


def test_kernelize_puts_the_layer_of_the_hub_in(models: Models, tmp_path: Path, device: torch.device) -> None:
    theirs, layer = copy.deepcopy(models.theirs), MiniMaxLightningAttention
    ours = kernelized("lightning_attn", tmp_path / "hub", layer.__name__, theirs, layer, device)
    Models(ours, models.theirs, models.exact, contextlib.nullcontext).assert_generates(prompts(2, 10), 6)


def test_a_tree_for_the_hub_imports_nothing_of_what_is_installed(tmp_path: Path) -> None:
    hub.build("lightning_attn", tmp_path)
    imports = re.compile(r"^\s*(?:from|import) (lightning_attn|kernel_reference)\b", re.MULTILINE)
    files = sorted(tmp_path.rglob("*.py"))
    assert {"layers.py", "launch.py", "checks.py"} <= {file.name for file in files}
    assert [file.name for file in files if imports.search(file.read_text())] == []
    with pytest.raises(ValueError, match=r"^out must be a new or empty folder, got "):
        hub.build("lightning_attn", tmp_path)
