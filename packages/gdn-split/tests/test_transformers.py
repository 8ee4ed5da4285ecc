"""Do Qwen3-Next and Qwen3.5 in transformers say the same with this package's kernels in them?"""

from __future__ import annotations

import contextlib
import copy
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("transformers") is None:
    pytest.skip("nox -s engines has transformers", allow_module_level=True)

from transformers import AutoModelForCausalLM, DynamicCache, Qwen3_5TextConfig, Qwen3NextConfig, StaticCache
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from gdn_split.integrations.transformers import Qwen35Layer, QwenNextLayer, enable
from kernel_reference.testing.readme import python_blocks, run_block
from kernel_reference.testing.transformers import Models, kernelized, make_models

# Three V heads to a QK head, head sizes that differ, three layers of Gated DeltaNet and one of attention.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "initializer_range": 0.3,
}  # fmt: skip
QWEN3_NEXT = Qwen3NextConfig(**SIZES, num_experts=0)
QWEN3_5 = Qwen3_5TextConfig(**SIZES)


# Models and prompts are on the GPU where there is one.
pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(scope="module", params=[QWEN3_NEXT, QWEN3_5], ids=["Qwen3-Next", "Qwen3.5"])
def models(request: pytest.FixtureRequest) -> Models:
    torch.manual_seed(0)
    return make_models(request.param, enable)


def prompts(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(2, 64, (batch, tokens))


def test_models_made_meanwhile_have_the_layers_of_this_package_and_others_have_not(models: Models) -> None:
    ours = {type(module) for module in models.ours.modules()}
    assert ours & {QwenNextLayer, Qwen35Layer}
    theirs = {type(module) for module in models.theirs.modules()}
    assert not theirs & {QwenNextLayer, Qwen35Layer}


def test_prefill_is_bit_for_bit_that_of_transformers(models: Models) -> None:
    ids = prompts(2, 70)
    ours, theirs, _ = models.call(lambda model: model(ids, use_cache=False).logits)
    assert torch.equal(ours, theirs)


def test_a_prompt_in_chunks_fills_the_cache_bit_for_bit_as_in_transformers(models: Models) -> None:
    ids = prompts(2, 11)

    def chunks(model: Any) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        logits = [model(part, past_key_values=cache).logits for part in ids.split([7, 4], 1)]
        return torch.cat([*logits, *(cache.layers[0].conv_states[0].mT[..., :64],)], 1)

    ours, theirs, _ = models.call(chunks)
    assert torch.equal(ours, theirs)


def test_left_padding_is_kept_out_as_transformers_keeps_it_out(models: Models) -> None:
    ids, mask = prompts(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    ours, theirs, _ = models.call(lambda model: model(ids, attention_mask=mask).logits)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_decode_steps_are_as_exact_as_those_of_transformers(models: Models, kind: type) -> None:
    ids = prompts(3, 12)

    def steps(model: Any) -> torch.Tensor:
        cache = kind(config=model.config, **({"max_cache_len": 16} if kind is StaticCache else {}))
        parts = ids.split([3, 1, 1, 1, 2, 1, 1, 1, 1], 1)
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)

    models.assert_close(steps)


def test_generate_gives_what_transformers_would(models: Models) -> None:
    models.assert_generates(prompts(2, 5), 6)


def test_kernelize_puts_the_decode_step_of_the_hub_in(
    models: Models, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = copy.deepcopy(models.theirs)
    [engine] = {type(module) for module in theirs.modules() if type(module).__name__.endswith("GatedDeltaNet")}
    ours = kernelized("gdn_split", tmp_path / "hub", "Qwen3NextGatedDeltaNet", theirs, engine, device)
    [forward, *_] = [module.forward for module in ours.modules() if isinstance(module, engine)]
    steps: list[str] = []
    step = sys.modules[forward.__module__].gdn_decode_step
    monkeypatch.setattr(
        sys.modules[forward.__module__], "gdn_decode_step", lambda *a, **n: steps.append("one") or step(*a, **n)
    )
    Models(ours, models.theirs, models.exact, contextlib.nullcontext).assert_generates(prompts(2, 5), 6)
    assert len(steps) % 3 == 0
    assert steps


@pytest.mark.torch_compile
def test_generate_compiles_decoding_in_one_graph() -> None:
    layers = ["linear_attention", "full_attention"]
    config = Qwen3NextConfig(**SIZES | {"num_experts": 0, "num_hidden_layers": 2, "layer_types": layers})
    models = make_models(config, enable)
    models.assert_compiles(prompts(2, 6), 4, lambda: StaticCache(config, max_cache_len=16))


def test_gradients_of_a_prompt_are_those_of_transformers(models: Models) -> None:
    ids = prompts(1, 6)
    gradients = []
    for model in (models.ours, models.theirs):
        weights = dict(model.named_parameters())
        name = next(name for name in weights if "linear_attn.in_proj_qkv" in name)
        loss = model(ids, labels=ids, use_cache=False).loss
        gradients += torch.autograd.grad(loss, [weights[name]])
    assert torch.equal(*gradients)


def test_a_decode_step_that_records_gradients_is_refused(models: Models) -> None:
    cache = DynamicCache(config=models.ours.config)
    with torch.no_grad():
        models.ours(prompts(1, 3), past_key_values=cache)
    with pytest.raises(ValueError, match=r"^a decode step must be under torch.no_grad\(\)"):
        models.ours(prompts(1, 1), past_key_values=cache)


def layers_of_a_new_model(**sizes: Any) -> set[type]:
    config = Qwen3NextConfig(**SIZES | {"num_experts": 0, "num_hidden_layers": 1} | sizes)
    return {type(module) for module in AutoModelForCausalLM.from_config(config).modules()}


def test_an_activation_that_the_kernel_does_not_have_is_refused_and_leaves_nothing_behind() -> None:
    with enable(), pytest.raises(ValueError, match=r'^hidden_act must be "silu", got \'gelu\'$'):
        layers_of_a_new_model(hidden_act="gelu")
    assert Qwen3NextGatedDeltaNet in layers_of_a_new_model()


def test_it_cannot_be_enabled_twice_and_leaves_nothing_behind() -> None:
    with enable():
        with pytest.raises(ValueError, match=r"^a call of enable\(\) must be the only one at a time"):
            enable()
        assert QwenNextLayer in layers_of_a_new_model()
    assert Qwen3NextGatedDeltaNet in layers_of_a_new_model()
    enable().close()


def test_the_example_in_the_readme_runs() -> None:
    [block] = [block for block in python_blocks(Path(__file__).parents[1] / "README.md") if "integrations" in block]
    assert run_block(block) == "QwenNextLayer [1, 4]\n"


def test_a_layer_decodes_as_transformers_module_does_as_the_example_shows(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "decode_layer.py"))
    first, second = capsys.readouterr().out.splitlines()
    assert float(first.split("off by ")[1].split()[0]) < 1e-5
    assert float(second.rsplit(" ", 1)[1]) < 1e-5
