// Behind weights_of_keys.cuh: values by their weights, and what rows end with and where it is stored.

#ifndef MLA_VALUES_OF_KEYS
#define MLA_VALUES_OF_KEYS

namespace mla {

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
template <int N, bool GROUPED>
MLA_DEVICE void give_half_to(
    void *stages, float *acc, float *by, void *rows_at, int slot, int rows, float scale, const void *sinks, int given,
    int first_row, int thread) {
  Lane l = lane_of(thread);
  const float *powers = Rows<N>::of(rows_at).last_power + 4 * slot + 2 * l.group;
  float first = GROUPED ? powers[0] : 1.f, second = GROUPED ? powers[1] : 1.f;
  Place to = of_other(stages) + 16 * (thread & 127);
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
template <int N, bool GROUPED, bool BF16>
MLA_DEVICE void store_half_from(
    const void *stages, const float *acc, const float *by, void *out, int64_t stride, int rows, int thread) {
  Lane l = lane_of(thread);
  if (l.group != own_rank()) return;
  const float4 *given = static_cast<const float4 *>(stages) + (thread & 127);
  uint16_t *to = static_cast<uint16_t *>(out) + first_latent<GROUPED>(l);
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
      if (row < rows) store_row<GROUPED, BF16>(to + row * stride, x[e]);
    }
  }
}
template <int N, int ROPE, bool RECORDS>
MLA_DEVICE void give_half(
    float *acc, float *by, void *memory, void *rows_at, int slot, int rows, float scale, const void *sinks, int given,
    int first_row, int thread) {
  give_half_to<N, Shape<N, ROPE, RECORDS>::GROUPED>(
      stage_of<N, ROPE, RECORDS>(memory, 0), acc, by, rows_at, slot, rows, scale, sinks, given, first_row, thread);
}
template <int N, int ROPE, bool RECORDS, bool BF16>
MLA_DEVICE void store_half(
    const float *acc, const float *by, void *memory, void *out, int64_t stride, int rows, int thread) {
  store_half_from<N, Shape<N, ROPE, RECORDS>::GROUPED, BF16>(
      stage_of<N, ROPE, RECORDS>(memory, 0), acc, by, out, stride, rows, thread);
}

}  // namespace mla

#endif
