// rows.cuh on a CPU: the 128 or 256 threads of a producer bring blocks of keys to shared memory, beside what TMA's swizzle says.
// And prefill's stores.cuh: those of two warpgroups store a tile of which rows are missing, beside what WGMMA's fragments are.
// Prints what was run, how many elements are not what they must be, and how many were looked at.

#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "lanes.h"
#include "numbers.h"
#include "threads.h"

#define MLA_ON_HOST
#define MLA_METHOD inline
#define MLA_DEVICE static inline

// All threads of two programs.
static Barrier programs(256);

// Of two programs the second has the threads behind those of the first, and memory as far behind the first's.
static int threads_of_program = 256;
static ptrdiff_t memory_of_program = 0;
static int64_t expected, sent;

namespace mla::rows {
static void load(uint32_t *x, const uint8_t *from) { memcpy(x, from, 16); }
static void load(float &x, const uint8_t *from) { memcpy(&x, from, 4); }
static void fetch(const void *, int) {}
static void store(Shared to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  uint32_t all[4] = {x, y, z, w};
  memcpy(to, all, 16);
}
static void store_four(float *to, bool there, float x, float y, float z, float w) {
  if (there) to[0] = x, to[1] = y, to[2] = z, to[3] = w;
}
static int own_rank() { return own / threads_of_program; }
static Distance to_other(Shared) { return own_rank() ? -memory_of_program : memory_of_program; }
static void send(Shared from, int bytes, Distance distance, Shared) { memcpy(from + distance, from, bytes), sent += bytes; }
static void written_by_warp() { warps[own / 32].arrive_and_wait(); }
static void expect(Shared, int bytes) { expected += bytes; }
static uint32_t both(uint16_t low, uint16_t high) { return low | uint32_t(high) << 16; }
static void widen(uint32_t four, uint32_t &low, uint32_t &high) {
  low = both(to_half(of_e4m3(four & 255)), to_half(of_e4m3(four >> 8 & 255)));
  high = both(to_half(of_e4m3(four >> 16 & 255)), to_half(of_e4m3(four >> 24)));
}
static uint32_t scaled(uint32_t halves, float scale) {
  return both(to_bfloat16(of_half(halves) * scale), to_bfloat16(of_half(halves >> 16) * scale));
}
}  // namespace mla::rows

struct uint2 {
  uint32_t x, y;
};
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
namespace mla::tiles {
template <bool BF16> static uint32_t pack(float x, float y) {
  return mla::rows::both(BF16 ? to_bfloat16(x) : to_half(x), BF16 ? to_bfloat16(y) : to_half(y));
}
static uint32_t given_by(uint32_t x, int apart) { return exchanged(x, own % 32 ^ apart); }
}  // namespace mla::tiles

// Of boxes of 64 elements of so many keys of a page what TMA writes; what comes is counted, and what is expected.
struct CUtensorMap {
  const uint16_t *cache;
  int pages, page_size, keys;
  uint8_t *ring;
};
struct Full {
  std::atomic<int> expected = 0, come = 0;
  void expect_transaction(int bytes) { expected += bytes; }
};
namespace tl {
static void tma_load(const CUtensorMap &map, Full &full, uint8_t *to, int element, int row, int page) {
  full.come += map.keys * 128;
  for (int key = 0; key < map.keys; key++)
    for (int j = 0; j < 64; j++) {
      bool there = page >= 0 && page < map.pages;
      uint16_t x = there ? map.cache[(page * map.page_size + row + key) * 576 + element + j] : 0;
      // Rings begin where swizzles do.
      int place = to - map.ring + key * 128 + 2 * j;
      memcpy(map.ring + (place ^ (place >> 7 & 7) << 4), &x, 2);
    }
}
}  // namespace tl

#include "../prefill/stores.cuh"
#include "boxes.cuh"
#include "rows.cuh"

constexpr int WIDTH = 576, BLOCKS = 3, ELEMENTS = 64 * WIDTH;
static std::mt19937 numbers(7);

// Keys that are none, and of 8 bits such that have a NaN.
static bool there(int key) { return key % 11 != 3 && key < 64 * BLOCKS - 5; }
static int nan_of(int key) { return key % 17 == 5 ? key * 31 % WIDTH : -1; }

// Runs the threads of a producer, each of which knows one of its warp's keys.
template <int KEYS> static void run(const std::function<void(int thread, int own_key)> &role) {
  run_threads(64 / KEYS * 32, [&](int thread) { role(thread, thread / 32 * KEYS + thread % KEYS); });
}

// What a block's rings hold: [64, 256] of the left half, of the right one, and [64, 64] ropes, each a chunk of 64 columns
// behind the other, and in a row of 128 bytes pieces of 16, swizzled by the row.
struct Rings {
  std::vector<uint8_t> bytes = std::vector<uint8_t>(2 * ELEMENTS, 0xA5);
  uint8_t *left() { return bytes.data(); }
  uint8_t *right() { return left() + 64 * 512; }
  uint8_t *ropes() { return right() + 64 * 512; }
  uint16_t at(int key, int element) const {
    int chunk = element / 64, byte = element % 64 * 2, place = chunk * 8192 + key * 128 + (byte ^ (key & 7) << 4);
    return bytes[place] | bytes[place + 1] << 8;
  }
};

static void report(const char *name, const std::vector<Rings> &rings, const std::function<bool(int, int, uint16_t)> &is) {
  int wrong = 0;
  for (int key = 0; key < 64 * BLOCKS; key++)
    for (int j = 0; j < WIDTH; j++) wrong += !is(key, j, rings[key / 64].at(key % 64, j));
  printf("%s: %d %d\n", name, wrong, BLOCKS * ELEMENTS);
}

template <int KEYS> static void copied(const char *name) {
  std::vector<uint16_t> cache(BLOCKS * ELEMENTS);
  for (auto &x : cache) x = numbers();
  std::vector<Rings> rings(BLOCKS);
  run<KEYS>([&](int thread, int own_key) {
    for (int i = 0; i < BLOCKS; i++) {
      int key = 64 * i + own_key;
      const void *own = &cache[key * WIDTH];
      mla::rows::copy_rows<KEYS, 4>(rings[i].left(), 0, own, there(key), thread);
      mla::rows::copy_rows<KEYS, 1>(rings[i].ropes(), 1024, own, there(key), thread);
      mla::rows::copy_rows<KEYS, 4>(rings[i].right(), 512, own, there(key), thread);
    }
  });
  report(name, rings, [&](int key, int j, uint16_t x) { return x == (there(key) ? cache[key * WIDTH + j] : 0); });
}

// Pages of 48 keys, of which every fifth is one that the pool does not have.
static void boxed(const char *name) {
  constexpr int PAGE = 48, PAGES = BLOCKS * 64 / PAGE;
  std::vector<uint16_t> cache(BLOCKS * ELEMENTS);
  for (auto &x : cache) x = numbers();
  auto page_of = [&](int key) { return key / PAGE % 5 == 3 ? PAGES + key % 2 : PAGES - 1 - key / PAGE; };
  std::vector<Rings> rings(BLOCKS);
  Full full;
  run<16>([&](int thread, int) {
    for (int i = 0; i < BLOCKS; i++) {
      auto *left = rings[i].left(), *right = rings[i].right(), *ropes = rings[i].ropes();
      auto map = [&](uint8_t *ring) { return CUtensorMap{cache.data(), PAGES, PAGE, 16, ring}; };
      int key = 64 * i + thread / 32 * 16, page = page_of(key), row = key % PAGE;
      mla::boxes::load<16, 4>(map(left), full, left, 0, page, row, thread);
      mla::boxes::load<16, 1>(map(ropes), full, ropes, 512, page, row, thread);
      mla::boxes::load<16, 4>(map(right), full, right, 256, page, row, thread);
    }
  });
  if (full.expected != 2 * BLOCKS * ELEMENTS || full.come != full.expected) printf("%s: -1 0\n", name);
  report(name, rings, [&](int key, int j, uint16_t x) {
    int page = page_of(key);
    return x == (page < PAGES ? cache[(page * PAGE + key % PAGE) * WIDTH + j] : 0);
  });
}

// PAIR: by two programs, whose rings lie behind each other.
template <int KEYS, bool RECORDS, bool BF16, int SLOTS, bool PAIR = false> static void widened(const char *name) {
  constexpr int ROW = RECORDS ? 656 : WIDTH;
  std::vector<uint8_t> cache(64 * BLOCKS * ROW);
  std::vector<float> exact(BLOCKS * ELEMENTS);
  for (int key = 0; key < 64 * BLOCKS; key++)
    for (int j = 0; j < WIDTH; j++) {
      float &x = exact[key * WIDTH + j];
      if (RECORDS && j >= 512) {
        uint16_t rope = to_bfloat16(std::normal_distribution<float>()(numbers));
        memcpy(&cache[key * ROW + 528 + 2 * (j - 512)], &rope, 2);
        x = of_bfloat16(rope);
        continue;
      }
      uint8_t &code = cache[key * ROW + j];
      // All but NaN, zeros and what is subnormal among them.
      do code = numbers();
      while ((code & 127) == 127);
      if (j == nan_of(key)) code = 0xFF;
      float scale = RECORDS ? 3e-4f * (1 + key % 7) * (1 << j / 128 * 4) : 1.f;
      if (RECORDS) memcpy(&cache[key * ROW + 512 + j / 128 * 4], &scale, 4);
      x = of_e4m3(code) * scale;
    }
  std::vector<Rings> rings(BLOCKS), others(BLOCKS);
  uint8_t barrier[8];
  threads_of_program = PAIR ? 128 : 256, expected = sent = 0;
  run<KEYS>([&](int all_threads, int own_key) {
    bool second = PAIR && mla::rows::own_rank();
    int thread = PAIR ? all_threads % 128 : all_threads;
    uint32_t held[4 * SLOTS];
    float scales[2];
    // A key that is none is read as another.
    auto at = [&](int key) { return &cache[key < 64 * BLOCKS && there(key) ? key * ROW : 0]; };
    auto is = [&](int key) { return key < 64 * BLOCKS && there(key); };
    mla::rows::begin_keys<KEYS, RECORDS, PAIR, SLOTS>(held, scales, at(own_key), is(own_key), thread);
    for (int i = 0; i < BLOCKS; i++) {
      int key = 64 * i + own_key, next = key + 64;
      memory_of_program = others[i].left() - rings[i].left();
      auto &rings_of = second ? others[i] : rings[i];
      auto *left = rings_of.left(), *right = rings_of.right(), *ropes = rings_of.ropes();
      auto widen_left = [&](auto &...full) {
        mla::rows::widen_left<KEYS, RECORDS, BF16, SLOTS>(
            held, scales, left, ropes, at(key), is(key), at(next), is(next), thread, full...);
      };
      auto widen_right = [&](auto &...full) {
        mla::rows::widen_right<KEYS, RECORDS, BF16, SLOTS>(
            held, scales, right, at(key), is(key), at(next), is(next), thread, full...);
      };
      if constexpr (PAIR)
        widen_left(barrier), programs.arrive_and_wait(), widen_right(barrier), programs.arrive_and_wait();
      else
        widen_left(), widen_right();
    }
  });
  for (auto *of_program : {&rings, &others})
    if (PAIR || of_program == &rings)
      report(name, *of_program, [&](int key, int j, uint16_t x) {
        if (!there(key)) return x == 0;
        float want = exact[key * WIDTH + j], got = BF16 ? of_bfloat16(x) : of_half(x);
        if (std::isnan(want)) return std::isnan(got);
        return got == (RECORDS ? of_bfloat16(to_bfloat16(want)) : want);
      });
  if (PAIR) printf("%s, bytes sent: %d %d\n", name, int(sent - expected), int(sent));
}

// Rows of a tile lie apart, and behind the last of them somebody else's.
template <int COLUMNS, bool BF16> static void stored(const char *name) {
  constexpr int ROWS = 128, PRESENT = 77, APART = COLUMNS + 24;
  auto value = [](int row, int column) { return float((row * 37 + column * 5) % 251 - 125); };
  std::vector<uint16_t> out(ROWS * APART, 0xA5A5);
  run_threads(256, [&](int thread) {
    float accumulated[COLUMNS / 2];
    // WGMMA's: of eight columns two, of a row and of the eighth behind it.
    for (int i = 0; i < COLUMNS / 2; i++)
      mla::tiles::keep(accumulated, i, value(thread / 32 * 16 + i / 2 % 2 * 8 + thread % 32 / 4, i / 4 * 8 + thread % 4 * 2 + i % 2));
    mla::tiles::store_rows<COLUMNS, BF16>(accumulated, out.data(), APART, PRESENT, thread);
  });
  int wrong = 0;
  for (int i = 0; i < ROWS * APART; i++) {
    int row = i / APART, column = i % APART;
    bool there = row < PRESENT && column < COLUMNS;
    uint16_t want = !there ? 0xA5A5 : BF16 ? to_bfloat16(value(row, column)) : to_half(value(row, column));
    wrong += out[i] != want;
  }
  printf("%s: %d %d\n", name, wrong, ROWS * APART);
}

// The same of partial results: a half of what a row has.
static void stored_part(const char *name) {
  constexpr int ROWS = 64, PRESENT = 45, COLUMNS = 256, APART = 2 * COLUMNS;
  auto value = [](int row, int column) { return float(row * 1000 + column); };
  std::vector<float> out(ROWS * APART, -1.f);
  run_threads(128, [&](int thread) {
    float accumulated[COLUMNS / 2];
    for (int i = 0; i < COLUMNS / 2; i++)
      mla::rows::keep(accumulated, i, value(thread / 32 * 16 + i / 2 % 2 * 8 + thread % 32 / 4, i / 4 * 8 + thread % 4 * 2 + i % 2));
    mla::rows::store_part<COLUMNS>(accumulated, out.data() + COLUMNS, APART, PRESENT, thread);
  });
  int wrong = 0;
  for (int i = 0; i < ROWS * APART; i++) {
    int row = i / APART, column = i % APART - COLUMNS;
    wrong += out[i] != (row < PRESENT && column >= 0 ? value(row, column) : -1.f);
  }
  printf("%s: %d %d\n", name, wrong, ROWS * APART);
}

int main() {
  stored_part("a part");
  stored<128, true>("a tile");
  stored<64, false>("a tile, float16");
  copied<16>("copied");
  boxed("boxes");
  widened<8, false, true, 3>("one scale");
  widened<8, false, false, 3>("one scale, float16");
  widened<16, true, true, 4>("records");
  widened<8, false, true, 9, true>("one scale, for two");
  widened<8, true, true, 5, true>("records, for two");
}
