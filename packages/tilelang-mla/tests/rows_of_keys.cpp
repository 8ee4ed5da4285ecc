// rows_of_keys.cuh, what is behind it, and narrow.cuh on a CPU: 512 threads, WGMMA by its definition of fragments and
// swizzles, beside float64.
// Prints what was run, the largest error of a row relative to its largest value, and that of lse.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

constexpr int THREADS = 512, MAKING_WEIGHTS = 256;
#include "products.h"

namespace mla {
namespace narrow {
static uint32_t nearest(float x, float y) { return to_e4m3(x) | to_e4m3(y) << 8; }
static float2 widened(uint32_t both) { return {of_e4m3(both & 255), of_e4m3(both >> 8)}; }

// m64nNk32: columns 4 t to 4 t + 3, and those 16 behind.
template <int N> void multiply(const uint32_t *a, uint64_t b, float *c, bool add) {
  memcpy(operands[own], a, 16);
  groups[own / 128].arrive_and_wait();
  for (int i = 0; i < N / 2; i++) {
    int n = 8 * (i / 4) + 2 * (own & 3) + i % 2, lower = i % 4 / 2;
    float terms[32];
    for (int k = 0; k < 32; k++) {
      uint32_t four = operands[(own & ~3) + k % 16 / 4][lower + 2 * (k / 16)];
      uint64_t at = b + n * 128 + k;
      at ^= (at >> 7 & 7) << 4;
      terms[k] = of_e4m3(four >> 8 * (k % 4) & 255) * of_e4m3(*reinterpret_cast<const uint8_t *>(at));
    }
    c[i] = cut_sum(terms, add ? c[i] : 0, OF_8_BITS);
  }
  groups[own / 128].arrive_and_wait();
}
}  // namespace narrow
}  // namespace mla

#include "rows_of_keys.cuh"
#include "weights_of_keys.cuh"
#include "values_of_keys.cuh"

#include "narrow.cuh"

static std::mt19937 numbers(7);
// NaN is as far off as can be.
static double off(double want, double got) { return std::isnan(got) ? INFINITY : fabs(got - want); }
static float normal() { return std::normal_distribution<float>()(numbers); }

// The first ``large`` latents are multiplied by large elements of q and cancel, and are not looked at as values.
// JOINED: two programs have half of the blocks each.
template <int N, int ROPE, bool RECORDS, bool BF16, bool LISTS, bool NARROW = false, bool JOINED = false>
void run(const char *name, int keys, int rows, bool part, int large = 0) {
  using S = mla::Shape<N, ROPE, RECORDS>;
  constexpr int WIDTH = 512 + ROPE;
  constexpr float SCALE = 0.5f, OF_CACHE = RECORDS ? 1.f : 0.04f, SINK = 0.5f;
  constexpr float BY = RECORDS ? 1.f : OF_CACHE;
  auto wide = [](uint16_t x) { return BF16 ? of_bfloat16(x) : of_half(x); };
  int blocks = (keys + 127) / 128, stages = 2 * blocks;
  numbers.seed(7);
  std::vector<uint16_t> q(rows * WIDTH), out(rows * 512);
  // Rows of unlike size.
  for (size_t i = 0; i < q.size(); i++) q[i] = mla::pack(normal() * exp2f(i / WIDTH % 3 - 1.f), 0, BF16);
  for (int i = 0; i < rows * large; i++) q[i / large * WIDTH + i % large] = mla::pack(32, 0, BF16);
  std::vector<float> parts(rows * 512), sinks(rows, SINK), of_rows(84 * N);
  std::vector<uint8_t> valid(stages * 64);
  std::vector<int> limits(N);
  std::vector<std::vector<double>> exact(keys, std::vector<double>(WIDTH));
  size_t bytes = (S::RAW + size_t(stages) * S::STAGE + 2047) / 1024 * 1024;
  std::unique_ptr<uint8_t, decltype(&free)> held(static_cast<uint8_t *>(aligned_alloc(1024, 2 * bytes)), free);
  // What is not loaded is NaN.
  memset(held.get(), 0xFF, 2 * bytes);
  uint64_t barrier = 0;
  for (int n = 0; n < N; n++) limits[n] = keys - n % 3;
  for (int i = 0; i < stages * 64; i++) {
    valid[i] = i < keys && i % 5 != 2;
    if (i >= keys) {
      mla::zero_key<N, ROPE, RECORDS>(held.get(), i / 64, i % 64);
      continue;
    }
    std::vector<uint8_t> key(S::ROW);
    for (int j = 0; j < (RECORDS ? 512 : WIDTH); j++) {
      // Small keys first: the running maximum moves.
      key[j] = numbers() % (i < 128 ? 0x30 : 0x60) | (numbers() & 128);
      if (j < large) key[j] = j % 2 ? 0xFE : 0x7E;
      exact[i][j] = of_e4m3(key[j]) * double(OF_CACHE);
    }
    for (int j = 0; RECORDS && j < 512; j++) {
      // Where scales are in weights, later blocks have larger ones.
      float scale = (S::GROUPED ? 0.003f * (1 + i / 128) : 0.01f) * (1 + j / 128) * (1 + i % 7);
      memcpy(&key[mla::SCALES + j / 128 * 4], &scale, 4);
      exact[i][j] *= scale;
    }
    for (int j = 0; RECORDS && j < ROPE; j++) {
      uint16_t x = to_bfloat16(normal());
      memcpy(&key[mla::ROPES + 2 * j], &x, 2);
      exact[i][512 + j] = of_bfloat16(x);
    }
    mla::load_keys<N, ROPE, RECORDS>(held.get(), i / 64, i % 64, key.data(), 1, barrier);
  }
  memcpy(held.get() + bytes, held.get(), bytes);
  mla::own_memory = {{held.get(), bytes}, {reinterpret_cast<uint8_t *>(of_rows.data()), 168 * N}};
  uint8_t *matrices = held.get();
  float *known = of_rows.data();
  int first = 0, last = JOINED ? blocks / 2 : blocks;
  std::vector<float> accumulated(2 * 256 * 4 * N), by(2 * 256 * N / 4);
  // Weights of a block are made while the latents are multiplied by those of the block before.
  auto weigh = [&](int thread) {
    float s[N / 2], sums[N / 4] = {};
    auto load_q = [](auto... given) {
      if constexpr (NARROW) mla::narrow::load_q<N, ROPE, RECORDS, BF16>(given...);
      else mla::load_q<N, ROPE, RECORDS, BF16>(given...);
    };
    auto scores = [](auto... given) {
      if constexpr (NARROW) mla::narrow::scores<N, ROPE, RECORDS, BF16>(given...);
      else mla::scores<N, ROPE, RECORDS, BF16>(given...);
    };
    load_q(matrices, known, q.data(), WIDTH, rows, SCALE * OF_CACHE, thread);
    mla::together();
    for (int i = first; i < last; i++) {
      int stage = 2 * i + thread / 128;
      scores(s, matrices, stage, known, thread);
      auto behind = [&](auto weigh, auto... place) {
        weigh(
            s, sums, matrices, place..., known, limits.data(), &valid[64 * stage], 128 * i,
            !LISTS && i == blocks - 1, (i - first) % 2, (i + 1) % 2, thread);
      };
      if constexpr (NARROW) behind(mla::narrow::weigh<N, ROPE, RECORDS, BF16, LISTS>);
      else behind(mla::weigh<N, ROPE, RECORDS, BF16, LISTS>, stage);
      everyone.arrive_and_wait();
    }
    if constexpr (NARROW) mla::narrow::total<N>(sums, known, (last - first) % 2, 1, thread);
    else mla::total<N, S::GROUPED>(sums, known, (last - first) % 2, 1, thread);
    everyone.arrive_and_wait();
  };
  auto multiply = [&](int thread) {
    float acc[4 * N] = {};
    for (int i = first; i < last; i++) {
      everyone.arrive_and_wait();
      mla::rescale<N, S::GROUPED>(acc, known, (i + 1) % 2, thread);
      auto values = [&](auto... given) {
        if constexpr (NARROW) mla::narrow::values<N, ROPE, RECORDS, BF16>(given..., barrier, barrier, thread);
        else mla::values<N, ROPE, RECORDS, BF16>(given..., barrier, barrier, thread);
      };
      values(acc, matrices, 2 * i, 2 * i + 1, (i + 1) % 2);
      if constexpr (NARROW) mla::narrow::add_block<N>(acc, known, (i + 1) % 2, thread);
    }
    everyone.arrive_and_wait();
    std::copy_n(acc, 4 * N, &accumulated[(256 * mla::rank_of_program + thread) * 4 * N]);
    if (JOINED) return;
    if (part)
      mla::store<N, S::GROUPED, BF16, true>(acc, known, 1, parts.data(), 512, rows, BY, sinks.data(), 0, 0, thread);
    else
      mla::store<N, S::GROUPED, BF16, false>(acc, known, 1, out.data(), 512, rows, BY, sinks.data(), LISTS, 0, thread);
  };
  auto each_program = [&](int threads, auto run) {
    for (mla::rank_of_program = 0; mla::rank_of_program < 1 + JOINED; mla::rank_of_program++) {
      if (mla::rank_of_program) matrices += bytes, known += 42 * N, first = last, last = blocks;
      run_threads(threads, run);
    }
    matrices = held.get(), known = of_rows.data(), mla::rank_of_program = 0;
  };
  each_program(512, [&](int thread) { thread < 256 ? weigh(thread) : multiply(thread - 256); });
  if constexpr (JOINED) {
    auto of = [&](int thread) { return 256 * mla::rank_of_program + thread; };
    each_program(256, [&](int thread) {
      mla::give_half<N, ROPE, RECORDS>(
          &accumulated[of(thread) * 4 * N], &by[of(thread) * N / 4], matrices, known, 1, rows, BY, sinks.data(), LISTS, 0, thread);
    });
    each_program(256, [&](int thread) {
      mla::store_half<N, ROPE, RECORDS, BF16>(
          &accumulated[of(thread) * 4 * N], &by[of(thread) * N / 4], matrices, out.data(), 512, rows, thread);
    });
  }
  double worst = 0, worst_lse = 0;
  for (int n = 0; n < rows; n++) {
    std::vector<double> weights(keys, -INFINITY);
    for (int i = 0; i < keys; i++) {
      if (LISTS ? !valid[i] : i >= limits[n]) continue;
      weights[i] = 0;
      for (int j = 0; j < WIDTH; j++) weights[i] += exact[i][j] * wide(q[n * WIDTH + j]) * SCALE;
    }
    double highest = *std::max_element(weights.begin(), weights.end()), sum = 0, error = 0, most = 0;
    for (double &x : weights) sum += x = exp2(x - highest);
    double lse = of_rows[23 * N + n] + log2(of_rows[25 * N + n]);
    if constexpr (JOINED) lse = mla::joined_log<N>(known, 1, n) + log2(mla::joined_sum<N>(known, 1, n));
    worst_lse = std::max(worst_lse, off(highest + log2(sum), lse));
    if (LISTS && !part) sum += exp2(SINK / log(2.0) - highest);
    for (int j = large; j < 512; j++) {
      double want = 0;
      for (int i = 0; i < keys; i++) want += weights[i] * exact[i][j] / sum;
      most = std::max(most, fabs(want));
      error = std::max(error, off(want, part ? parts[n * 512 + j] : wide(out[n * 512 + j])));
    }
    worst = std::max(worst, error / most);
  }
  printf("%s: %g %g\n", name, worst, worst_lse);
}

// Of all numbers of e4m3 as values, two keys' two by two.
static void every_value() {
  double worst = 0;
  for (uint32_t a = 0; a < 256; a++)
    for (uint32_t b = 0; b < 256; b++)
      for (int element = 0; element < 8; element += 2) {
        // The other two are the same with other signs.
        uint64_t own = uint64_t(a | (b ^ 128) << 8) << 8 * element, other = uint64_t(b | (a ^ 128) << 8) << 8 * element;
        uint32_t pair, next;
        mla::widen_pairs(
            {uint32_t(own), uint32_t(own >> 32)}, {uint32_t(other), uint32_t(other >> 32)}, element, pair, next);
        for (uint32_t i = 0; i < 4; i++) {
          uint32_t want = i % 2 ? (i < 2 ? b : a ^ 128) : (i < 2 ? a : b ^ 128), got = (i < 2 ? pair : next) >> 16 * (i % 2);
          if ((want & 127) != 127) worst = std::max(worst, off(of_e4m3(want), of_half(got & 0xFFFF)));
        }
      }
  printf("values: %g 0\n", worst);
}

// Case by case, so that what one fault needs is compiled alone: CASE is one of them, or below 0 all.
#ifndef CASE
#define CASE -1
#endif

template <int CHOSEN> static void run_cases() {
  constexpr auto wanted = [](int number) { return CHOSEN < 0 || CHOSEN == number; };
  if constexpr (wanted(0)) every_value();
  if constexpr (wanted(1)) {
    run<16, 64, false, true, false>("one scale, 13 rows", 140, 13, false);
    run<16, 64, false, true, false>("one scale, large products cancel", 130, 13, false, 2);
  }
  if constexpr (wanted(2)) run<32, 64, false, false, false>("one scale, float16, a part", 70, 32, true);
  if constexpr (wanted(3)) {
    run<16, 64, false, true, false, true>("by 8 bits, 13 rows", 300, 13, false);
    run<16, 64, false, true, false, true>("by 8 bits, large products cancel", 130, 13, false, 2);
  }
  if constexpr (wanted(4)) run<16, 0, false, true, false, true>("by 8 bits, no rope, a part", 130, 16, true);
  if constexpr (wanted(5)) {
    run<16, 64, true, true, false>("records, 16 rows", 300, 16, false);
    run<16, 64, true, true, false>("records, large products cancel", 130, 13, false, 2);
  }
  if constexpr (wanted(6)) run<16, 64, true, true, true>("lists of records, 9 rows, a part", 300, 9, true);
  if constexpr (wanted(7)) run<32, 64, true, true, true>("lists of records with sinks, 20 rows", 130, 20, false);
  if constexpr (wanted(8))
    run<16, 64, true, true, true, false, true>("lists of records in two programs, 9 rows", 300, 9, false);
}

int main() { run_cases<CASE>(); }
