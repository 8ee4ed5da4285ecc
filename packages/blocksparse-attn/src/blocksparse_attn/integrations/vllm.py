"""``VLLM_PLUGINS=blocksparse_attn`` for vLLM: MiniMax-M3's attention to the blocks that its indexer selects.

vLLM finds :func:`register` by the entry point ``vllm.general_plugins`` and calls it in each of its processes.
"""

from __future__ import annotations

import torch

try:
    from vllm import envs
except ImportError as missing:
    raise ImportError("this needs vLLM 0.33: blocksparse-attn[vllm]") from missing

NAME = "blocksparse_attn"


def register() -> None:
    """Put this package into layers that vLLM makes from now on, if ``VLLM_PLUGINS`` names it; any number of times."""
    # On ROCm the indexer writes its lists in another order.
    if NAME not in (envs.VLLM_PLUGINS or ()) or torch.version.hip is not None:
        return
    # Which imports vLLM's model: only where somebody wants it.
    from blocksparse_attn.integrations import minimax_m3

    minimax_m3.take_over()
