"""A tiny model of transformers three times: with a package's kernels, with transformers' own layers, and in float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig

from kernel_reference import hub
from kernel_reference.bench import engines
from kernel_reference.testing.numerics import assert_close_to_oracle

Tensor = torch.Tensor
Enable = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Models:
    """Models of the same weights: ``ours``, made inside ``enable()``, ``theirs`` of its dtype, and ``exact``."""

    ours: Any
    theirs: Any
    exact: Any
    enable: Enable

    def call(self, function: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """``function(model)`` without gradients of ours, inside ``enable()``, of theirs and of exact."""
        with torch.no_grad():
            with self.enable():
                ours = function(self.ours)
            return ours, function(self.theirs), function(self.exact)

    def assert_close(self, function: Callable[[Any], Tensor]) -> None:
        """``function(ours)`` is as near to ``function(exact)`` as ``function(theirs)`` is."""
        ours, theirs, exact = self.call(function)
        assert_close_to_oracle(ours, exact.double(), theirs)

    def assert_generates(self, ids: Tensor, tokens: int, **options: Any) -> None:
        """Greedily, ours takes tokens that are the best of ``exact``, after those before them, or tie with the best
        within four times what theirs is off."""
        with torch.no_grad():
            with self.enable():
                told = self.ours.generate(ids, max_new_tokens=tokens, do_sample=False, **options)
            assert told.shape == (ids.shape[0], ids.shape[1] + tokens)
            theirs, exact = (
                model(told[:, :-1], use_cache=False).logits.double() for model in (self.theirs, self.exact)
            )
        first = ids.shape[1] - 1
        missed = exact.amax(-1) - exact.gather(-1, told[:, 1:, None])[..., 0]
        assert float(missed[:, first:].max()) <= 4 * float((theirs - exact).abs().max())

    def assert_compiles(self, ids: Tensor, tokens: int, make_cache: Callable[[], Any]) -> None:
        """Decoding that generate compiles, in one graph, takes the same tokens as decoding that it does not."""
        compiled = CompileConfig(backend="eager", fullgraph=True, mode=None, dynamic=False)
        # Else only what is on a GPU is compiled.
        compiled._compile_all_devices = True
        with torch.no_grad(), self.enable():
            told = [
                self.ours.generate(ids, max_new_tokens=tokens, do_sample=False, past_key_values=make_cache(), **options)
                for options in ({"compile_config": compiled}, {"disable_compile": True})
            ]
        torch._dynamo.reset()
        assert torch.equal(*told)

    def assert_refuses_padding_masks_and_dropout(self, ids: Tensor) -> None:
        """An attention for whole causal sequences, on two prompts or more, names what else it is given."""
        padding = torch.ones_like(ids)
        padding[0, :2] = 0
        masks = {
            r"^attention_mask must be all ones .*got one with padding$": padding,
            r"^attention_mask must be None or a 2-D mask of ones": torch.zeros(len(ids), 1, *[ids.shape[1]] * 2),
        }
        attention = self.ours.model.layers[0].self_attn
        before = attention.attention_dropout
        with torch.no_grad(), self.enable():
            for match, mask in masks.items():
                with pytest.raises(ValueError, match=match):
                    self.ours(ids, attention_mask=mask)
            self.ours.train()
            attention.attention_dropout = 0.1
            try:
                with pytest.raises(ValueError, match=r"^dropout must be 0 \(call model.eval\(\)\), got 0.1$"):
                    self.ours(ids)
            finally:
                attention.attention_dropout = before
                self.ours.eval()

    def assert_refuses_packed_sequences_and_weights(self, ids: Tensor) -> None:
        """An attention with :func:`~kernel_reference.integrations.transformers.lengths_mask` names both."""
        positions = torch.arange(ids.shape[1])[None] % (ids.shape[1] - 2)
        with torch.no_grad(), self.enable():
            with pytest.raises(ValueError, match=r"^the attention mask must be causal"):
                self.ours(ids[:1], position_ids=positions, use_cache=False)
            with pytest.raises(ValueError, match=r"^output_attentions must be None"):
                self.ours(ids, output_attentions=True)

    def assert_enabled_by_one_call_at_a_time(self, name: str, ids: Tensor) -> None:
        """Within ``enable()`` it is refused, and after it transformers knows no attention of this name."""
        with self.enable(), pytest.raises(ValueError, match=r"^a call of enable\(\) must be the only one at a time"):
            self.enable()
        with pytest.raises(KeyError, match=name), torch.no_grad():
            self.ours(ids)


def make_models(
    config: Any, enable: Enable, dtype: torch.dtype = torch.float32, attn_implementation: str | None = None
) -> Models:
    """Models from a config, with random weights that are of this dtype in all of them."""

    def make(dtype: torch.dtype, attention: str = "eager") -> Any:
        # A model writes its attention's name into its config. Products of experts in groups are not for float64.
        options = {"attn_implementation": attention, "experts_implementation": "eager", "dtype": dtype}
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options).eval()
        # An answer that ended early would be shorter.
        model.generation_config.eos_token_id = None
        return model

    theirs, exact = make(dtype), make(torch.float64)
    with enable():
        ours = make(dtype, attn_implementation or "eager")
    for model in (ours, exact):
        model.load_state_dict(theirs.state_dict())
    return Models(ours, theirs, exact, enable)


def dry_timings(cases: Path, folder: Path) -> list[dict[str, Any]]:
    """What ``bench.engines --dry`` records of a file of cases, in which both sides must agree."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "STEPS", 1)
        assert engines.main(["--dry", str(cases), "--out", str(folder / "timings")]) == 0
    timings = [json.loads(line) for line in (folder / "timings").read_text().splitlines()]
    assert all(0 < timing["difference"] < 0.05 for timing in timings)
    return timings


def kernelized(
    package: str, folder: Path, layer: str, model: torch.nn.Module, kind: type[torch.nn.Module], device: torch.device
) -> Any:
    """``model`` whose modules of ``kind`` have the ``forward`` of a layer in the tree that the package's hub holds.

    The tree is written to ``folder``. The test is skipped where the library ``kernels`` is not installed.
    """
    kernels = pytest.importorskip("kernels", reason="nox -s engines has it with the newest transformers")
    hub.build(package, folder)
    kernels.replace_kernel_forward_from_hub(kind, layer)
    repository = kernels.LocalLayerRepository(folder, layer_name=layer)
    with kernels.use_kernel_mapping({layer: {device.type: repository}}):
        ours = kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device=device.type, use_fallback=False)
    forwards = {module.forward.__module__ for module in ours.modules() if isinstance(module, kind)}
    assert all(name.startswith(f"_{package}_") for name in forwards), forwards
    return ours


def assert_the_same_from_the_hub(package: str, folder: Path, layer: type[torch.nn.Module], *given: Any) -> None:
    """A layer of a package gives the same bits where ``kernelize`` has put in its ``forward`` of the hub."""
    # The class of somebody's model, which keeps the name.
    kind = type("Layer", (layer,), {})
    wanted = kind()(*given)
    device = next(one.device for one in given if isinstance(one, Tensor))
    assert torch.equal(kernelized(package, folder, layer.__name__, kind(), kind, device)(*given), wanted)
