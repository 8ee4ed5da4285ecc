"""A prompt whose tokens two ranks share: ``torchrun --nproc-per-node 2 two_ranks.py``, on GPUs or on a CPU."""

import os

import torch
from torch import distributed
from torch.nn.functional import conv1d

from gdn_split import fused_qkvzba_split_reshape_cat
from gdn_split.parallel import conv_halo

if not distributed.is_initialized():
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
world, rank = distributed.get_world_size(), distributed.get_rank()
device = f"cuda:{os.environ.get('LOCAL_RANK', rank)}" if torch.cuda.is_available() else "cpu"
sizes, tokens = (2, 4, 32, 32), 1000

# Every rank makes the whole prompt, to compare; it needs its own part alone.
generator = torch.Generator(device).manual_seed(0)
mixed_qkvz, mixed_ba = (torch.randn(tokens, width, generator=generator, device=device) for width in (384, 8))
weight = torch.randn(256, 1, 4, generator=generator, device=device)

own = fused_qkvzba_split_reshape_cat(mixed_qkvz.chunk(world)[rank], mixed_ba.chunk(world)[rank], *sizes)
cu_seqlens = torch.tensor([0, len(own.mixed_qkv)], device=device)
halo = conv_halo(own.mixed_qkv, cu_seqlens, group=None, width=4)
out = conv1d(torch.cat([halo.before[0], own.mixed_qkv.T], dim=1)[None], weight, groups=256)[0].T

x = fused_qkvzba_split_reshape_cat(mixed_qkvz, mixed_ba, *sizes).mixed_qkv.T
whole = conv1d(torch.nn.functional.pad(x, (3, 0))[None], weight, groups=256)[0].T.chunk(world)[rank]
print(f"rank {rank}: {len(out)} of {tokens} tokens, as on one rank: {torch.allclose(out, whole, atol=1e-5)}")
if world > 1:
    distributed.barrier()
