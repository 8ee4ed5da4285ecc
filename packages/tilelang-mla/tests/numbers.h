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
static float of_half(uint16_t x) { return float(bits<_Float16>(x)); }
static uint16_t to_half(float x) { return bits<uint16_t>(_Float16(x)); }
static float of_bfloat16(uint16_t x) { return bits<float>(uint32_t(x) << 16); }
static uint16_t to_bfloat16(float x) {
  uint32_t all = bits<uint32_t>(x);
  return std::isnan(x) ? 0x7FFF : (all + 0x7FFF + (all >> 16 & 1)) >> 16;
}
static float of_e4m3(uint8_t x) {
  int exponent = x >> 3 & 15, mantissa = x & 7;
  float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return (x & 127) == 127 ? NAN : x & 128 ? -size : size;
}
