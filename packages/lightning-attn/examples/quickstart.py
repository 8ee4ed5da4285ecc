"""Prefill a prompt through one MiniMax-01 layer's lightning attention, then decode from the state that it leaves."""

import torch

from lightning_attn import lightning_attention, lightning_decode, slopes

device = "cuda" if torch.cuda.is_available() else "cpu"
heads, size, prompt, new = 64, 128, 1000, 24  # MiniMax-01: 64 heads of 128 elements
decays = slopes(heads).to(device)  # from 0.92, a head that forgets in a few tokens, to 0.004
q, k, v = (torch.randn(1, heads, prompt + new, size, device=device).bfloat16() for _ in range(3))

# Prefill: outputs [batch, heads, tokens, elements], and the state that the last token leaves.
out, kv = lightning_attention(q[:, :, :prompt], k[:, :, :prompt], v[:, :, :prompt], decays)
print("prefill on", device, [*out.shape], out.dtype, "and a state", [*kv[:, :, -1].shape], kv.dtype)

# Decode from it, token by token: it lies in slot 3 of a pool of 8. More sequences are a longer list of slots.
pool = torch.zeros(8, heads, size, size, device=device)
pool[3] = kv[0, :, -1]
slots = torch.tensor([3], dtype=torch.int32, device=device)
steps = [lightning_decode(q[:, :, t], k[:, :, t], v[:, :, t], pool, slots, decays) for t in range(prompt, prompt + new)]

# One call over all tokens gives the same outputs, to rounding.
whole = lightning_attention(q, k, v, decays).out[:, :, prompt:]
difference = (torch.stack(steps, dim=2) - whole).abs().max() / whole.abs().max()
print(f"decoded {new} tokens; the same as in one call to 1 %: {bool(difference < 0.01)}")
