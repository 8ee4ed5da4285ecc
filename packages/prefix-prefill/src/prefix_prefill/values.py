"""What values of a call must be: what only device memory tells, read by one copy of all of it to the host."""

from __future__ import annotations

import torch

from kernel_reference.checks import fail
from kernel_reference.integers import cdiv
from kernel_reference.ragged import check_cu_seqlens
from prefix_prefill.arguments import NAMES, Names, PrefillNumbers, PrefillTensors, sizes_of


def check_values(tensors: PrefillTensors, numbers: PrefillNumbers, names: Names = NAMES, shared: bool = False) -> None:
    """Raises ValueError naming the argument, the index in it, what must be there and what was.

    shared: of a cascade's level before the last, whose keys are of any number.
    """
    q, k_cache, block_table, seqlens_k = tensors.q, tensors.k_cache, tensors.block_table, tensors.seqlens_k
    draft_mask = seqlens_k.new_empty(0) if tensors.draft_mask is None else tensors.draft_mask
    parts = [x.reshape(-1).long() for x in (tensors.cu_seqlens_q, seqlens_k, block_table, draft_mask)]
    cu, seqlens, table, masks = torch.cat(parts).cpu().split([part.numel() for part in parts])
    table = table.view(block_table.shape)
    new_tokens = check_cu_seqlens(names.cu_seqlens_q, cu.tolist(), q.shape[0])
    num_blocks, page_size, _, _ = sizes_of(k_cache, numbers.page_layout)
    capacity = block_table.shape[1] * page_size
    new_kv = tensors.k is not None
    negative = (masks[: sum(new_tokens)] < 0).nonzero()
    if len(negative):
        fail(f"draft_mask[{int(negative[0])}]", "0 or more", int(masks[negative[0]]))
    for sequence, (new, total) in enumerate(zip(new_tokens, seqlens.tolist(), strict=True)):
        if new > numbers.max_seqlen_q:
            fail(names.max_seqlen_q, f"at least {new}, the new tokens of sequence {sequence}", numbers.max_seqlen_q)
        most = capacity + new if new_kv else capacity
        # Where every key is seen a sequence may have none at all, a part of one that is shared: 0 and -inf.
        nothing = total == 0 and not new_kv and numbers.right < 0
        least = 0 if shared else new
        if least > most and not nothing:
            wanted = f"of columns for at least {least} keys, the new tokens of sequence {sequence}"
            fail(names.block_table, wanted, f"room for {capacity}")
        if not least <= total <= most and not nothing:
            own = "" if shared else " (the sequence's new tokens)"
            wanted = f"from {least}{own} to {most} (with what {names.block_table} has room for)"
            fail(f"{names.seqlens_k}[{sequence}]", wanted, total)
        if total > numbers.max_seqlen_k:
            fail(names.max_seqlen_k, f"at least {total}, the tokens of sequence {sequence}", numbers.max_seqlen_k)
        if new == 0 or (numbers.skip_decode and new == 1):
            continue
        # Pages wholly before the window are not read; engines free them.
        first = max(0, total - new - numbers.left) // page_size if numbers.left >= 0 else 0
        last = cdiv(total - new if new_kv else total, page_size)
        outside = (table[sequence, first:last] < 0) | (table[sequence, first:last] >= num_blocks)
        if bool(outside.any()):
            column = first + int(outside.nonzero()[0])
            wanted = f"a page from 0 to {num_blocks - 1}"
            fail(f"{names.block_table}[{sequence}, {column}]", wanted, int(table[sequence, column]))
