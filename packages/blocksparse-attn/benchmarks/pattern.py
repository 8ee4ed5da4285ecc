"""The pictures of patterns in the README: ``python packages/blocksparse-attn/benchmarks/pattern.py`` draws them anew.

Equal patterns give equal bytes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from blocksparse_attn import BlockLayout, select_blocks
from blocksparse_attn.picture import picture as of_mask
from kernel_reference.bench import picture
from kernel_reference.models import PHI3_SMALL

TOKENS, HEAD = 4096, 0
# Blocks of a token's list, tokens of a block, and what a prompt is about in turn.
TOPK, BLOCK, TOPICS = 8, 128, 8
RESULTS = Path(__file__).parent / "results"


def of_a_layout() -> Figure:
    m = PHI3_SMALL
    layout = BlockLayout.local_strided(m.num_heads_q, TOKENS, m.local_blocks, m.vert_stride, m.block_size)
    return layout.plot(head=HEAD, title=f"{m.name}, head {HEAD}")


def of_selected_blocks() -> Figure:
    """Each token's own list: blocks whose keys are about what it is about score best."""
    generator = torch.Generator().manual_seed(0)

    def about(count: int, each: int) -> torch.Tensor:
        topics = torch.randint(TOPICS, (count // each,), generator=generator)
        means = torch.eye(TOPICS)[topics.repeat_interleave(each)]
        return means + 0.3 * torch.randn(count, TOPICS, generator=generator)

    q, means = about(TOKENS, 256)[:, None], about(TOKENS // BLOCK, 2)[None, :, None]
    lengths = torch.tensor([TOKENS])
    indices = select_blocks(
        q,
        means,
        topk=TOPK,
        block_size=BLOCK,
        cu_seqlens_q=torch.tensor([0, TOKENS]),
        seqlens_k=lengths,
        local=1,
        sink=1,
    )[:, 0]
    mask = torch.zeros(TOKENS, TOKENS // BLOCK + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(indices < 0, TOKENS // BLOCK, indices).long(), True)
    return of_mask(mask[:, :-1], 1, BLOCK, TOKENS, f"the best {TOPK} blocks of {BLOCK}, token by token", None)


PICTURES = {RESULTS / "phi3-small.svg": of_a_layout, RESULTS / "selected.svg": of_selected_blocks}


def draw(path: Path) -> None:
    with picture.settings():
        figure = PICTURES[path]()
        # Blocks that are not listed show the page, which may be dark.
        figure.axes[0].images[0].set_cmap(ListedColormap(["none", picture.OURS[0]]))
        picture.save(figure, path)


if __name__ == "__main__":
    for one in PICTURES:
        draw(one)
        print(f"wrote {one}")
