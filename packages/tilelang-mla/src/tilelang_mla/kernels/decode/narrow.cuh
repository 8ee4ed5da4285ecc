// The functions of weights_of_keys.cuh and values_of_keys.cuh for keys of one scale and q in bfloat16, by MMAs of 8
// bits: no key is widened.
//
// Rows of q, and weights, are two numbers of e4m3 each: the nearest, and what that leaves. Between them they have the 8
// bits of bfloat16, q all of them. Tensor cores keep 13 bits of a sum of products of 8 bits: sums of 128 elements of a
// key, and of the 128 keys of a block, are added up in float32. Weights are relative to the highest of their block, so
// that the same 8 bits are left of all that count in it.
//
// Which byte is which column of an MMA is free here too: a thread's four neighbours are four columns.

#ifndef MLA_NARROW
#define MLA_NARROW

namespace mla::narrow {

using mla::load_keys, mla::zero_key;

// The highest weight of a block is 2^TOP; what is left of q is STEP times as high, in columns of its own.
constexpr float TOP = 8.f, STEP = 32.f;

#ifndef MLA_ON_HOST
MLA_DEVICE uint32_t nearest(float x, float y) {
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(both) : "f"(x), "f"(y));
  return both;
}
MLA_DEVICE float2 widened(uint32_t both) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(both)));
  return floats(halves);
}
template <int N> MLA_DEVICE void multiply(const uint32_t *a, uint64_t b, float *c, bool add) {
  constexpr auto type = tl::DataType::kFloat8_e4m3;
  tl::wgmma_rs<type, type, tl::DataType::kFloat32, 64, N, 32, false, false, 1, 1>(
      a, b, reinterpret_cast<uint32_t *>(c), add);
}
#endif

// Where byte k of row n lies in a line of 128: 16 bytes each are swizzled by the row.
MLA_DEVICE int place(int n, int k) { return n * 128 + (k ^ ((n & 7) << 4)); }

// Of a warp's 16 keys the first of a thread's two, which are four apart: neighbours among the columns of P.
MLA_DEVICE int own_key(Lane l) { return l.g / 4 * 8 + l.g % 4; }

// q as scores() has keys: of 16 elements side by side four times four are columns of an MMA each.
template <int N, int ROPE, bool RECORDS, bool BF16>
MLA_DEVICE void load_q(
    void *memory_at, void *rows_at, const void *q, int64_t stride, int rows, float scale, int thread) {
  uint8_t *memory = aligned(memory_at);
  static_assert(!RECORDS && BF16);
  using S = Shape<N, ROPE, RECORDS>;
  constexpr int TEAM = THREADS / N, UNITS = S::ROW / 4;
  Rows<N> of_rows = Rows<N>::of(rows_at);
  int n = thread / TEAM;
  bool there = n < rows;
  const uint2 *row = reinterpret_cast<const uint2 *>(static_cast<const uint16_t *>(q) + (there ? n : 0) * stride);
  float x[4];
  // A row's largest element lies in 2^7 .. 2^8 then, if it is a number above 0.
  int exponent = highest_exponent<TEAM, BF16>(row, UNITS, thread);
  int lift = exponent == 0 || exponent == 255 ? 127 : min(max(261 - exponent, 1), 253);
  // Of an infinite one nothing is left but NaN.
  float by = exponent == 255 ? NAN : __uint_as_float(lift << 23);
  for (int u = thread % TEAM; u < UNITS; u += TEAM) {
    int k = u / 16 * 64 + u % 4 * 16 + u % 16 / 4 * 4;
    unpack<true>(row[u], x);
    uint32_t first = 0, left = 0;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float even = there ? x[i] * by : 0.f, odd = there ? x[i + 1] * by : 0.f;
      uint32_t both = nearest(even, odd);
      float2 of = widened(both);
      first |= both << 8 * i, left |= nearest((even - of.x) * STEP, (odd - of.y) * STEP) << 8 * i;
    }
    uint8_t *line = memory + k / 128 * 2 * S::CHUNK;
    *reinterpret_cast<uint32_t *>(line + place(n, k % 128)) = first;
    *reinterpret_cast<uint32_t *>(line + place(N + n, k % 128)) = left;
  }
  if (thread % TEAM == 0) {
    of_rows.highest[n] = FLOOR;
    of_rows.factor[n] = scale * __uint_as_float((254 - lift) << 23);
  }
  visible_to_mma();
}

// Scores of a warpgroup's 64 keys, [key, row], in which q's lift and the cache's scale still are.
template <int N, int ROPE, bool RECORDS, bool BF16>
MLA_DEVICE void scores(float *s, void *memory_at, int stage, void *rows_at, int thread) {
  using S = Shape<N, ROPE, RECORDS>;
  Lane l = lane_of(thread);
  const uint8_t *low = stage_of<N, ROPE, RECORDS>(memory_at, stage) + (16 * l.warp + own_key(l)) * S::ROW + 16 * l.t;
  const uint8_t *high = low + 4 * S::ROW;
  uint64_t q = operand(aligned(memory_at));
  uint32_t a[2][8];
  // Of two chunks of 64 each.
  float part[2][N];
#pragma unroll
  for (int i = 0; i < N / 2; i++) s[i] = 0.f;
#pragma unroll
  for (int c = 0; c <= S::CHUNKS; c++) {
    if (c < S::CHUNKS) {
      uint4 x = *reinterpret_cast<const uint4 *>(low + 64 * c);
      uint4 y = *reinterpret_cast<const uint4 *>(high + 64 * c);
      uint32_t *own = a[c % 2];
      own[0] = x.x, own[1] = y.x, own[2] = x.y, own[3] = y.y, own[4] = x.z, own[5] = y.z, own[6] = x.w, own[7] = y.w;
      begin_products();
#pragma unroll
      for (int k = 0; k < 2; k++)
        multiply<2 * N>(
            own + 4 * k, advanced(q, c / 2 * 2 * S::CHUNK + c % 2 * 64 + 32 * k), part[c / 2 % 2], c % 2 + k > 0);
      commit_products();
    }
    if (c == 0) continue;
    // Products of the chunk before are done, whose registers the next one's are.
    if (c < S::CHUNKS) await_products<1>();
    else await_products<0>();
    if (c % 2 && c < S::CHUNKS) continue;
    float *done = part[(c - 1) / 2 % 2];
    keep<N>(done);
#pragma unroll
    for (int i = 0; i < N / 2; i++) s[i] += done[i] + done[N / 2 + i] * (1.f / STEP);
  }
}

// Scores to weights, as mla::weigh has it; 2^TOP is that of a block's highest score, and of_block[row] what they are to be
// multiplied by.
template <int N, int ROPE, bool RECORDS, bool BF16, bool LISTS>
MLA_DEVICE void weigh(
    float *s, float *sums, void *memory_at, void *rows_at, const int *limits, const uint8_t *valid, int first_key,
    bool ends, int parity, int buffer, int thread) {
  static_assert(!LISTS);
  using S = Shape<N, ROPE, RECORDS>;
  Lane l = lane_of(thread);
  Rows<N> of_rows = Rows<N>::of(rows_at);
  int low = 16 * l.warp + own_key(l), key = first_key + 64 * l.group + low;
  float most[N / 4];
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    int row = row_of(l, i);
    float *two = scores_of(s, i);
    multiply_both(two, of_rows.factor[row]);
    if (ends) mask(two, key < limits[row], key + 4 < limits[row]);
    most[i] = larger_of(two);
  }
  // Who is late still reads those of the block before.
  float *by_warp = of_rows.seen + parity * 8 * N;
  tell_highest<N>(by_warp, most, l);
  together();
  const float *before = of_rows.highest + parity * N;
  float *after = of_rows.highest + (parity ^ 1) * N, *rescales = of_rows.rescale + buffer * N;
  // Of 32 keys the i-th four are bytes i of the columns that four threads have, or of those 16 behind.
  int column = 64 * l.group + l.warp / 2 * 32 + l.warp % 2 * 16 + l.g % 4 * 4 + l.g / 4 * 2;
  uint8_t *weights = aligned(memory_at) + S::WEIGHTS + 2 * buffer * S::CHUNK;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int row = 8 * j + 2 * l.t + e;
      float most = fmaxf(highest_of(by_warp, row), FLOOR);
      float highest = before[row], rescale = 1.f;
      if (most > highest + HEADROOM) rescale = power(highest - most), highest = most;
      float of_block = power(most - highest + LIFT - TOP);
      if (l.g == 0 && l.group == 0 && l.warp == 0)
        after[row] = highest, rescales[row] = rescale, of_rows.of_block[buffer * N + row] = of_block;
      float x = power(s[4 * j + e] - most + TOP), y = power(s[4 * j + 2 + e] - most + TOP);
      sums[2 * j + e] = sums[2 * j + e] * rescale + (x + y) * of_block;
      uint32_t both = nearest(x, y);
      float2 of = widened(both);
      *reinterpret_cast<uint16_t *>(weights + place(row, column)) = static_cast<uint16_t>(both);
      *reinterpret_cast<uint16_t *>(weights + place(N + row, column)) = static_cast<uint16_t>(nearest(x - of.x, y - of.y));
    }
  }
  visible_to_mma();
}

// Sums of all keys, of which a thread has those of its own, of each of its rows.
template <int N> MLA_DEVICE void total(const float *sums, void *rows_at, int parity, int slot, int thread) {
  float of_warp[N / 4];
  for (int i = 0; i < N / 4; i++) of_warp[i] = sums[i];
  over_keys<N>(of_warp, [](float x, float y) { return x + y; }, lane_of(thread));
  mla::total<N, false>(of_warp, rows_at, parity, slot, thread);
}

// Four bytes of four keys to those of four latents.
MLA_DEVICE void transpose(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t *to, int step) {
  uint32_t low = permuted(a, b, 0x5140), low_behind = permuted(c, d, 0x5140);
  uint32_t high = permuted(a, b, 0x7362), high_behind = permuted(c, d, 0x7362);
  to[0] = permuted(low, low_behind, 0x5410), to[1] = permuted(low, low_behind, 0x7632);
  to[step] = permuted(high, high_behind, 0x5410), to[step + 1] = permuted(high, high_behind, 0x7632);
}

// acc [latent, row] of a warpgroup's 256 latents; behind it, here, the same sums over the keys of a block alone, which are
// in two stages. A stage is free as soon as its keys are in registers.
template <int N, int ROPE, bool RECORDS, bool BF16, class Barrier>
MLA_DEVICE void values(
    float *acc, void *memory_at, int first, int second, int buffer, Barrier &first_empty, Barrier &second_empty,
    int thread) {
  using S = Shape<N, ROPE, RECORDS>;
  float *of_block = acc + 2 * N;
  Lane l = lane_of(thread);
  int own_latents = 256 * l.group + 64 * l.warp + 8 * l.g + l.t * S::ROW;
  uint64_t weights = uniform(operand(aligned(memory_at) + S::WEIGHTS + 2 * buffer * S::CHUNK));
  uint32_t a[2][4 * TILES];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const uint8_t *raw = stage_of<N, ROPE, RECORDS>(memory_at, k < 2 ? first : second) + own_latents;
    // The products that read these registers are done.
    if (k >= 2) await_products<1>();
    // Of each tile two latents of the first 16 columns, and of those behind.
    uint32_t *own = a[k % 2];
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      uint2 x[4];
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = *reinterpret_cast<const uint2 *>(raw + (k % 2 * 32 + 4 * (i + j)) * S::ROW);
      transpose(x[0].x, x[1].x, x[2].x, x[3].x, own + i / 2, 4);
      transpose(x[0].y, x[1].y, x[2].y, x[3].y, own + 8 + i / 2, 4);
    }
    if (k % 2) arrive(k < 2 ? first_empty : second_empty, thread);
    begin_products();
#pragma unroll
    for (int both = 0; both < 2; both++)
#pragma unroll
      for (int m = 0; m < TILES; m++)
        multiply<N>(own + 4 * m, advanced(weights, both * S::CHUNK + 32 * k), of_block + m * N / 2, k + both > 0);
    commit_products();
  }
  await_products<0>();
  keep<2 * N>(of_block);
}

// The sums over a block, each row's by what its weights are to be multiplied by.
template <int N> MLA_DEVICE void add_block(float *acc, void *rows_at, int buffer, int thread) {
  Lane l = lane_of(thread);
  const float *by = Rows<N>::of(rows_at).of_block + buffer * N + 2 * l.t;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float even = by[8 * j], odd = by[8 * j + 1];
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int at = m * N / 2 + 4 * j + i;
        acc[at] += acc[2 * N + at] * (i % 2 ? odd : even);
      }
  }
}

}  // namespace mla::narrow

#endif
