"""The picture in the README: ``python packages/blocksparse-attn/benchmarks/pattern.py`` draws it anew.

Equal layouts give equal bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from blocksparse_attn import BlockLayout
from kernel_reference.models import PHI3_SMALL

TOKENS, HEAD = 4096, 0
PICTURE = Path(__file__).parent / "results" / "phi3-small.svg"
# Text stays text, as in the house's other pictures.
LOOK: Any = {
    "svg.hashsalt": "kernel_reference",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 9,
}


def draw(path: Path) -> None:
    m = PHI3_SMALL
    layout = BlockLayout.local_strided(m.num_heads_q, TOKENS, m.local_blocks, m.vert_stride, m.block_size)
    with matplotlib.rc_context(LOOK):
        figure = layout.plot(head=HEAD, title=f"{m.name}, head {HEAD}")
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(PICTURE)
    print(f"wrote {PICTURE}")
