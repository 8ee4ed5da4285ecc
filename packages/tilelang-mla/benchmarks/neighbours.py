"""Which kernels give a sequence other bits in another batch: ``neighbours.py [--out FILE] [--dry]`` on a GPU.

64 sequences that decode, and the first 1, 8 and 32 of them alone: the same queries over the same pages. Counted are
sequences with any bit that differs from those of the whole batch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from dense import FA3, FLASH_MLA, OURS, VLLM, Batch, Shape, fa3, flash_mla, make_batch, ours, vllm_triton

from kernel_reference.bench.machine import commit_of, describe
from kernel_reference.models import DEEPSEEK_V3
from tilelang_mla import plan_decode

Call = Callable[[Batch], torch.Tensor]
WHOLE, PARTS = 64, (1, 8, 32)
ONE_PIECE = ", one piece"


def part_of(batch: Batch, count: int, num_splits: int | None = None) -> Batch:
    """The first sequences alone, with schedules of their own."""
    m, lengths = batch.shape.model, batch.seqlens_k[:count].contiguous()
    rows = count * batch.shape.tokens
    plan = plan_decode(
        lengths, m.num_heads, batch.shape.tokens, max_seqlen_k=max(batch.shape.lengths), num_splits=num_splits
    )
    return replace(
        batch, shape=replace(batch.shape, lengths=batch.shape.lengths[:count]), q=batch.q[:count], seqlens_k=lengths,
        block_table=batch.block_table[:count], cu_seqlens_q=batch.cu_seqlens_q[: count + 1],
        q_rope=batch.q_rope[:rows], q_nope=batch.q_nope[:rows], plan=plan, held={},
    )  # fmt: skip


def calls(on_gpu: bool) -> Mapping[str, tuple[Call, int | None]]:
    """Implementations, and into how many pieces ours cuts a sequence's keys where that is said."""
    own: dict[str, tuple[Call, int | None]] = {
        OURS: (lambda batch: ours(batch).out, None),
        OURS + ONE_PIECE: (lambda batch: ours(batch).out, 1),
    }
    if on_gpu:
        for name, factory in (
            (FA3, fa3), (FA3 + ONE_PIECE, partial(fa3, 1)), (FLASH_MLA, flash_mla), (VLLM, vllm_triton)
        ):  # fmt: skip
            own[name] = (partial(lambda run, batch: run(batch).out, factory()), None)
    return own


def main() -> None:
    """Count, and print or record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the counts there, as JSON lines")
    parser.add_argument("--commit", default="", help="the commit to record where the sources are no git checkout")
    parser.add_argument("--dry", action="store_true", help="few short sequences on a CPU")
    chosen = parser.parse_args()
    device = torch.device("cpu" if chosen.dry else "cuda")
    machine = {} if chosen.dry else asdict(describe(device)) | {"commit": chosen.commit or commit_of(Path(__file__))}
    torch.manual_seed(0)
    whole, parts, longest = (4, (1, 2), 300) if chosen.dry else (WHOLE, PARTS, 16384)
    lengths = tuple(torch.randint(longest // 8, longest, (whole,)).tolist())
    model = replace(DEEPSEEK_V3, num_heads=DEEPSEEK_V3.num_heads // 8)
    batch = make_batch(device, Shape(model, lengths, 1))
    for name, (run, num_splits) in calls(not chosen.dry).items():
        out = run(part_of(batch, whole, num_splits))
        for count in parts:
            alone = run(part_of(batch, count, num_splits))
            differ = int((alone != out[:count]).flatten(1).any(1).sum())
            line = {"implementation": name, "sequences": count, "of": whole, "differ": differ}
            print(line, flush=True)
            if chosen.out:
                with chosen.out.open("a") as file:
                    file.write(json.dumps(line | machine) + "\n")


if __name__ == "__main__":
    main()
