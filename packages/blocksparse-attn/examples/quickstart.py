"""Prefill a prompt through one Phi-3-small layer's block-sparse attention, then decode after it."""

import torch

from blocksparse_attn import BlockLayout, blocksparse_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
heads, heads_kv, size = 32, 8, 128  # Phi-3-small
prompt = 32768 if device == "cuda" else 1536  # on a CPU a short one, to be done in seconds

# Blocks of 64 tokens: each head sees the last 16 and every 8th one before them, shifted from head to head.
layout = BlockLayout.local_strided(heads, 131072, local_blocks=16, vert_stride=8, block_size=64, device=device)
print(layout, f"lists {layout.density():.0%} of the blocks that causal attention reads")

q = torch.randn(prompt, heads, size, device=device).bfloat16()
k, v = torch.randn(2, prompt, heads_kv, size, device=device).bfloat16()


def attend(q: torch.Tensor, tokens: int) -> torch.Tensor:  # q are the last queries of a sequence of so many tokens
    bounds = torch.tensor([[0, len(q)], [0, tokens]], dtype=torch.int32, device=device)
    k_seen, v_seen = k[:tokens], v[:tokens]
    return blocksparse_attention(
        q, k_seen, v_seen, layout, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], max_seqlen_q=len(q)
    )


out = attend(q, prompt)
print("prefill on", device, [*out.shape], out.dtype)

# Decode the last tokens again, one call each: a query's row of the layout follows from its absolute position.
steps = torch.cat([attend(q[t : t + 1], t + 1) for t in range(prompt - 8, prompt)])
print("decoded 8 tokens, the same:", torch.allclose(steps, out[-8:], rtol=0.02, atol=0.002))
