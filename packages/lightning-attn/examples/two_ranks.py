"""A sequence whose tokens two ranks share: ``torchrun --nproc-per-node 2 two_ranks.py``, on GPUs or on a CPU."""

import os

import torch
from torch import distributed

from lightning_attn import lightning_attention, slopes
from lightning_attn.parallel import lightning_attention_cp

if not distributed.is_initialized():
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
world, rank = distributed.get_world_size(), distributed.get_rank()
device = f"cuda:{os.environ.get('LOCAL_RANK', rank)}" if torch.cuda.is_available() else "cpu"
tokens = 131072 if device != "cpu" else 600

# Every rank makes the whole sequence, to compare; it needs its own part alone.
generator = torch.Generator(device).manual_seed(0)
q, k, v = torch.randn(3, 1, 8, tokens, 128, generator=generator, device=device).bfloat16()
decays = slopes(8).to(device)
own = [x.chunk(world, dim=2)[rank].requires_grad_() for x in (q, k, v)]

out, state = lightning_attention_cp(*own, decays, group=None)
out.float().square().mean().backward()

with torch.no_grad():
    whole = lightning_attention(q, k, v, decays)
    error = (out - whole.out.chunk(world, dim=2)[rank]).abs().max() / whole.out.abs().max()
print(f"rank {rank}: tokens {out.shape[2]} of {tokens}, as on one rank to 1e-2: {bool(error < 1e-2)}")
if world > 1:
    distributed.barrier()
