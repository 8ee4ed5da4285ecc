"""DeepSeek-V3: a prompt with separate heads, then a step of decoding over the latent cache."""

import torch

from tilelang_mla import flash_mla_varlen_func, flash_mla_with_kvcache, plan_decode

device = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = device == "cuda"
scale = (128 + 64) ** -0.5  # of the separate heads, in decoding too

# Prefill: one prompt, all 128 heads; q and k of 128 + 64 elements, v of 128. On a CPU less, to be done in seconds.
tokens, heads = (4096, 128) if on_gpu else (512, 16)
q, k = torch.randn(2, tokens, heads, 192, device=device).bfloat16()
v = torch.randn(tokens, heads, 128, device=device).bfloat16()
cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
out = flash_mla_varlen_func(q, k, v, cu_seqlens, cu_seqlens, tokens, tokens, scale, causal=True)
print("on", device, "prefill", [*out.shape], out.dtype)

# Decoding: 16 sequences of any lengths, 2 query tokens each, the 16 heads of one of eight GPUs. A token's cache is its
# latent of 512 elements and its rope of 64, in pages of 64 tokens that lie anywhere.
batch, longest, page = 16, (8192 if on_gpu else 512), 64
lengths = torch.randint(2, longest + 1, (batch,), dtype=torch.int32, device=device)
block_table = torch.randperm(batch * longest // page, dtype=torch.int32, device=device).view(batch, -1)
kv = torch.randn(block_table.numel(), page, 1, 512 + 64, device=device).bfloat16()
q = torch.randn(batch, 2, 16, 512 + 64, device=device).bfloat16()

plan = plan_decode(lengths, num_heads=16, seqlen_q=2, max_seqlen_k=longest)  # once a step, for all layers
out = flash_mla_with_kvcache(q, kv, lengths, block_table, 512, scale, causal=True, plan=plan)
print("decode", [*out.shape], out.dtype)

# The first of the two tokens alone, when the cache had one token less, saw the same.
alone = flash_mla_with_kvcache(q[:, :1], kv, lengths - 1, block_table, 512, scale, causal=True)
print("the same alone:", torch.allclose(alone, out[:, :1], rtol=0.02, atol=0.002))
