"""Float32 as three bfloat16 parts, and products of these by WGMMA: what ``hopper_float32`` is made of."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from lightning_attn.kernels.hopper_rows import opaque


@gluon.constexpr_function
def product_layout(columns):
    """Registers of a product [64, columns], an accumulator over two warpgroups."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, columns // 2, 16])


@gluon.constexpr_function
def rows_layout(columns):
    """Rows x columns of float32 over eight warps, 16 bytes a thread."""
    return gl.BlockedLayout([1, 4], [128 // columns, columns // 4], [8, 1], [1, 0])


@gluon.jit
def load_rows(
    rows, row, length, column, WIDTH: gl.constexpr, BLOCK: gl.constexpr, sizes: gl.constexpr,
    MASKED: gl.constexpr = None,
):  # fmt: skip
    """Rows from ``row`` on x BLOCK columns, 0 past ``length`` rows and ``WIDTH`` columns."""
    CHUNK: gl.constexpr = sizes.CHUNK
    layout: gl.constexpr = rows_layout(BLOCK)
    # Addresses are made anew for each chunk: in registers from chunk to chunk they would displace others.
    o_row = opaque(gl.arange(0, CHUNK, gl.SliceLayout(1, layout)))
    o_column = column + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    m = o_row[:, None] < length
    if WIDTH % BLOCK if MASKED is None else MASKED:
        m = m & (o_column[None, :] < WIDTH)
    if sizes.WIDE:
        o_row = o_row.to(gl.int64)
        o_column = o_column.to(gl.int64)
    p_tile = rows.p + row.to(gl.int64) * rows.stride
    return gl.load(p_tile + o_row[:, None] * rows.stride + o_column[None, :] * rows.element, mask=m, other=0.0)


@gluon.jit
def parts_of(values):
    """Three bfloat16 numbers whose sum is each float32.

    In PTX, two at a time: ptxas converts numbers that are read again one by one, far slower than in pairs. What is not
    finite, or not in bfloat16, leaves a NaN among its parts.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 even, odd;
        cvt.rn.bf16x2.f32 $0, $4, $3;
        shl.b32 even, $0, 16;
        and.b32 odd, $0, 0xffff0000;
        sub.f32 even, $3, even;
        sub.f32 odd, $4, odd;
        cvt.rn.bf16x2.f32 $1, odd, even;
        shl.b32 $2, $1, 16;
        sub.f32 even, even, $2;
        and.b32 $2, $1, 0xffff0000;
        sub.f32 odd, odd, $2;
        cvt.rn.bf16x2.f32 $2, odd, even;
        }""",
        "=&r,=&r,=&r,r,r",
        [values],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def allocate_parts(rows: gl.constexpr, columns: gl.constexpr):
    """Shared memory for the three parts of a tile, each by itself.

    Of one piece of memory Triton takes stores to its parts for such to one place, and has all warps meet between them.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    parts = ()
    for i in gl.static_range(3):  # noqa: B007 (Triton takes no _)
        parts = parts + (gl.allocate_shared_memory(gl.bfloat16, [1, rows, columns], layout),)
    return parts


@gluon.jit
def there(parts):
    """The parts of a tile, by an index that compilers do not know.

    Otherwise the descriptors of all WGMMAs of a loop are made before it, in far more registers than there are.
    """
    zero = opaque(gl.to_tensor(0).to(gl.int32))
    return (parts[0].index(zero), parts[1].index(zero), parts[2].index(zero))


@gluon.jit
def store_parts(parts, values):
    first, second, third = parts_of(values)
    parts[0].store(first)
    parts[1].store(second)
    parts[2].store(third)


@gluon.jit
def issue_one(a_tile, b_tile, acc, TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr):
    if TRANSPOSED_A:
        a_tile = a_tile.permute((1, 0))
    if TRANSPOSED_B:
        b_tile = b_tile.permute((1, 0))
    return warpgroup_mma(a_tile, b_tile, acc, is_async=True)


@gluon.jit
def issue_product(a, b, acc, TRANSPOSED_A: gl.constexpr, TRANSPOSED_B: gl.constexpr):
    """Issue the six WGMMAs of a product of parts, the smallest first."""
    acc = issue_one(a[2], b[0], acc, TRANSPOSED_A, TRANSPOSED_B)
    acc = issue_one(a[0], b[2], acc, TRANSPOSED_A, TRANSPOSED_B)
    acc = issue_one(a[1], b[1], acc, TRANSPOSED_A, TRANSPOSED_B)
    acc = issue_one(a[1], b[0], acc, TRANSPOSED_A, TRANSPOSED_B)
    acc = issue_one(a[0], b[1], acc, TRANSPOSED_A, TRANSPOSED_B)
    return issue_one(a[0], b[0], acc, TRANSPOSED_A, TRANSPOSED_B)
