// Behind rows_of_keys.cuh: the scores of a block's keys, and the weights that they become.

#ifndef MLA_WEIGHTS_OF_KEYS
#define MLA_WEIGHTS_OF_KEYS

namespace mla {

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

// Of each of its N / 4 rows a thread has the scores of two keys, the second's two numbers behind the first's.
MLA_DEVICE float *scores_of(float *s, int i) { return s + 4 * (i / 2) + i % 2; }
MLA_DEVICE void multiply_both(float *two, float by) { two[0] *= by, two[2] *= by; }
// What is no key, or not seen by the row, has no weight.
MLA_DEVICE void mask(float *two, bool first, bool second) {
  two[0] = first ? two[0] : -INFINITY, two[2] = second ? two[2] : -INFINITY;
}
MLA_DEVICE float larger_of(const float *two) { return fmaxf(two[0], two[2]); }

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

// Each warp tells the highest of its keys of each row, in by_warp [row, warp].
template <int N> MLA_DEVICE void tell_highest(float *by_warp, float *most, Lane l) {
  over_keys<N>(most, [](float x, float y) { return fmaxf(x, y); }, l);
  int own = own_row<N>(l);
  by_warp[8 * own + 4 * l.group + l.warp] = most[0], by_warp[8 * own + 8 + 4 * l.group + l.warp] = most[1];
}
// The highest of a row's, of all warps.
MLA_DEVICE float highest_of(const float *by_warp, int row) {
  const float4 *seen = reinterpret_cast<const float4 *>(by_warp + 8 * row);
  float4 a = seen[0], b = seen[1];
  return fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
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
    int row = row_of(l, i);
    float *two = scores_of(s, i);
    multiply_both(two, of_rows.factor[row]);
    if (ends) mask(two, key < limits[row], key + 8 < limits[row]);
    mask(two, low_valid, high_valid);
    most[i] = larger_of(two);
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
    // Who is late still reads those of the block before.
    float *by_warp = of_rows.seen + parity * 8 * N, *scales_seen = of_rows.scales_seen + 32 * parity;
    tell_highest<N>(by_warp, most, l);
    if (S::GROUPED) {
      largest = largest_scale(largest);
      if (l.g == 0) scales_seen[4 * (4 * l.group + l.warp) + l.t] = largest;
    }
    together();
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      int row = row_of(l, i);
      float of_all = highest_of(by_warp, row), highest = known[row], by = 1.f;
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
    for (int i = 0; i < N / 4; i++) rescales[row_of(l, i)] = 1.f;
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

}  // namespace mla

#endif
