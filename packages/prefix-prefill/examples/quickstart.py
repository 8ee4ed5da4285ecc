"""The next 2048 tokens of a prompt behind 32k older ones, with the heads that Llama-3-70B has on one of eight GPUs."""

import torch

from prefix_prefill import prefix_prefill

device = "cuda" if torch.cuda.is_available() else "cpu"
heads, heads_kv, size, page = 8, 1, 128, 16  # Llama-3-70B on one of eight GPUs
prefix, chunk = (32768 if device == "cuda" else 2048), 2048  # on a CPU a shorter prefix, to be done in seconds

# A cache of pages for any number of sequences. This one's pages lie all over it, and its new tokens are in it already.
pages = (prefix + chunk) // page
k_cache, v_cache = torch.randn(2, pages + 100, page, heads_kv, size, device=device).bfloat16()
block_table = torch.randperm(pages + 100, device=device, dtype=torch.int32)[None, :pages]
seqlens_k = torch.tensor([prefix + chunk], dtype=torch.int32, device=device)
q = torch.randn(chunk, heads, size, device=device).bfloat16()


def attend(q: torch.Tensor) -> torch.Tensor:
    cu_seqlens_q = torch.tensor([0, len(q)], dtype=torch.int32, device=device)
    return prefix_prefill(q, None, None, k_cache, v_cache, block_table, cu_seqlens_q, seqlens_k, max_seqlen_q=len(q))


out = attend(q)
print("on", device, [*out.shape], out.dtype, "each token over the", prefix, "before the chunk and those up to itself")

# The last 24 tokens alone see what they saw as a part of the chunk.
print("the same in pieces:", torch.allclose(attend(q[-24:]), out[-24:], rtol=0.02, atol=0.002))
