// Formats of 8 and 16 bits on a CPU, as functions of their bits.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

template <class To, class From> static To bits(From from) {
  To to;
  static_assert(sizeof(to) == sizeof(from));
  memcpy(&to, &from, sizeof(to));
  return to;
}
// All numbers of a format: they are looked up a hundred times as often as there are some.
template <int COUNT> struct Table {
  float numbers[COUNT];
  explicit Table(float (*number)(int)) {
    for (int i = 0; i < COUNT; i++) numbers[i] = number(i);
  }
};
static const Table<65536> halves([](int i) { return float(bits<_Float16>(uint16_t(i))); });
static float of_half(uint16_t x) { return halves.numbers[x]; }
static uint16_t to_half(float x) { return bits<uint16_t>(_Float16(x)); }
static float of_bfloat16(uint16_t x) { return bits<float>(uint32_t(x) << 16); }
static uint16_t to_bfloat16(float x) {
  uint32_t all = bits<uint32_t>(x);
  return std::isnan(x) ? 0x7FFF : (all + 0x7FFF + (all >> 16 & 1)) >> 16;
}
static const Table<256> all_of_e4m3([](int x) {
  int exponent = x >> 3 & 15, mantissa = x & 7;
  float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return (x & 127) == 127 ? NAN : x & 128 ? -size : size;
});
static float of_e4m3(uint8_t x) { return all_of_e4m3.numbers[x]; }
// To the nearest, of two as near the even one; beyond the largest, that.
static uint32_t to_e4m3(float x) {
  if (std::isnan(x)) return 0x7F;
  float size = std::fmin(fabsf(x), 448.f);
  int exponent = size < ldexpf(1, -6) ? -6 : ilogbf(size);
  uint32_t steps = uint32_t(std::nearbyint(ldexpf(size, 3 - exponent)));
  // Numbers below 2^-6 have no first bit of their own.
  return (std::signbit(x) ? 128 : 0) | ((exponent + 6) * 8 + steps);
}
