// Behind rows_of_keys.cuh and what belongs to it: records as the rows of WGMMA for 64 rows of q, its columns.
//
// A block is one stage of 64 keys. A warpgroup makes its weights, two more multiply half of the latents each. All widen
// e4m3 to float16 in registers, and multiply it by scales there, two by two: what is scored by a scale over a power of
// two above all four of its key, values by one over a power above those of its group so far. The former is in scores
// until they are weighed, the latter in accumulators; both keep 11 bits of a scale, where bfloat16 has 8 of a product.

#ifndef MLA_RECORDS
#define MLA_RECORDS

namespace mla::records {

// Rows of q, its chunks of 64 elements, of which the last are ropes; registers that products of scores are still reading.
constexpr int N = 64, CHUNKS = 9, WIDENED = 8, CHUNK = N * 128, ROW = 656, STAGE = KEYS * ROW, SLOTS = 4;
// Bytes of a row of q.
constexpr int OF_Q = 128 * CHUNKS;
// Behind q, weights of two blocks, scales of two blocks, and the stages.
constexpr int WEIGHTS = CHUNKS * CHUNK, SCALED = WEIGHTS + 2 * CHUNK, OF_SCALES = 512, RAW = SCALED + 2 * OF_SCALES;

#ifndef MLA_ON_HOST
// The warpgroup that makes weights, and whether something holds for any of its threads.
MLA_DEVICE void of_weights() { asm volatile("bar.sync 5, 128;" ::: "memory"); }
MLA_DEVICE bool of_weights(bool own) {
  int any;
  asm volatile("{.reg .pred o, a; setp.ne.s32 o, %1, 0; barrier.cta.red.or.pred a, 5, 128, o; selp.s32 %0, 1, 0, a;}"
               : "=r"(any) : "r"(int(own)) : "memory");
  return any;
}
// Of two pairs.
template <bool BF16 = false> MLA_DEVICE uint32_t product(uint32_t x, uint32_t y) {
  uint32_t both;
  if (BF16)
    asm("{.reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 %0, %1, %2, z;}" : "=r"(both) : "r"(x), "r"(y));
  else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(x), "r"(y));
  return both;
}
#endif

MLA_DEVICE uint8_t *stage_of(void *memory, int stage) { return aligned(memory) + RAW + stage * STAGE; }
MLA_DEVICE int key_of(int g) { return own_key<16, true>(g); }
// A power of two above a number, but none so small that ropes over it would not be numbers.
MLA_DEVICE float power_above(float x) {
  return __uint_as_float(min(max((__float_as_uint(x) >> 23) + 1, 87u), 253u) << 23);
}
// The power of two above all scales of a key.
MLA_DEVICE float power_of_key(const uint8_t *scales) {
  float4 x = *reinterpret_cast<const float4 *>(scales);
  return power_above(fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
}

MLA_DEVICE void zero_key(void *memory, int stage, int key) {
  uint4 *row = reinterpret_cast<uint4 *>(stage_of(memory, stage) + key * ROW);
  for (int i = 0; i < ROW / 16; i++) row[i] = make_uint4(0, 0, 0, 0);
  visible_to_mma();
}
template <class Barrier>
MLA_DEVICE void load_keys(void *memory, int stage, int key, const void *from, int keys, Barrier &barrier) {
  copy(stage_of(memory, stage) + key * ROW, from, keys * ROW, barrier);
}

// A row of q as it is, to a stage of 32.
template <class Barrier> MLA_DEVICE void load_row(void *memory, int stage, int n, const void *row, Barrier &barrier) {
  copy(stage_of(memory, stage) + n * OF_Q, row, OF_Q, barrier);
}

// Of two stages that only one of three warpgroups reads: a warp's arrivals for all of them.
template <class Barrier> MLA_DEVICE void free(Barrier &low, Barrier &high, int thread) {
  for (int i = 0; i < 3; i++) arrive(low, thread), arrive(high, thread);
}

// As mla::load_q, by one warpgroup, of rows that are in two stages: ropes, too, are times a row's power of two.
template <bool BF16>
MLA_DEVICE void lift_q(void *memory_at, void *rows_at, int low, int high, int rows, float scale, int thread) {
  uint8_t *memory = aligned(memory_at);
  constexpr int TEAM = 8;
  Rows<N> of_rows = Rows<N>::of(rows_at);
  int own = thread % TEAM;
#pragma unroll 1
  for (int n = thread / TEAM; n < N; n += 128 / TEAM) {
    bool there = n < rows;
    const uint4 *row = reinterpret_cast<const uint4 *>(stage_of(memory_at, n < 32 ? low : high) + n % 32 * OF_Q) + own;
    uint2 fours[CHUNKS][2];
    float x[4], most = 0.f;
    // A team reads and writes other banks than those of its warp beside it.
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      uint4 eight = row[TEAM * c];
      fours[c][0] = make_uint2(eight.x, eight.y), fours[c][1] = make_uint2(eight.z, eight.w);
    }
#pragma unroll
    for (int i = 0; i < 2 * WIDENED; i++) {
      unpack<BF16>(fours[i / 2][i % 2], x);
#pragma unroll
      for (int j = 0; j < 4; j++) most = fmaxf(most, fabsf(x[j]));
    }
#pragma unroll
    for (int step = 1; step < TEAM; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    int exponent = (__float_as_uint(most) >> 23) & 255;
    int lift = exponent == 0 || exponent == 255 ? 127 : min(max(268 - exponent, 1), 253);
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; i++) {
      // Of a chunk's fours; of ropes 8 elements come at a time.
      int c = i / 2, t = own / 2, s = 2 * (own % 2) + i % 2;
      if (c >= WIDENED) t = own % 4, s = 2 * (own / 4) + i % 2;
      unpack<BF16>(fours[c][i % 2], x);
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = there ? x[j] * __uint_as_float(lift << 23) : 0.f;
      uint8_t *chunk = memory + c * CHUNK;
      *reinterpret_cast<uint32_t *>(chunk + place(n, 16 * s + 2 * t)) = pack(x[0], x[1], BF16 && c >= WIDENED);
      *reinterpret_cast<uint32_t *>(chunk + place(n, 16 * s + 2 * t + 8)) = pack(x[2], x[3], BF16 && c >= WIDENED);
    }
    if (own == 0) {
      of_rows.highest[n] = of_rows.highest[N + n] = FLOOR;
#pragma unroll
      for (int warp = 0; warp < 4; warp++) {
        of_rows.known[warp * of_rows.KNOWN + n] = FLOOR;
        if (n < 4) of_rows.known[warp * of_rows.KNOWN + N + n] = 0.f;
      }
      of_rows.unlift[n] = __uint_as_float((254 - lift) << 23) * scale;
    }
  }
  visible_to_mma();
}

// Scores of 64 keys, [key, row], in which q's lift is still, and over the powers of a thread's two keys, which are ``up``.
template <bool BF16> MLA_DEVICE void scores(float *s, float *up, void *memory_at, int stage, int thread) {
  const uint8_t *memory = aligned(memory_at);
  Lane l = lane_of(thread);
  const uint8_t *low = stage_of(memory_at, stage) + (16 * l.warp + key_of(l.g)) * ROW, *high = low + 8 * ROW;
  const uint8_t *own_low = low + 16 * l.t, *own_high = high + 16 * l.t;
  uint64_t q = uniform(operand(memory));
  uint32_t a[SLOTS][4];
  uint4 x = *reinterpret_cast<const uint4 *>(own_low), y = *reinterpret_cast<const uint4 *>(own_high);
  up[0] = power_of_key(low + SCALES), up[1] = power_of_key(high + SCALES);
  float down_low = inverse(up[0]), down_high = inverse(up[1]);
  uint32_t by_low = 0, by_high = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const uint32_t of_low[4] = {x.x, x.y, x.z, x.w}, of_high[4] = {y.x, y.y, y.z, y.w};
    if (c + 1 < CHUNKS) {
      int next = c + 1 < WIDENED ? 64 * (c + 1) : ROPES;
      x = *reinterpret_cast<const uint4 *>(own_low + next), y = *reinterpret_cast<const uint4 *>(own_high + next);
    } else {
      x = *reinterpret_cast<const uint4 *>(own_low + ROPES + 64);
      y = *reinterpret_cast<const uint4 *>(own_high + ROPES + 64);
    }
    if (c % 2 == 0) {
      float of_low = down_low, of_high = down_high;
      if (c < WIDENED) {
        of_low *= reinterpret_cast<const float *>(low + SCALES)[c / 2];
        of_high *= reinterpret_cast<const float *>(high + SCALES)[c / 2];
      }
      by_low = pack(of_low, of_low, BF16 && c >= WIDENED), by_high = pack(of_high, of_high, BF16 && c >= WIDENED);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      uint32_t *own = a[(4 * c + k) % SLOTS];
      // The product that reads these registers is done.
      if (4 * c + k >= SLOTS) await_products<SLOTS - 1>();
      if (c < WIDENED) {
        widen(of_low[k], own[0], own[2]), widen(of_high[k], own[1], own[3]);
        own[0] = product(own[0], by_low), own[2] = product(own[2], by_low);
        own[1] = product(own[1], by_high), own[3] = product(own[3], by_high);
      } else {
        // Eight elements of a thread are two pairs of an MMA, and two of the next.
        uint32_t of_ropes[8] = {of_low[0], of_low[1], of_low[2], of_low[3], x.x, x.y, x.z, x.w};
        uint32_t of_others[8] = {of_high[0], of_high[1], of_high[2], of_high[3], y.x, y.y, y.z, y.w};
        own[0] = product<BF16>(of_ropes[2 * k], by_low), own[2] = product<BF16>(of_ropes[2 * k + 1], by_low);
        own[1] = product<BF16>(of_others[2 * k], by_high), own[3] = product<BF16>(of_others[2 * k + 1], by_high);
      }
      begin_products();
      if (c < WIDENED) multiply<N, false>(own, advanced(q, c * CHUNK + 32 * k), s, k > 0 || c > 0);
      else multiply<N, BF16>(own, advanced(q, c * CHUNK + 32 * k), s, true);
      commit_products();
    }
  }
  await_products<0>();
  keep<N / 2>(s);
}

// Of a thread's 16 rows, N / 4, those of all keys of a warp, in all of its threads.
template <class Combine> MLA_DEVICE void of_all_keys(float *x, Combine combine) {
#pragma unroll
  for (int i = 0; i < N / 4; i++)
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x[i] = combine(x[i], __shfl_xor_sync(~0u, x[i], step));
}

// Scores to weights, as mla::weigh; sums are of a thread's own keys.
template <bool LISTS>
MLA_DEVICE void weigh(
    float *s, const float *up, float *sums, void *memory_at, int stage, void *rows_at, const int *limits,
    const uint8_t *valid, int first_key, bool ends, int parity, int buffer, int thread) {
  uint8_t *memory = aligned(memory_at);
  Lane l = lane_of(thread);
  Rows<N> of_rows = Rows<N>::of(rows_at);
  int low = 16 * l.warp + key_of(l.g), key = first_key + low;
  float *known = of_rows.known + l.warp * of_rows.KNOWN;
  const uint8_t *own_scales = stage_of(memory_at, stage) + low * ROW + SCALES;
  float own_low = reinterpret_cast<const float *>(own_scales)[l.t];
  float own_high = reinterpret_cast<const float *>(own_scales + 8 * ROW)[l.t];
  bool low_valid = !LISTS || valid[low], high_valid = !LISTS || valid[low + 8], rises = false;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float2 lift = *reinterpret_cast<const float2 *>(of_rows.unlift + 8 * j + 2 * l.t);
    float2 before = *reinterpret_cast<const float2 *>(known + 8 * j + 2 * l.t);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int row = 8 * j + 2 * l.t + e;
      float factor = e ? lift.y : lift.x, &x = s[4 * j + e], &y = s[4 * j + 2 + e];
      x *= factor * up[0], y *= factor * up[1];
      if (!LISTS && ends) x = key < limits[row] ? x : -INFINITY, y = key + 8 < limits[row] ? y : -INFINITY;
      if (LISTS) x = low_valid ? x : -INFINITY, y = high_valid ? y : -INFINITY;
      rises |= fmaxf(x, y) > (e ? before.y : before.x) + HEADROOM;
    }
  }
  float largest = fmaxf(fabsf(own_low), fabsf(own_high));
  float power_of_group = known[N + l.t];
  rises |= !(largest < power_of_group);
  bool tells = l.g == 0 && l.warp == 0;
  float *rescales = of_rows.rescale + buffer * N;
  if (of_weights(rises)) {
    float *by_warp = of_rows.seen + parity * 8 * N, *scales_seen = of_rows.scales_seen + 32 * parity;
    float most[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; i++) most[i] = fmaxf(s[4 * (i / 2) + i % 2], s[4 * (i / 2) + 2 + i % 2]);
    of_all_keys(most, [](float x, float y) { return fmaxf(x, y); });
    largest = largest_scale(largest);
    if (l.g == 0) {
      scales_seen[4 * l.warp + l.t] = largest, scales_seen[16 + 4 * l.warp + l.t] = largest;
#pragma unroll
      for (int i = 0; i < N / 4; i++) by_warp[4 * (8 * (i / 2) + 2 * l.t + i % 2) + l.warp] = most[i];
    }
    of_weights();
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      int row = 8 * (i / 2) + 2 * l.t + i % 2;
      float4 a = *reinterpret_cast<const float4 *>(by_warp + 4 * row);
      float of_all = fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), highest = known[row], by = 1.f;
      if (of_all > highest + HEADROOM) by = power(highest - of_all), highest = of_all;
      read_by_warp();
      if (l.g == 0) known[row] = highest;
      sums[i] *= by;
      if (tells) rescales[row] = by, of_rows.highest[row] = of_rows.highest[N + row] = highest;
    }
    float before = power_of_group;
    power_of_group = raised_power<N>(scales_seen, before, l);
    if (l.g == 0) known[N + l.t] = power_of_group;
    if (tells) of_rows.by_power[4 * buffer + l.t] = before * inverse(power_of_group);
    read_by_warp();
  } else if (tells) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) rescales[8 * (i / 2) + 2 * l.t + i % 2] = 1.f;
    of_rows.by_power[4 * buffer + l.t] = 1.f;
  }
  float down = inverse(power_of_group);
  uint32_t *scaled = reinterpret_cast<uint32_t *>(memory + SCALED + buffer * OF_SCALES);
  scaled[(l.warp * 8 + l.g) * 4 + l.t] = pack(own_low * down, own_high * down, false);
  uint8_t *weights = memory + WEIGHTS + buffer * CHUNK;
  int column = 16 * l.warp + 2 * l.g;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float2 here = *reinterpret_cast<const float2 *>(known + 8 * j + 2 * l.t);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int row = 8 * j + 2 * l.t + e;
      float lift = LIFT - (e ? here.y : here.x), x = power(s[4 * j + e] + lift), y = power(s[4 * j + 2 + e] + lift);
      sums[2 * j + e] += x + y;
      *reinterpret_cast<uint32_t *>(weights + place(row, column)) = pack(x, y, false);
    }
  }
  visible_to_mma();
}

MLA_DEVICE void total(float *sums, void *rows_at, int parity, int slot, int thread) {
  Lane l = lane_of(thread);
  Rows<N> of_rows = Rows<N>::of(rows_at);
  float *by_warp = of_rows.seen + parity * 8 * N;
  of_all_keys(sums, [](float x, float y) { return x + y; });
  if (l.g == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) by_warp[4 * (8 * (i / 2) + 2 * l.t + i % 2) + l.warp] = sums[i];
  }
  of_weights();
  if (thread < N) {
    float4 x = *reinterpret_cast<const float4 *>(by_warp + 4 * thread);
    of_rows.log_of[slot * N + thread] = of_rows.highest[parity * N + thread] - LIFT;
    of_rows.sum[slot * N + thread] = x.x + x.y + x.z + x.w;
    if (thread < 4) of_rows.last_power[4 * slot + thread] = of_rows.known[N + thread];
  }
}

// acc [latent, row] of a warpgroup's 256 latents over a block.
template <class Barrier>
MLA_DEVICE void values(float *acc, void *memory_at, int stage, int buffer, Barrier &empty, int thread) {
  Lane l = lane_of(thread);
  const uint8_t *memory = aligned(memory_at);
  const uint8_t *raw = stage_of(memory_at, stage) + key_of(l.t) * ROW + 256 * l.group + 32 * l.warp + 4 * l.g;
  const uint8_t *scales = memory + SCALED + buffer * OF_SCALES + l.t * 16 + l.group * 8;
  uint64_t weights = uniform(operand(memory + WEIGHTS + buffer * CHUNK));
  uint32_t a[16];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    uint2 keys[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint8_t *key = raw + (16 * k + i / 2 + i % 2 * 8) * ROW;
      keys[i].x = *reinterpret_cast<const uint32_t *>(key), keys[i].y = *reinterpret_cast<const uint32_t *>(key + 128);
    }
    const uint2 by[2] = {
        *reinterpret_cast<const uint2 *>(scales + k * 128), *reinterpret_cast<const uint2 *>(scales + k * 128 + 64)};
    if (k == 3) arrive(empty, thread);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      uint32_t *own = a + 4 * m;
      // The product that reads these registers is done.
      if (k > 0) await_products<TILES - 1>();
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        widen_pairs(keys[i], keys[i + 1], 2 * m, own[i], own[i + 1]);
        uint32_t scale = m < 2 ? by[i / 2].x : by[i / 2].y;
        own[i] = product(own[i], scale), own[i + 1] = product(own[i + 1], scale);
      }
      begin_products();
      multiply<N, false>(own, advanced(weights, 32 * k), acc + m * N / 2, true);
      commit_products();
    }
  }
  await_products<0>();
  keep<2 * N>(acc);
}

// Of two programs that have the parts of a list, as mla::give_half and mla::store_half.
MLA_DEVICE void give_half(
    float *acc, float *by, void *memory, void *rows_at, int slot, int rows, float scale, const void *sinks, int given,
    int first_row, int thread) {
  give_half_to<N, true>(
      stage_of(memory, 0), acc, by, rows_at, slot, rows, scale, sinks, given, first_row, thread);
}
template <bool BF16>
MLA_DEVICE void store_half(
    const float *acc, const float *by, void *memory, void *out, int64_t stride, int rows, int thread) {
  store_half_from<N, true, BF16>(stage_of(memory, 0), acc, by, out, stride, rows, thread);
}

}  // namespace mla::records

#endif
