"""Decode with one Gated DeltaNet layer of Qwen3-Next's sizes and random weights, beside transformers' own module.

``pip install "gdn-split[transformers]"``. On a GPU the step is one launch behind two matrix products, on a CPU the
reference.
"""

import torch
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from gdn_split import gdn_decode_step

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
# As the 80B's layers are; a cache of one layer.
config = Qwen3NextConfig(num_hidden_layers=1, layer_types=["linear_attention"])
sizes = (config.linear_num_key_heads, config.linear_num_value_heads)
sizes += (config.linear_key_head_dim, config.linear_value_head_dim)
batch, tokens = 2, 6

with torch.no_grad():
    layer = Qwen3NextGatedDeltaNet(config, 0).to(device).eval()
    torch.nn.init.normal_(layer.conv1d.weight, std=0.5)
    hidden = torch.randn(batch, tokens, config.hidden_size, device=device)
    cache, theirs = DynamicCache(config=config), []
    for t in range(tokens):
        theirs.append(layer(hidden[:, t : t + 1], cache_params=cache))

    channels = layer.conv1d.weight.shape[0]
    conv_state = torch.zeros(batch, channels, config.linear_conv_kernel_dim - 1, device=device)
    state_pool = torch.zeros(batch, sizes[1], *sizes[2:], device=device)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    ours = []
    for t in range(tokens):
        x = hidden[:, t]
        out = gdn_decode_step(
            layer.in_proj_qkvz(x), layer.in_proj_ba(x), conv_state, layer.conv1d.weight.squeeze(1), None, state_pool,
            slots, layer.A_log, layer.dt_bias, *sizes, norm_weight=layer.norm.weight,
        )  # fmt: skip
        ours.append(layer.out_proj(out.flatten(1)))

difference = (torch.stack(ours, 1) - torch.cat(theirs, 1)).abs().max() / torch.cat(theirs, 1).abs().max()
print(f"{tokens} steps of {batch} sequences on {device}: off by {difference:.1e} of the largest output")
states = (state_pool - cache.get_recurrent_state(0)).abs().max()
print(f"states off by at most {states:.1e}")
