"""Split the projections of a Qwen3-Next-80B layer, then take four sequences a decode step through the convolution."""

import torch

from gdn_split import fused_qkvzba_split_reshape_cat, split_conv1d_update

device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = (16, 32, 128, 128)  # QK heads, V heads, elements in a QK head, elements in a V head
qkv_dim = 2 * 16 * 128 + 32 * 128


def projections(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    mixed_qkvz = torch.randn(tokens, qkv_dim + 32 * 128, dtype=torch.bfloat16, device=device)
    mixed_ba = torch.randn(tokens, 2 * 32, dtype=torch.bfloat16, device=device)
    return mixed_qkvz, mixed_ba


# Prefill: 4096 tokens, an exact copy.
mixed_qkvz, mixed_ba = projections(4096)
mixed_qkv, z, b, a = fused_qkvzba_split_reshape_cat(mixed_qkvz, mixed_ba, *sizes)
print("split on", device, {"mixed_qkv": [*mixed_qkv.shape], "z": [*z.shape], "b": [*b.shape], "a": [*a.shape]})
print("q of QK head 1 is where its group starts:", torch.equal(mixed_qkv[:, 128:256], mixed_qkvz[:, 768:896]))

# Decode: one new token for each of four sequences, whose convolution states lie in slots 3, 0, 7 and 5 of a pool of 8.
conv_state = torch.zeros(8, qkv_dim, 3, dtype=torch.bfloat16, device=device)
conv_weight = torch.randn(qkv_dim, 4, dtype=torch.bfloat16, device=device)
slots = torch.tensor([3, 0, 7, 5], dtype=torch.int32, device=device)
convolved = split_conv1d_update(*projections(4), conv_state, conv_weight, None, slots, *sizes)
print("convolved", [*convolved.mixed_qkv.shape], "changed slots", conv_state.any((1, 2)).nonzero().flatten().tolist())
