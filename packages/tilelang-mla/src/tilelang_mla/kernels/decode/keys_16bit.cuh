// Behind rows.cuh, rows_of_keys.cuh and what belongs to it: keys of 16 bits as the rows of WGMMA, S^T = K Q^T and
// O^T = V^T P^T, with both operands in shared memory. Few heads are few columns, and no row of an MMA is nobody's.
//
// A block is 64 keys, as rows.cuh writes them: 64 elements of each are a chunk, which of K is an operand by rows, and of
// V^T by columns. One warpgroup makes weights, two more multiply half of the latents each.

#ifndef MLA_KEYS_16BIT
#define MLA_KEYS_16BIT

namespace mla::bits16 {

constexpr int BLOCK = 64, OF_BLOCK = BLOCK * 128, HALF = TILES * OF_BLOCK;

// N: rows of q. Two of q, weights of two blocks, then rings of STAGES left halves, right halves and ropes.
template <int N, int ROPE, int STAGES> struct Shape {
  static constexpr int CHUNKS = (LATENT + ROPE) / 64, CHUNK = N * 128, OF_Q = CHUNKS * CHUNK;
  static constexpr int WEIGHTS = 2 * OF_Q, LEFT = WEIGHTS + 2 * CHUNK, RIGHT = LEFT + STAGES * HALF, ROPES = RIGHT + STAGES * HALF;
  // Where a chunk of q is in a stage.
  static MLA_INLINE int place_of(int chunk, int stage) {
    if (chunk >= 2 * TILES) return ROPES + stage * OF_BLOCK;
    return (chunk < TILES ? LEFT : RIGHT) + stage * HALF + chunk % TILES * OF_BLOCK;
  }
};

#ifndef MLA_ON_HOST
// The warpgroup that makes weights.
MLA_DEVICE void of_weights() { asm volatile("bar.sync 5, 128;" ::: "memory"); }
MLA_DEVICE bool of_weights(bool own) {
  int any;
  asm volatile("{.reg .pred o, a; setp.ne.s32 o, %1, 0; barrier.cta.red.or.pred a, 5, 128, o; selp.s32 %0, 1, 0, a;}"
               : "=r"(any) : "r"(int(own)) : "memory");
  return any;
}
// COLUMNS: operand a is of K by its elements, else of V^T by its keys.
template <int N, bool BF16, bool COLUMNS> MLA_DEVICE void multiply(uint64_t a, uint64_t b, float *c, bool add) {
  constexpr auto type = BF16 ? tl::DataType::kBFloat16 : tl::DataType::kFloat16;
  tl::wgmma_ss<type, type, tl::DataType::kFloat32, 64, N, 16, COLUMNS, false, 1, 1>(
      a, b, reinterpret_cast<uint32_t *>(c), add);
}
// Of a matrix of eight rows and columns of 16 bits, of which a thread has two neighbours of a row, the transpose.
MLA_DEVICE uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}
#endif

// Rows of q to one of its two places, zeros behind the last.
template <int N, int ROPE, int STAGES>
MLA_DEVICE void load_q(void *memory, int slot, const void *q, int64_t stride, int rows, int thread) {
  using S = Shape<N, ROPE, STAGES>;
  constexpr int UNITS = 8 * S::CHUNKS;
  rows::Shared to = rows::shared(aligned(memory) + slot * S::OF_Q);
  for (int u = thread; u < N * UNITS; u += 128) {
    int n = u / UNITS, i = u % UNITS;
    const uint8_t *from = static_cast<const uint8_t *>(q) + (n < rows ? n : 0) * stride * 2 + 16 * i;
    rows::copy<false>(to + i / 8 * S::CHUNK + n * 128 + ((i ^ n) & 7) * 16, from, n < rows);
  }
}

// A warp's 16 keys of a block: left half and ropes, or right half.
template <int N, int ROPE, int STAGES>
MLA_DEVICE void copy_left(void *memory, int stage, const void *own, bool there, int thread) {
  using S = Shape<N, ROPE, STAGES>;
  rows::copy_rows<16, TILES, true>(aligned(memory) + S::place_of(0, stage), 0, own, there, thread);
  if (ROPE) rows::copy_rows<16, 1, true>(aligned(memory) + S::place_of(2 * TILES, stage), 2 * LATENT, own, there, thread);
}
template <int N, int ROPE, int STAGES>
MLA_DEVICE void copy_right(void *memory, int stage, const void *own, bool there, int thread) {
  using S = Shape<N, ROPE, STAGES>;
  rows::copy_rows<16, TILES, true>(aligned(memory) + S::place_of(TILES, stage), LATENT, own, there, thread);
}

template <int N, int ROPE, int STAGES, bool BF16>
MLA_DEVICE void score_chunk(float *s, uint8_t *memory, int slot, int stage, int chunk, bool add) {
  using S = Shape<N, ROPE, STAGES>;
  uint64_t q = uniform(operand(memory + slot * S::OF_Q + chunk * S::CHUNK));
  uint64_t keys = uniform(operand(memory + S::place_of(chunk, stage)));
#pragma unroll
  for (int k = 0; k < 4; k++)
    multiply<N, BF16, false>(advanced(keys, 32 * k), advanced(q, 32 * k), s, add || k > 0);
}

// Scores of half of the elements are asked for, [key, row], with the left half ropes; behind the right half's all are there.
template <int N, int ROPE, int STAGES, bool BF16, bool RIGHT>
MLA_DEVICE void score_half(float *s, void *memory_at, int slot, int stage) {
  uint8_t *memory = aligned(memory_at);
  visible_to_mma();
  begin_products();
#pragma unroll
  for (int c = 0; c < TILES; c++)
    score_chunk<N, ROPE, STAGES, BF16>(s, memory, slot, stage, RIGHT * TILES + c, RIGHT || c > 0);
  if (ROPE && !RIGHT) score_chunk<N, ROPE, STAGES, BF16>(s, memory, slot, stage, 2 * TILES, true);
  commit_products();
  if (RIGHT) await_products<0>(), keep<N / 2>(s);
}

// A thread's numbers of its rows, N / 4: those of a warp's 16 keys together, in all of its threads.
template <int N, class Combine> MLA_DEVICE void of_all_keys(float *x, Combine combine) {
#pragma unroll
  for (int i = 0; i < N / 4; i++)
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x[i] = combine(x[i], __shfl_xor_sync(~0u, x[i], step));
}

// What a thread knows of its rows: sums of the weights of its own keys, running maxima, and the largest scores of its
// own keys.
template <int N> MLA_DEVICE void begin_rows(float *state) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) state[i] = 0.f, state[N / 4 + i] = FLOOR, state[N / 2 + i] = -INFINITY;
}

// Scores to weights, in shared memory [row, key] of one of two blocks, and what rescales accumulators before it.
// parity: of the blocks of a work item, buffer: of all. Warps tell each other their maxima where one has risen.
template <int N, int ROPE, int STAGES, bool BF16>
MLA_DEVICE void weigh(
    float *s, float *state, void *memory_at, void *rows_at, const uint8_t *valid, float scale, int parity, int buffer,
    int thread) {
  using S = Shape<N, ROPE, STAGES>;
  Lane l = lane_of(thread);
  Rows<N> of_rows = Rows<N>::of(rows_at);
  float *sums = state, *known = state + N / 4, *highest = state + N / 2, most[N / 4];
  int low = 16 * l.warp + l.g;
  bool low_valid = valid[low], high_valid = valid[low + 8], rises = false;
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float *two = scores_of(s, i);
    multiply_both(two, scale);
    mask(two, low_valid, high_valid);
    most[i] = larger_of(two), highest[i] = fmaxf(highest[i], most[i]);
    rises |= most[i] > known[i] + HEADROOM;
  }
  bool tells = l.g == 0 && l.warp == 0;
  float *rescales = of_rows.rescale + buffer * N;
  if (of_weights(rises)) {
    of_all_keys<N>(most, [](float x, float y) { return fmaxf(x, y); });
    // Who is late still reads those of the block before.
    float *by_warp = of_rows.seen + parity * 8 * N;
#pragma unroll
    for (int i = 0; i < N / 4; i++)
      if (l.g == 0) by_warp[4 * row_of(l, i) + l.warp] = most[i];
    of_weights();
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      float4 a = *reinterpret_cast<const float4 *>(by_warp + 4 * row_of(l, i));
      float of_all = fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), by = 1.f;
      if (of_all > known[i] + HEADROOM) by = power(known[i] - of_all), known[i] = of_all;
      sums[i] *= by;
      if (tells) rescales[row_of(l, i)] = by;
    }
  } else if (tells) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) rescales[row_of(l, i)] = 1.f;
  }
  uint8_t *weights = aligned(memory_at) + S::WEIGHTS + buffer * S::CHUNK;
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    int row = row_of(l, i);
    const float *two = scores_of(s, i);
    float x = power(two[0] - known[i]), y = power(two[2] - known[i]);
    sums[i] += x + y;
    uint32_t both = pack(x, y, BF16);
    *reinterpret_cast<uint16_t *>(weights + place(row, low)) = static_cast<uint16_t>(both);
    *reinterpret_cast<uint16_t *>(weights + place(row, low + 8)) = static_cast<uint16_t>(both >> 16);
  }
  visible_to_mma();
}

// Sums of all keys, the logarithm that they are relative to, and the largest scores. slot: of the work item.
template <int N> MLA_DEVICE void total(float *state, void *rows_at, int slot, int thread) {
  Lane l = lane_of(thread);
  Rows<N> of_rows = Rows<N>::of(rows_at);
  float *sums = state, *known = state + N / 4, *highest = state + N / 2, *by_warp = of_rows.known;
  of_all_keys<N>(sums, [](float x, float y) { return x + y; });
  of_all_keys<N>(highest, [](float x, float y) { return fmaxf(x, y); });
  if (l.g == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      int row = row_of(l, i);
      by_warp[8 * row + l.warp] = sums[i], by_warp[8 * row + 4 + l.warp] = highest[i];
      if (l.warp == 0) of_rows.log_of[slot * N + row] = known[i];
    }
  }
  of_weights();
  if (thread < N) {
    const float *x = by_warp + 8 * thread;
    of_rows.sum[slot * N + thread] = x[0] + x[1] + x[2] + x[3];
    of_rows.highest[slot * N + thread] = fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7]));
  }
}

// acc [latent, row] of a half of the latents, and a block's weights.
template <int N, int ROPE, int STAGES, bool BF16>
MLA_DEVICE void values(float *acc, void *memory_at, int half, int stage, int buffer) {
  using S = Shape<N, ROPE, STAGES>;
  uint8_t *memory = aligned(memory_at);
  uint64_t weights = uniform(operand(memory + S::WEIGHTS + buffer * S::CHUNK));
  uint64_t latents = uniform(operand(memory + S::place_of(half * TILES, stage)));
  visible_to_mma();
  begin_products();
#pragma unroll
  for (int k = 0; k < BLOCK / 16; k++)
#pragma unroll
    for (int m = 0; m < TILES; m++)
      multiply<N, BF16, true>(
          advanced(latents, m * OF_BLOCK + 16 * 128 * k), advanced(weights, 32 * k), acc + m * N / 2, true);
  commit_products();
  await_products<0>();
  keep<2 * N>(acc);
}

// Rows of a work item, each by its sum. Sinks count where they are given.
template <int N, bool BF16>
MLA_DEVICE void store(
    const float *acc, void *rows_at, int half, int slot, void *out, int64_t stride, int rows, const void *sinks,
    int given, int first_row, int thread) {
  Lane l = lane_of(thread);
  const float *log_of = Rows<N>::of(rows_at).log_of + slot * N, *sums = Rows<N>::of(rows_at).sum + slot * N;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float by[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int row = 8 * j + 2 * l.t + e;
      float sum = row < rows ? with_sink(sums[row], log_of[row], sinks, given, first_row + row) : 0.f;
      by[e] = sum == 0.f ? 0.f : 1.f / sum;
    }
    // Of a thread's eight rows of latents now two neighbours of one of q.
    int row = 8 * j + l.g;
    uint16_t *to = static_cast<uint16_t *>(out) + row * stride + half * (LATENT / 2) + 16 * l.warp + 2 * l.t;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float *x = acc + m * N / 2 + 4 * j + 2 * i;
        uint32_t pair = transposed(pack(x[0] * by[0], x[1] * by[1], BF16));
        if (row < rows) *reinterpret_cast<uint32_t *>(to + 64 * m + 8 * i) = pair;
      }
  }
}

}  // namespace mla::bits16

#endif
