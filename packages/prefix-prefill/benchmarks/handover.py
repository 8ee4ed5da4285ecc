"""What does racecheck say of a kernel that only hands arguments to warp-specialised tasks? On an sm_90 GPU:

``compute-sanitizer --tool racecheck python benchmarks/handover.py MODE``, MODE one of plain, sum, barrier, tma: what
tasks do with shared memory of their own. Each load of a partial result stands between two barriers of all warps.
"""

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MODES = ("plain", "sum", "barrier", "tma")


@gluon.jit
def first(d, smem, bars, x, y, p, MODE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    r = x + y
    if MODE >= 1:
        t = gl.full([64, 64], 1, gl.int32, layout) * r
        for _ in range(3):
            r += gl.sum(gl.sum(t, 0), 0)
            t += r
    if MODE >= 2:
        for i in range(4):
            mbarrier.wait(bars.index(0), i & 1)
            if MODE >= 3:
                b = smem.load(layout)
                r += gl.sum(gl.sum(b.to(gl.int32), 0), 0)
            mbarrier.arrive(bars.index(1))
    gl.store(p, r)


@gluon.jit
def other(d, smem, bars, x, y, p, MODE: gl.constexpr):
    if MODE >= 2:
        for i in range(4):
            mbarrier.wait(bars.index(1), (i & 1) ^ 1)
            if MODE >= 3:
                mbarrier.expect(bars.index(0), 64 * 64 * 2)
                tma.async_copy_global_to_shared(d, [0, 0], bars.index(0), smem)
            else:
                mbarrier.arrive(bars.index(0))
    gl.store(p + 1, x - y)


@gluon.jit
def idle(x, p):
    gl.store(p + 2, x)


@gluon.jit
def specialised(d, p, MODE: gl.constexpr):
    pid = gl.program_id(0)
    x = gl.load(p + 8 * pid)
    y = gl.load(p + 8 * pid + 4)
    if x < 100:
        smem = gl.allocate_shared_memory(gl.bfloat16, [64, 64], d.layout)
        bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        if MODE >= 2:
            mbarrier.init(bars.index(0), count=1)
            mbarrier.init(bars.index(1), count=1)
        q = p + 8 * pid + 1
        gl.warp_specialize(
            [(first, (d, smem, bars, x, y, q, MODE)), (other, (d, smem, bars, x, y, q, MODE)), (idle, (x, q))],
            [1, 1],
            [24, 24],
        )


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in MODES or not torch.cuda.is_available():
        print(f"give one of {', '.join(MODES)}, on a machine with a GPU", file=sys.stderr)
        return 2
    tile = torch.ones(64, 64, device="cuda").bfloat16()
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    numbers = torch.arange(8 * 1024, device="cuda", dtype=torch.int32) % 150
    specialised[(1024,)](TensorDescriptor(tile, [64, 64], [64, 1], [64, 64], layout), numbers, MODES.index(sys.argv[1]))
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
