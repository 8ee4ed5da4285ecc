"""Linear attention with a per-head decay: prefill, ragged batches over a pool of states, decoding, drafts."""

from importlib import metadata

from lightning_attn.api import (
    LightningResult,
    Snapshots,
    lightning_attention,
    lightning_attention_varlen,
    lightning_commit,
    lightning_decode,
    lightning_verify,
    linear_decode_forward_triton,
)
from lightning_attn.decay_rates import slopes
from lightning_attn.packed.api import PackedResult, lightning_attention_packed, lightning_state

__all__ = [
    "LightningResult",
    "PackedResult",
    "Snapshots",
    "lightning_attention",
    "lightning_attention_packed",
    "lightning_attention_varlen",
    "lightning_commit",
    "lightning_decode",
    "lightning_state",
    "lightning_verify",
    "linear_decode_forward_triton",
    "slopes",
]

try:
    __version__ = metadata.version("lightning-attn")
except metadata.PackageNotFoundError:
    # Run from a source tree that was never installed.
    __version__ = "0+source"
