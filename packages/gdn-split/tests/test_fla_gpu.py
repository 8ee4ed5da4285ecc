"""What gdn_prefill_inputs gives is what flash-linear-attention's chunked kernel of the gated delta rule takes."""

from __future__ import annotations

import pytest
import torch

from gdn_split import gdn_prefill_inputs
from gdn_split.plan import GroupShape
from kernel_reference import gated_delta

pytestmark = pytest.mark.gpu

LENGTHS = (1, 70, 200)


def test_its_chunked_kernel_gives_the_outputs_and_states_of_the_layers_definition(device: torch.device) -> None:
    chunk = pytest.importorskip("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    shape = GroupShape(2, 4, 128, 128)
    sizes = (shape.num_heads_qk, shape.num_heads_v, shape.head_qk, shape.head_v)
    rows = sum(LENGTHS)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    qkvz, ba = normal(rows, shape.qkvz_width).bfloat16(), normal(rows, shape.ba_width).bfloat16()
    weight = (normal(shape.qkv_width, 4) / 2).bfloat16()
    a_log, dt_bias = normal(shape.num_heads_v) - 2, normal(shape.num_heads_v)
    bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    given = gdn_prefill_inputs(qkvz, ba, weight, None, bounds, a_log, dt_bias, *sizes)
    q, k, v, _, g, beta = (each[None] for each in given)
    out, states = chunk(q, k, v, g=g, beta=beta, output_final_state=True, cu_seqlens=bounds)
    layer = gated_delta.Layer(weight, None, a_log, dt_bias)
    for i, (begin, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False)):
        conv = torch.zeros(1, shape.qkv_width, 3, dtype=torch.float64, device=device)
        pool = torch.zeros(1, shape.num_heads_v, shape.head_qk, shape.head_v, dtype=torch.float64, device=device)
        wanted = gated_delta.decode_step(
            qkvz[begin:end], ba[begin:end], conv, pool, torch.zeros(1, dtype=torch.int64, device=device),
            gated_delta.Sizes(*sizes), layer, tokens_per_sequence=end - begin,
        )  # fmt: skip
        for got, exact in ((out[0, begin:end], wanted), (states[i], pool[0])):
            assert (got.double() - exact).norm() / exact.norm() < 0.02, (i, got.shape)
