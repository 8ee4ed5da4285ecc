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
#define MLA_DEVICE static __device__ __forceinline__
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

// The i-th of the N / 4 rows of which a thread has scores or sums.
MLA_DEVICE int row_of(Lane l, int i) { return 8 * (i / 2) + 2 * l.t + i % 2; }

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
