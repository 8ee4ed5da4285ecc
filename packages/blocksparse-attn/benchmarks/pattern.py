"""The picture in the README: ``python packages/blocksparse-attn/benchmarks/pattern.py`` draws it anew.

Equal layouts give equal bytes.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.colors import ListedColormap

from blocksparse_attn import BlockLayout
from kernel_reference.bench import picture
from kernel_reference.models import PHI3_SMALL

TOKENS, HEAD = 4096, 0
PICTURE = Path(__file__).parent / "results" / "phi3-small.svg"


def draw(path: Path) -> None:
    m = PHI3_SMALL
    layout = BlockLayout.local_strided(m.num_heads_q, TOKENS, m.local_blocks, m.vert_stride, m.block_size)
    with picture.settings():
        figure = layout.plot(head=HEAD, title=f"{m.name}, head {HEAD}")
        # Blocks that are not listed show the page, which may be dark.
        figure.axes[0].images[0].set_cmap(ListedColormap(["none", picture.OURS[0]]))
        picture.save(figure, path)


if __name__ == "__main__":
    draw(PICTURE)
    print(f"wrote {PICTURE}")
