"""The pattern of Phi-3-small as a module, for models that hold one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from blocksparse_attn.api import blocksparse_flash_attn_varlen_fwd
from blocksparse_attn.layout import BlockLayout
from kernel_reference.checks import check_int, fail

Tensor = torch.Tensor


class LocalStridedBlockSparseAttn(torch.nn.Module):
    """Attention over local blocks and every ``vert_stride``-th vertical one, shifted by head.

    The pattern is that of :meth:`BlockLayout.local_strided`. It moves with the module from device to device and is not
    in its state dict.

    Args:
        n_heads: query heads of the whole model.
        max_seqlen, local_blocks, vert_stride, block_size, homo_head, q_block_size: as there.
        device: of the pattern; torch's default device when None.
        dtype: ignored, for callers that pass it: a pattern is integers.
        active_head_range: (lo, hi): attend with heads lo .. hi - 1 of the model only, as a rank under tensor
            parallelism does. They keep the shifts that they have in the whole model.

    Attributes:
        layout: the :class:`BlockLayout`.

    Raises:
        TypeError, ValueError: an argument is not as described there.
    """

    def __init__(
        self,
        n_heads: int,
        max_seqlen: int,
        local_blocks: int,
        vert_stride: int,
        block_size: int,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        homo_head: bool = False,
        active_head_range: tuple[int, int] | None = None,
        q_block_size: int | None = None,
    ) -> None:
        super().__init__()
        check_int("n_heads", n_heads, 1)
        self._pattern = (n_heads, max_seqlen, local_blocks, vert_stride, block_size, homo_head, active_head_range)
        self._q_block_size = q_block_size
        self.layout = self._built(device)
        low, high = (0, n_heads) if active_head_range is None else active_head_range
        self.num_heads = high - low

    def _built(self, device: torch.device | str | int | None) -> BlockLayout:
        return BlockLayout.local_strided(*self._pattern, device=device, q_block_size=self._q_block_size)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LocalStridedBlockSparseAttn:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Rebuilt there, not copied: a module made on the meta device has nothing to copy.
        device = fn(torch.empty(0, device=self.layout.device)).device
        if device != self.layout.device:
            self.layout = self._built(device)
        return self

    def extra_repr(self) -> str:
        names = ("n_heads", "max_seqlen", "local_blocks", "vert_stride", "block_size", "homo_head", "active_head_range")
        return ", ".join(f"{name}={value}" for name, value in zip(names, self._pattern, strict=True))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_k: Tensor,
        cu_seqlens_q: Tensor | None = None,
        sm_scale: float | None = None,
    ) -> Tensor:
        """:func:`blocksparse_flash_attn_varlen_fwd` with the module's layout.

        Args:
            q: [T, n_heads, D], with active_head_range [T, hi - lo, D]; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv].
            cu_seqlens_k, cu_seqlens_q, sm_scale: as there; no sequence may be longer than max_seqlen.

        Returns:
            [T, heads of q, Dv], new, in q's dtype.

        Raises:
            TypeError, ValueError: as there; or q does not have the module's heads.
        """
        if isinstance(q, Tensor) and q.ndim == 3 and q.shape[1] != self.num_heads:
            fail("q", f"of the {self.num_heads} heads of this module", f"{q.shape[1]} heads")
        return blocksparse_flash_attn_varlen_fwd(q, k, v, cu_seqlens_k, cu_seqlens_q, sm_scale, self.layout)
