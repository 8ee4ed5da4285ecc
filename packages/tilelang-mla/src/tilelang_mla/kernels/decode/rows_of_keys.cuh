// Decoding over 8-bit caches with keys as the rows of WGMMA: S^T = K Q^T and O^T = V^T P^T.
//
// A thread widens in registers what it loads of the cache, and hands it to WGMMA as operand A; no wide key is written
// to shared memory, and few heads are few columns. Two warpgroups multiply q by 64 keys each of a block of 128 and make
// the weights of all; two more multiply half of the latents each by these, while the first are at the next block. Which
// element is which row or column of an MMA is free as long as both operands agree: it is chosen so that a thread loads 8
// or 16 bytes at once, and those beside it from other banks.
//
// N: rows of q, 16 or 32. RECORDS: keys of 656 bytes (512 e4m3, 4 scales, 64 ropes of q's dtype), else ROPE ropes of
// e4m3 behind the latents, and one scale. e4m3 widens to float16 without a loss; q is float16 then too, each row times a
// power of two. A record's values are of q's dtype, each times its scale, and so are its ropes and weights.

#ifndef MLA_ROWS_OF_KEYS
#define MLA_ROWS_OF_KEYS

#ifndef MLA_ON_HOST
#include <tl_templates/cuda/instruction/wgmma.h>
#define MLA_INLINE __device__ __forceinline__
#define MLA_DEVICE static MLA_INLINE
#endif

namespace mla {

constexpr int LATENT = 512, KEYS = 64, SCALES = 512, ROPES = 528, THREADS = 256, TILES = 4;
// HEADROOM and FLOOR as in common.py. Weights are 2^LIFT times as high: float16's smallest numbers are not small.
constexpr float HEADROOM = 8.f, FLOOR = -1e30f, LIFT = 7.f;

template <int N, int ROPE, bool RECORDS> struct Shape {
  static constexpr int ROW = RECORDS ? ROPES + 2 * ROPE : LATENT + ROPE;
  static constexpr int CHUNKS = (LATENT + ROPE) / 64;
  static constexpr int WIDENED = RECORDS ? LATENT / 64 : CHUNKS;
  static constexpr int CHUNK = N * 128;
  // Operands in registers: the next is made while products read the last, where there is room.
  static constexpr int OPERANDS = RECORDS && N > 16 ? 1 : 2;
  // Records of few rows: latents are widened without their scales, which are in weights, those of each group's own.
  static constexpr bool GROUPED = RECORDS && N <= 16;
  static constexpr int GROUPS = GROUPED ? 4 : 1;
  // Whether keys are on their way while those before them are widened, as latents and to be scored.
  static constexpr bool AHEAD = N <= 16, SCORED_AHEAD = AHEAD && !RECORDS;
  // Behind q, of 8 bits in chunks two by two; weights of two blocks.
  static constexpr int WEIGHTS = (RECORDS ? CHUNKS : (CHUNKS + 1) / 2 * 2) * CHUNK, RAW = WEIGHTS + 4 * GROUPS * CHUNK, STAGE = KEYS * ROW;
  // Keys of a thread's four in an MMA of 16: neighbours, or apart where rows are that lie in the same banks.
  static constexpr bool APART = ROW % 128 == 64;
};

#ifndef MLA_ON_HOST
MLA_DEVICE uint32_t address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
// Both warpgroups that make weights.
MLA_DEVICE void together() { asm volatile("bar.sync 5, 256;" ::: "memory"); }
// The same, and whether it holds for any of their threads.
MLA_DEVICE bool together(bool own) {
  int any;
  asm volatile("{.reg .pred o, a; setp.ne.s32 o, %1, 0; barrier.cta.red.or.pred a, 5, 256, o; selp.s32 %0, 1, 0, a;}"
               : "=r"(any) : "r"(int(own)) : "memory");
  return any;
}
// A warp's arrival, when all its threads are here.
template <class Barrier> MLA_DEVICE void arrive(Barrier &barrier, int thread) {
  __syncwarp();
  if (thread % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}
// What a warp's threads read of each other's is written, and what they write has been read.
MLA_DEVICE void read_by_warp() { __syncwarp(); }
MLA_DEVICE void visible_to_mma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
MLA_DEVICE void widen(uint32_t four, uint32_t &low, uint32_t &high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high) : "r"(four));
}
// Bytes by their numbers; of a number and 8 the byte's sign, eight times.
MLA_DEVICE uint32_t permuted(uint32_t first, uint32_t second, uint32_t which) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(first), "r"(second), "r"(which));
  return bytes;
}
MLA_DEVICE float2 floats(uint32_t halves) { return __half22float2(*reinterpret_cast<__half2 *>(&halves)); }
MLA_DEVICE uint32_t pack(float x, float y, bool bf16) {
  uint32_t both;
  if (bf16)
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(x), "f"(y));
  else
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(x), "f"(y));
  return both;
}
MLA_DEVICE float power(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
MLA_DEVICE uint64_t operand(const void *p) {
  // K-major rows of 128 bytes, swizzled, eight of them in 1024 bytes.
  return (uint64_t(1) << 62) | (uint64_t(64) << 32) | (uint64_t(1) << 16) | ((address(p) & 0x3FFFF) >> 4);
}
// Of a descriptor, that it is the same in all lanes.
MLA_DEVICE uint64_t uniform(uint64_t operand) {
  return operand >> 32 << 32 | __shfl_sync(~0u, static_cast<uint32_t>(operand), 0);
}
MLA_DEVICE uint64_t advanced(uint64_t operand, int bytes) { return operand + (bytes >> 4); }
template <int N, bool BF16> MLA_DEVICE void multiply(const uint32_t *a, uint64_t b, float *c, bool add) {
  constexpr auto type = BF16 ? tl::DataType::kBFloat16 : tl::DataType::kFloat16;
  tl::wgmma_rs<type, type, tl::DataType::kFloat32, 64, N, 16, false, false, 1, 1>(
      a, b, reinterpret_cast<uint32_t *>(c), add);
}
MLA_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MLA_DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> MLA_DEVICE void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int COUNT> MLA_DEVICE void keep(float *c) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(c[i])::"memory");
}
// Bytes of the cache to shared memory; the barrier counts them, and this thread's arrival.
template <class Barrier> MLA_DEVICE void copy(void *to, const void *from, int bytes, Barrier &barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(&barrier)) : "memory");
}
// Which of a cluster's two programs this is, and the same place in the other's memory.
using Place = uint32_t;
MLA_DEVICE int own_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
MLA_DEVICE Place of_other(const void *own) {
  Place other;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(address(own)), "r"(own_rank() ^ 1));
  return other;
}
MLA_DEVICE float load_other(const void *own) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(of_other(own)) : "memory");
  return x;
}
MLA_DEVICE void give(Place to, const float *x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
#endif

// Where element k of row n lies in a chunk of 64: 16 bytes each are swizzled by the row.
MLA_DEVICE int place(int n, int k) { return n * 128 + ((k * 2) ^ ((n & 7) << 4)); }

struct Lane {
  int thread, group, warp, g, t;
};

MLA_DEVICE Lane lane_of(int thread) {
  return {thread, thread >> 7, (thread >> 5) & 3, (thread & 31) >> 2, thread & 3};
}

// What is known of rows of q, [N] each: maxima of 8 warps, or their sums, of two blocks; two running maxima; what a score,
// and a score of widened keys, is multiplied by; what rescales accumulators before each of two blocks; of two work items,
// when they end, the logarithm that sums are relative to, and the sums; and what products of a block are multiplied by.
// Of the four groups of latents that have a scale: the largest of 8 warps' keys, of two blocks; what rescales accumulators
// before each of two blocks; and the powers at the end of two items.
// Each of the 8 warps has running maxima of its own, alike in all, and behind them the groups' running powers of two, which
// are above all scales.
template <int N> struct Rows {
  static constexpr int KNOWN = N + 4;
  float *seen, *highest, *factor, *unlift, *rescale, *log_of, *sum, *of_block, *scales_seen, *by_power, *last_power, *known;
  static MLA_INLINE Rows of(void *at) {
    float *p = static_cast<float *>(at), *q = p + 26 * N;
    return {p, p + 16 * N, p + 18 * N, p + 19 * N, p + 20 * N, p + 22 * N, p + 24 * N, q, q, q + 64, q + 72, p + 32 * N};
  }
};

// The matrices begin at a multiple of 1024 bytes, with which swizzles count. The sum lets the compiler know that they are
// in shared memory.
MLA_DEVICE uint8_t *aligned(void *memory) {
  return static_cast<uint8_t *>(memory) + (-reinterpret_cast<uintptr_t>(memory) & 1023);
}

// Of a warp's 16 keys the first of a thread's two: records of neighbours lie in the same banks, those four apart do not,
// as where scores are made. Where values are, those two apart do not.
template <int N, bool RECORDS> MLA_DEVICE int own_key(int g) {
  return !RECORDS ? g : N <= 16 ? g % 2 * 4 + (g & 2) + g / 4 : g / 2 + g % 2 * 4;
}

template <int N, int ROPE, bool RECORDS> MLA_DEVICE uint8_t *stage_of(void *memory, int stage) {
  using S = Shape<N, ROPE, RECORDS>;
  return aligned(memory) + S::RAW + stage * S::STAGE;
}

// Four elements of q's dtype.
template <bool BF16> MLA_DEVICE void unpack(uint2 four, float *x) {
  if (BF16) {
    x[0] = __uint_as_float(four.x << 16), x[1] = __uint_as_float(four.x & 0xFFFF0000u);
    x[2] = __uint_as_float(four.y << 16), x[3] = __uint_as_float(four.y & 0xFFFF0000u);
  } else {
    float2 low = floats(four.x), high = floats(four.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
  }
}

// The biased exponent of the largest element of a row of q, among so many fours, whose threads are neighbours.
template <int TEAM, bool BF16> MLA_DEVICE int highest_exponent(const uint2 *row, int fours, int thread) {
  float most = 0.f, x[4];
  for (int u = thread % TEAM; u < fours; u += TEAM) {
    unpack<BF16>(row[u], x);
    for (int i = 0; i < 4; i++) most = fmaxf(most, fabsf(x[i]));
  }
  for (int step = 1; step < TEAM; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  return (__float_as_uint(most) >> 23) & 255;
}

// q in the order in which scores() has keys: four elements side by side are two pairs of an MMA's 16.
template <int N, int ROPE, bool RECORDS, bool BF16>
MLA_DEVICE void load_q(
    void *memory_at, void *rows_at, const void *q, int64_t stride, int rows, float scale, int thread) {
  uint8_t *memory = aligned(memory_at);
  using S = Shape<N, ROPE, RECORDS>;
  constexpr int TEAM = THREADS / N, UNITS = S::CHUNKS * 16, LIFTED = S::WIDENED * 16;
  Rows<N> of_rows = Rows<N>::of(rows_at);
  int n = thread / TEAM;
  bool there = n < rows;
  const uint2 *row = reinterpret_cast<const uint2 *>(static_cast<const uint16_t *>(q) + (there ? n : 0) * stride);
  float x[4];
  // A row's largest element lies in 2^14 .. 2^15 then, if it is a number above 0.
  int exponent = highest_exponent<TEAM, BF16>(row, LIFTED, thread);
  int lift = exponent == 0 || exponent == 255 ? 127 : min(max(268 - exponent, 1), 253);
  for (int u = thread % TEAM; u < UNITS; u += TEAM) {
    int c = u / 16, i = u % 16, t = i / 4, s = i % 4;
    // Ropes of 16 bits come 8 at a time.
    if (c >= S::WIDENED) t = i % 8 / 2, s = 2 * (i / 8) + i % 2;
    bool lifted = u < LIFTED;
    unpack<BF16>(row[u], x);
    for (int j = 0; j < 4; j++) x[j] = there ? x[j] * (lifted ? __uint_as_float(lift << 23) : 1.f) : 0.f;
    uint8_t *chunk = memory + c * S::CHUNK;
    *reinterpret_cast<uint32_t *>(chunk + place(n, 16 * s + 2 * t)) = pack(x[0], x[1], BF16 && !lifted);
    *reinterpret_cast<uint32_t *>(chunk + place(n, 16 * s + 2 * t + 8)) = pack(x[2], x[3], BF16 && !lifted);
  }
  if (thread % TEAM == 0) {
    float unlift = __uint_as_float((254 - lift) << 23);
    of_rows.highest[n] = of_rows.highest[N + n] = FLOOR;
    for (int warp = 0; warp < 8; warp++) {
      of_rows.known[warp * of_rows.KNOWN + n] = FLOOR;
      if (S::GROUPED && n < 4) of_rows.known[warp * of_rows.KNOWN + N + n] = 0.f;
    }
    of_rows.factor[n] = RECORDS ? scale : scale * unlift;
    of_rows.unlift[n] = unlift;
  }
  visible_to_mma();
}

// Two neighbours, each times a scale, in q's dtype.
template <bool BF16> MLA_DEVICE uint32_t scaled(uint32_t halves, float first, float second) {
  float2 x = floats(halves);
  return pack(x.x * first, x.y * second, BF16);
}

// Scores of a warpgroup's 64 keys, [key, row]; of records they are of the widened keys themselves, else q's lift and
// the cache's scale are still in them.
template <int N, int ROPE, bool RECORDS, bool BF16>
MLA_DEVICE void scores(float *s, void *memory_at, int stage, void *rows_at, int thread) {
  using S = Shape<N, ROPE, RECORDS>;
  const uint8_t *memory = aligned(memory_at), *raw = stage_of<N, ROPE, RECORDS>(memory_at, stage);
  constexpr int OWN = N / 2;
  Lane l = lane_of(thread);
  const uint8_t *low = raw + (16 * l.warp + own_key<N, RECORDS>(l.g)) * S::ROW, *high = low + 8 * S::ROW;
  uint64_t q = operand(memory);
  uint32_t a[S::OPERANDS][16];
  // Of two chunks that have a scale, one after the other.
  float parts[S::OPERANDS][RECORDS ? OWN : 1];
  Rows<N> of_rows = Rows<N>::of(rows_at);
  auto add = [&](int scale) {
    float of_low = reinterpret_cast<const float *>(low + SCALES)[scale];
    float of_high = reinterpret_cast<const float *>(high + SCALES)[scale], *part = parts[scale % S::OPERANDS];
    keep<OWN>(part);
#pragma unroll
    for (int i = 0; i < OWN; i++) s[i] = (scale ? s[i] : 0.f) + part[i] * (i % 4 < 2 ? of_low : of_high);
  };
  uint4 x, y;
  auto load = [&](int c) {
    x = *reinterpret_cast<const uint4 *>(low + 64 * c + 16 * l.t);
    y = *reinterpret_cast<const uint4 *>(high + 64 * c + 16 * l.t);
  };
  if (S::SCORED_AHEAD) load(0);
#pragma unroll
  for (int c = 0; c < S::WIDENED; c++) {
    if (!S::SCORED_AHEAD) load(c);
    const uint32_t of_low[4] = {x.x, x.y, x.z, x.w}, of_high[4] = {y.x, y.y, y.z, y.w};
    if (S::SCORED_AHEAD && c + 1 < S::WIDENED) load(c + 1);
    uint32_t *own = a[c % S::OPERANDS];
    float *to = RECORDS ? parts[c / 2 % S::OPERANDS] : s;
    // The products that read these registers are done, and those of two chunks that have a scale if another is behind.
    if (c >= S::OPERANDS) await_products<S::OPERANDS - 1>();
    if (RECORDS && S::OPERANDS == 2 && c > 2 && c % 2) add(c / 2 - 1);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      widen(of_low[k], own[4 * k], own[4 * k + 2]);
      widen(of_high[k], own[4 * k + 1], own[4 * k + 3]);
    }
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++)
      multiply<N, false>(
          own + 4 * k, advanced(q, c * S::CHUNK + 32 * k), to, k > 0 || (RECORDS ? c % 2 : c) > 0);
    commit_products();
    if (RECORDS && c % 2 && (S::OPERANDS == 1 || c + 1 == S::WIDENED)) {
      await_products<0>();
      add(c / 2);
    }
  }
  if (RECORDS) {
#pragma unroll
    for (int i = 0; i < OWN; i++) s[i] *= of_rows.unlift[8 * (i / 4) + 2 * l.t + i % 2];
    uint32_t *own = a[0];
    float *part = parts[0];
    // Eight elements of a thread are two pairs of an MMA, and two of the next.
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      uint4 x = *reinterpret_cast<const uint4 *>(low + ROPES + 32 * k + 16 * l.t);
      uint4 y = *reinterpret_cast<const uint4 *>(high + ROPES + 32 * k + 16 * l.t);
      own[4 * k] = x.x, own[4 * k + 1] = y.x, own[4 * k + 2] = x.y, own[4 * k + 3] = y.y;
      own[4 * k + 4] = x.z, own[4 * k + 5] = y.z, own[4 * k + 6] = x.w, own[4 * k + 7] = y.w;
    }
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++)
      multiply<N, BF16>(own + 4 * k, advanced(q, S::WIDENED * S::CHUNK + 32 * k), part, k > 0);
    commit_products();
    await_products<0>();
    keep<OWN>(part);
#pragma unroll
    for (int i = 0; i < OWN; i++) s[i] += part[i];
  }
  await_products<0>();
  keep<OWN>(s);
}

// The first of two rows whose sums over the keys of a warp a thread has.
template <int N> MLA_DEVICE int own_row(Lane l) { return l.g * N / 64 * 8 + 2 * l.t; }

// A thread's values of its rows, two keys each, to those of two rows and a warp's 16 keys, in x[0] and x[1]: each time
// half of the rows go to another thread, until there are two.
template <int N, class Combine> MLA_DEVICE void over_keys(float *x, Combine combine, Lane l) {
  int left = N / 8;
#pragma unroll
  for (int step = 16; step > 2; step /= 2) {
    bool upper = l.thread & step;
    if (left > 1) {
#pragma unroll
      for (int i = 0; i < N / 8; i++)
        if (i < left) {
          float away = upper ? x[i] : x[left + i], here = upper ? x[left + i] : x[i];
          x[i] = combine(here, __shfl_xor_sync(~0u, away, step));
        }
      left /= 2;
    } else {
      for (int i = 0; i < 2; i++) x[i] = combine(x[i], __shfl_xor_sync(~0u, x[i], step));
    }
  }
}

// Of a warp's 16 keys the largest scale of a group of latents, of which a thread has that of two keys.
MLA_DEVICE float largest_scale(float most) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  return most;
}

// A power of two that scales of a thread's group are below, and which only rises from block to block. Scales are multiplied
// by one over it. Accumulators follow.
template <int N> MLA_DEVICE float raised_power(const float *seen, float before, Lane l) {
  float most = seen[l.thread & 31];
#pragma unroll
  for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  uint32_t exponent = min(max((__float_as_uint(most) >> 23) + 1, 1u), 253u);
  return fmaxf(before, __uint_as_float(exponent << 23));
}
MLA_DEVICE float inverse(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

// Scores to weights, in shared memory [row, key] of one of two blocks, and what rescales accumulators before it.
// limits: of each row the first key that it does not see. first_key: of the block, behind whose last key all limits may
// lie: ends is false. valid: of lists, whether each of the warpgroup's keys is one. parity: of the blocks of a work item,
// buffer: of all.
// Running maxima and powers seldom rise behind the first blocks: warps tell each other theirs only where one has to.
template <int N, int ROPE, bool RECORDS, bool BF16, bool LISTS>
MLA_DEVICE void weigh(
    float *s, float *sums, void *memory_at, int stage, void *rows_at, const int *limits, const uint8_t *valid,
    int first_key, bool ends, int parity, int buffer, int thread) {
  using S = Shape<N, ROPE, RECORDS>;
  uint8_t *memory = aligned(memory_at);
  Lane l = lane_of(thread);
  Rows<N> of_rows = Rows<N>::of(rows_at);
  int low = 16 * l.warp + own_key<N, RECORDS>(l.g), key = first_key + 64 * l.group + low;
  bool low_valid = !LISTS || valid[low], high_valid = !LISTS || valid[low + 8];
  float *known = of_rows.known + (4 * l.group + l.warp) * of_rows.KNOWN;
  float most[N / 4], sums_by[2] = {1.f, 1.f};
  bool rises = false;
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    int row = 8 * (i / 2) + 2 * l.t + i % 2;
    float factor = of_rows.factor[row], &x = s[4 * (i / 2) + i % 2], &y = s[4 * (i / 2) + 2 + i % 2];
    x *= factor, y *= factor;
    if (ends) x = key < limits[row] ? x : -INFINITY, y = key + 8 < limits[row] ? y : -INFINITY;
    x = low_valid ? x : -INFINITY, y = high_valid ? y : -INFINITY;
    most[i] = fmaxf(x, y);
    rises |= most[i] > known[row] + HEADROOM;
  }
  const uint8_t *own_scales = stage_of<N, ROPE, RECORDS>(memory_at, stage) + low * S::ROW + SCALES;
  float largest = 0.f, power_of_group = 1.f;
  if (S::GROUPED) {
    const float *of_low = reinterpret_cast<const float *>(own_scales), *of_high = of_low + 2 * S::ROW;
    largest = fmaxf(fabsf(of_low[l.t]), fabsf(of_high[l.t]));
    power_of_group = known[N + l.t];
    rises |= !(largest < power_of_group);
  }
  // Of all warps the first tells what accumulators are to be multiplied by.
  bool tells = l.g == 0 && l.group == 0 && l.warp == 0;
  float *rescales = of_rows.rescale + buffer * N;
  int own = own_row<N>(l);
  if (together(rises)) {
    over_keys<N>(most, [](float x, float y) { return fmaxf(x, y); }, l);
    // Who is late still reads those of the block before.
    float *by_warp = of_rows.seen + parity * 8 * N, *scales_seen = of_rows.scales_seen + 32 * parity;
    by_warp[8 * own + 4 * l.group + l.warp] = most[0], by_warp[8 * own + 8 + 4 * l.group + l.warp] = most[1];
    if (S::GROUPED) {
      largest = largest_scale(largest);
      if (l.g == 0) scales_seen[4 * (4 * l.group + l.warp) + l.t] = largest;
    }
    together();
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      int row = 8 * (i / 2) + 2 * l.t + i % 2;
      const float4 *seen = reinterpret_cast<const float4 *>(by_warp + 8 * row);
      float4 a = seen[0], b = seen[1];
      float of_all = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
      float highest = known[row], by = 1.f;
      if (of_all > highest + HEADROOM) by = power(highest - of_all), highest = of_all;
      read_by_warp();
      if (l.g == 0) known[row] = highest;
      if (tells) rescales[row] = by, of_rows.highest[row] = of_rows.highest[N + row] = highest;
      if (8 * (i / 2) == own - 2 * l.t) sums_by[i % 2] = by;
    }
    if (S::GROUPED) {
      float before = power_of_group;
      power_of_group = raised_power<N>(scales_seen, before, l);
      if (l.g == 0) known[N + l.t] = power_of_group;
      if (tells) of_rows.by_power[4 * buffer + l.t] = before * inverse(power_of_group);
    }
    read_by_warp();
  } else if (tells) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) rescales[8 * (i / 2) + 2 * l.t + i % 2] = 1.f;
    if (S::GROUPED) of_rows.by_power[4 * buffer + l.t] = 1.f;
  }
  float by_low[S::GROUPS], by_high[S::GROUPS];
  if (S::GROUPED) {
    float down = inverse(power_of_group);
#pragma unroll
    for (int i = 0; i < S::GROUPS; i++) {
      float by = __shfl_sync(~0u, down, (l.thread & 28) + i);
      by_low[i] = reinterpret_cast<const float *>(own_scales)[i] * by;
      by_high[i] = reinterpret_cast<const float *>(own_scales + 8 * S::ROW)[i] * by;
    }
  }
  // Where a key of the warp's 16 is among the columns of P: as values() has it.
  int column = 16 * l.warp + (S::GROUPED ? 2 * l.g : S::APART ? 2 * (l.g & 3) + (l.g >> 2) : own_key<N, RECORDS>(l.g));
  uint8_t *weights = memory + S::WEIGHTS + (2 * buffer + l.group) * S::GROUPS * S::CHUNK;
  float added[N / 4];
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int row = 8 * j + 2 * l.t + e;
      float lift = LIFT - known[row], x = power(s[4 * j + e] + lift), y = power(s[4 * j + 2 + e] + lift);
      added[2 * j + e] = x + y;
      if (S::GROUPED) {
#pragma unroll
        for (int i = 0; i < S::GROUPS; i++)
          *reinterpret_cast<uint32_t *>(weights + i * S::CHUNK + place(row, column)) = pack(x * by_low[i], y * by_high[i], false);
        continue;
      }
      uint32_t both = pack(x, y, RECORDS && BF16);
      *reinterpret_cast<uint16_t *>(weights + place(row, column)) = static_cast<uint16_t>(both);
      *reinterpret_cast<uint16_t *>(weights + place(row, column + 8)) = static_cast<uint16_t>(both >> 16);
    }
  }
  over_keys<N>(added, [](float x, float y) { return x + y; }, l);
  sums[0] = sums[0] * sums_by[0] + added[0], sums[1] = sums[1] * sums_by[1] + added[1];
  visible_to_mma();
}

// Accumulators follow the running maximum, and the powers of two of their groups.
template <int N, bool GROUPED> MLA_DEVICE void rescale(float *acc, void *rows_at, int buffer, int thread) {
  Lane l = lane_of(thread);
  const float *by = Rows<N>::of(rows_at).rescale + buffer * N + 2 * l.t;
  const float *by_power = Rows<N>::of(rows_at).by_power + 4 * buffer + 2 * l.group;
  float first = GROUPED ? by_power[0] : 1.f, second = GROUPED ? by_power[1] : 1.f;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float even = by[8 * j], odd = by[8 * j + 1];
    if (!__any_sync(~0u, even != 1.f || odd != 1.f || first != 1.f || second != 1.f)) continue;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m * N / 2 + 4 * j + i] *= (i % 2 ? odd : even) * (m < 2 ? first : second);
  }
}

// Where a thread's eight latents begin: side by side, or four of them in each of the warpgroup's two groups.
template <bool GROUPED> MLA_DEVICE int first_latent(Lane l) {
  return 256 * l.group + (GROUPED ? 32 * l.warp + 4 * l.g : 64 * l.warp + 8 * l.g);
}

// Of two keys side by side two elements, from an even one on: of each a pair. On an H200 the unit that converts e4m3 takes
// 0.92 of the time of integers, which take three instructions a pair.
MLA_DEVICE void widen_pairs(uint2 first, uint2 second, int element, uint32_t &pair, uint32_t &next) {
  uint32_t own = element < 4 ? first.x : first.y, other = element < 4 ? second.x : second.y;
  widen(permuted(own, other, element % 4 ? 0x7362 : 0x5140), pair, next);
}

// A thread's four keys of an MMA's 16, eight latents of each, and of records their scales if weights do not have them:
// there a warpgroup's products are of one group of latents each, of two one after the other.
template <int N, int ROPE, bool RECORDS> struct Fours {
  using S = Shape<N, ROPE, RECORDS>;
  static constexpr bool SCALED = RECORDS && !S::GROUPED;
  uint2 latents[4];
  float scales[SCALED ? 4 : 1];
  MLA_INLINE void load(const uint8_t *stage, int k, Lane l) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int own = S::GROUPED ? own_key<N, RECORDS>(l.t) + i / 2 + i % 2 * 8 : S::APART ? 4 * i + l.t : 2 * l.t + i % 2 + 8 * (i / 2);
      const uint8_t *key = stage + (16 * k + own) * S::ROW;
      int begin = first_latent<S::GROUPED>(l);
      if (S::GROUPED) {
        latents[i].x = *reinterpret_cast<const uint32_t *>(key + begin);
        latents[i].y = *reinterpret_cast<const uint32_t *>(key + begin + 128);
      } else
        latents[i] = *reinterpret_cast<const uint2 *>(key + begin);
      if (SCALED) scales[i] = reinterpret_cast<const float *>(key + SCALES)[begin / 128];
    }
  }
};

// acc [latent, row] of a warpgroup's 256 latents over a block, whose keys are in two stages and whose weights are one of
// two. A stage is free as soon as its keys are in registers.
template <int N, int ROPE, bool RECORDS, bool BF16, class Barrier>
MLA_DEVICE void values(
    float *acc, void *memory_at, int first, int second, int buffer, Barrier &first_empty, Barrier &second_empty,
    int thread) {
  using S = Shape<N, ROPE, RECORDS>;
  Lane l = lane_of(thread);
  const uint8_t *stages[2] = {stage_of<N, ROPE, RECORDS>(memory_at, first), stage_of<N, ROPE, RECORDS>(memory_at, second)};
  uint64_t weights = uniform(operand(aligned(memory_at) + S::WEIGHTS + 2 * buffer * S::GROUPS * S::CHUNK));
  if (S::GROUPED) weights = advanced(weights, 2 * l.group * S::CHUNK);
  uint32_t a[S::OPERANDS][16];
  Fours<N, ROPE, RECORDS> keys[2];
  auto load = [&](int k) { keys[k % 2].load(stages[k / 4], k % 4, l); };
  if (S::AHEAD) load(0);
#pragma unroll
  for (int k = 0; k < 8; k++) {
    if (!S::AHEAD) load(k);
    if (S::AHEAD && k < 7) load(k + 1);
    const Fours<N, ROPE, RECORDS> &here = keys[k % 2];
    uint32_t *own = a[k % S::OPERANDS];
    // The products that read these registers are done.
    if (k >= S::OPERANDS) await_products<S::OPERANDS - 1>();
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        uint32_t *pairs = own + 4 * m + i;
        widen_pairs(here.latents[i], here.latents[i + 1], 2 * m, pairs[0], pairs[1]);
        if (here.SCALED)
          for (int j = 0; j < 2; j++) pairs[j] = scaled<BF16>(pairs[j], here.scales[i], here.scales[i + 1]);
      }
    if (k % 4 == 3) arrive(k < 4 ? first_empty : second_empty, thread);
    begin_products();
#pragma unroll
    for (int m = 0; m < TILES; m++)
      multiply<N, here.SCALED && BF16>(
          own + 4 * m, advanced(weights, (k / 4 * S::GROUPS + (S::GROUPED ? m / 2 : 0)) * S::CHUNK + 32 * (k % 4)),
          acc + m * N / 2, true);
    commit_products();
  }
  await_products<0>();
  keep<2 * N>(acc);
}

// Sums of all keys, and the logarithm that they are relative to. parity: of the block behind the last, slot: of the item.
template <int N, bool GROUPED> MLA_DEVICE void total(const float *sums, void *rows_at, int parity, int slot, int thread) {
  Lane l = lane_of(thread);
  Rows<N> of_rows = Rows<N>::of(rows_at);
  int own = own_row<N>(l);
  float *by_warp = of_rows.seen + parity * 8 * N;
  for (int e = 0; e < 2; e++) by_warp[8 * (own + e) + 4 * l.group + l.warp] = sums[e];
  together();
  if (thread < N) {
    float sum = 0.f;
    for (int warp = 0; warp < 8; warp++) sum += by_warp[8 * thread + warp];
    of_rows.log_of[slot * N + thread] = of_rows.highest[parity * N + thread] - LIFT;
    of_rows.sum[slot * N + thread] = sum;
    if (GROUPED && thread < 4) of_rows.last_power[4 * slot + thread] = of_rows.known[N + thread];
  }
}

// The sum of a row's weights, with that of its sink if sinks are given, which is relative to a logarithm.
MLA_DEVICE float with_sink(float sum, float log_of, const void *sinks, int given, int row) {
  if (!given || sum == 0.f) return sum;
  return sum + power(static_cast<const float *>(sinks)[row] * 1.4426950408889634f - log_of);
}

// A thread's elements of a row, of q's dtype.
template <bool GROUPED, bool BF16> MLA_DEVICE void store_row(uint16_t *to, const float *x) {
  uint2 low = make_uint2(pack(x[0], x[1], BF16), pack(x[2], x[3], BF16));
  uint2 high = make_uint2(pack(x[4], x[5], BF16), pack(x[6], x[7], BF16));
  if (GROUPED)
    *reinterpret_cast<uint2 *>(to) = low, *reinterpret_cast<uint2 *>(to + 128) = high;
  else
    *reinterpret_cast<uint4 *>(to) = make_uint4(low.x, low.y, high.x, high.y);
}

// Rows of a work item, each by its sum: of q's dtype, or partial results. Sinks count where they are given.
template <int N, bool GROUPED, bool BF16, bool PART>
MLA_DEVICE void store(
    const float *acc, void *rows_at, int slot, void *out, int64_t stride, int rows, float scale, const void *sinks,
    int given, int first_row, int thread) {
  Lane l = lane_of(thread);
  const float *log_of = Rows<N>::of(rows_at).log_of + slot * N, *sums = Rows<N>::of(rows_at).sum + slot * N;
  const float *powers = Rows<N>::of(rows_at).last_power + 4 * slot + 2 * l.group;
  float first = GROUPED ? powers[0] : 1.f, second = GROUPED ? powers[1] : 1.f;
  int begin = first_latent<GROUPED>(l);
  constexpr int APART = GROUPED ? 128 : 4;
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    int row = 8 * (i / 2) + 2 * l.t + i % 2;
    if (row >= rows) continue;
    float sum = with_sink(sums[row], log_of[row], sinks, given, first_row + row);
    float by = sum == 0.f ? 0.f : scale / sum, x[2 * TILES];
#pragma unroll
    for (int m = 0; m < 2 * TILES; m++) x[m] = acc[m / 2 * N / 2 + 4 * (i / 2) + i % 2 + m % 2 * 2] * by * (m < 4 ? first : second);
    if (PART) {
      float *to = static_cast<float *>(out) + row * stride + begin;
      *reinterpret_cast<float4 *>(to) = make_float4(x[0], x[1], x[2], x[3]);
      *reinterpret_cast<float4 *>(to + APART) = make_float4(x[4], x[5], x[6], x[7]);
    } else {
      store_row<GROUPED, BF16>(static_cast<uint16_t *>(out) + row * stride + begin, x);
    }
  }
}

// Two programs of a cluster that have the parts of a list. Each has the result of half of the latents, a warpgroup's.

// Of a row of both parts: what this one's weights are multiplied by, the logarithm that sums are relative to then, the sum.
struct Joined {
  float own, log_of, sum;
};
template <int N> MLA_DEVICE Joined joined(void *rows_at, int slot, int row) {
  const float *log_of = Rows<N>::of(rows_at).log_of + slot * N + row, *sum = Rows<N>::of(rows_at).sum + slot * N + row;
  float other = load_other(log_of), highest = fmaxf(*log_of, other), own = power(*log_of - highest);
  return {own, highest, *sum * own + load_other(sum) * power(other - highest)};
}
template <int N> MLA_DEVICE float joined_log(void *rows_at, int slot, int row) { return joined<N>(rows_at, slot, row).log_of; }
template <int N> MLA_DEVICE float joined_sum(void *rows_at, int slot, int row) { return joined<N>(rows_at, slot, row).sum; }

// The half that the other program has goes to its stages, which have been read. by: what rows of the result are
// multiplied by.
template <int N, int ROPE, bool RECORDS>
MLA_DEVICE void give_half(
    float *acc, float *by, void *memory, void *rows_at, int slot, int rows, float scale, const void *sinks, int given,
    int first_row, int thread) {
  using S = Shape<N, ROPE, RECORDS>;
  Lane l = lane_of(thread);
  const float *powers = Rows<N>::of(rows_at).last_power + 4 * slot + 2 * l.group;
  float first = S::GROUPED ? powers[0] : 1.f, second = S::GROUPED ? powers[1] : 1.f;
  Place to = of_other(stage_of<N, ROPE, RECORDS>(memory, 0)) + 16 * (thread & 127);
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    int row = 8 * (i / 2) + 2 * l.t + i % 2;
    Joined both = joined<N>(rows_at, slot, row);
    float sum = row < rows ? with_sink(both.sum, both.log_of, sinks, given, first_row + row) : 0.f;
    by[i] = sum == 0.f ? 0.f : scale / sum;
#pragma unroll
    for (int m = 0; m < 2 * TILES; m++)
      acc[m / 2 * N / 2 + 4 * (i / 2) + i % 2 + m % 2 * 2] *= both.own * (m < 4 ? first : second);
  }
  if (l.group == own_rank()) return;
#pragma unroll
  for (int i = 0; i < N / 2; i++) give(to + 2048 * i, acc + 4 * i);
}
template <int N, int ROPE, bool RECORDS, bool BF16>
MLA_DEVICE void store_half(
    const float *acc, const float *by, void *memory, void *out, int64_t stride, int rows, int thread) {
  using S = Shape<N, ROPE, RECORDS>;
  Lane l = lane_of(thread);
  if (l.group != own_rank()) return;
  const float4 *given = reinterpret_cast<const float4 *>(stage_of<N, ROPE, RECORDS>(memory, 0)) + (thread & 127);
  uint16_t *to = static_cast<uint16_t *>(out) + first_latent<S::GROUPED>(l);
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float x[2][2 * TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      float4 other = given[128 * (m * N / 8 + j)];
      const float *own = acc + m * N / 2 + 4 * j;
      x[0][2 * m] = own[0] + other.x, x[1][2 * m] = own[1] + other.y;
      x[0][2 * m + 1] = own[2] + other.z, x[1][2 * m + 1] = own[3] + other.w;
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int row = 8 * j + 2 * l.t + e;
#pragma unroll
      for (int m = 0; m < 2 * TILES; m++) x[e][m] *= by[2 * j + e];
      if (row < rows) store_row<S::GROUPED, BF16>(to + row * stride, x[e]);
    }
  }
}
// A key that is none: zeros.
template <int N, int ROPE, bool RECORDS> MLA_DEVICE void zero_key(void *memory, int stage, int key) {
  using S = Shape<N, ROPE, RECORDS>;
  uint4 *row = reinterpret_cast<uint4 *>(stage_of<N, ROPE, RECORDS>(memory, stage) + key * S::ROW);
  for (int i = 0; i < S::ROW / 16; i++) row[i] = make_uint4(0, 0, 0, 0);
  visible_to_mma();
}

// Keys side by side, from one of the stage's on.
template <int N, int ROPE, bool RECORDS, class Barrier>
MLA_DEVICE void load_keys(void *memory, int stage, int key, const void *from, int keys, Barrier &barrier) {
  using S = Shape<N, ROPE, RECORDS>;
  copy(stage_of<N, ROPE, RECORDS>(memory, stage) + key * S::ROW, from, keys * S::ROW, barrier);
}

}  // namespace mla

#endif
