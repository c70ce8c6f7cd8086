// Instructions that compute something of each lane's operands alone: a table of functions of one lane, and the loop
// over the lanes, in which the compiler inlines them.
#include <cmath>
#include <limits>
#include <type_traits>
#include <unordered_map>
#include "floats.h"
#include "warp.h"

namespace emu::ptx {
namespace {

// ----------------------------------------------------------------------------
// The loop

// How a lane's value lies in a register: as itself, a predicate as 0 or ~0, a 16-bit float as its bits.
template <class T>
struct Stored {
  using type = T;
  static T from(T x) { return x; }
  static T to(T x) { return x; }
};
template <>
struct Stored<bool> {
  using type = uint32_t;
  static bool from(uint32_t x) { return x != 0; }
  static uint32_t to(bool x) { return x ? ~0u : 0; }
};
template <class T>
constexpr int bytes_of = std::is_same_v<T, bool> ? 0 : int(sizeof(T));

template <auto f, class R, class... A, size_t... I>
void each_lane(Warp& w, const Op& op, R (*)(A...), std::index_sequence<I...>) {
  alignas(64) typename Stored<R>::type results[lanes];
  const auto loop = [&results](const typename Stored<A>::type*... operands) {
    for (int i = 0; i < lanes; i++) results[i] = Stored<R>::to(f(Stored<A>::from(operands[i])...));
  };
  loop(w.at<typename Stored<A>::type>(op.at[I + 1])...);
  w.set(op.at[0], results);
}

template <auto f, class R, class... A>
void run(Warp& w, const Op& op) {
  each_lane<f>(w, op, static_cast<R (*)(A...)>(f), std::index_sequence_for<A...>());
}

template <auto f, class R, class... A>
Arithmetic arithmetic(R (*)(A...)) {
  return {run<f, R, A...>, {bytes_of<R>, bytes_of<A>...}};
}

// ----------------------------------------------------------------------------
// Functions of one lane. Sums and products of integers wrap around, so they are computed without a sign.

template <class T>
using Unsigned = std::conditional_t<sizeof(T) == 2, uint32_t, std::make_unsigned_t<T>>;  // 16 bits would be promoted
template <class T>
using Signed = std::make_signed_t<T>;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
template <class T>
using Twice = std::conditional_t<
    std::is_same_v<T, i16>, i32,
    std::conditional_t<std::is_same_v<T, u16>, u32, std::conditional_t<std::is_same_v<T, i32>, i64, u64>>>;

template <class T>
T copy(T a) {
  return a;
}
template <class T>
T select(T a, T b, bool p) {
  return p ? a : b;
}

template <class T>
T add(T a, T b) {
  return T(Unsigned<T>(a) + Unsigned<T>(b));
}
template <class T>
T sub(T a, T b) {
  return T(Unsigned<T>(a) - Unsigned<T>(b));
}
template <class T>
T mul_lo(T a, T b) {
  return T(Unsigned<T>(a) * Unsigned<T>(b));
}
template <class T>
T mad_lo(T a, T b, T c) {
  return T(Unsigned<T>(a) * Unsigned<T>(b) + Unsigned<T>(c));
}
template <class T>
Twice<T> mul_wide(T a, T b) {
  return Twice<T>(Twice<T>(a) * Twice<T>(b));
}
template <class T>
Twice<T> mad_wide(T a, T b, Twice<T> c) {
  return add<Twice<T>>(mul_wide(a, b), c);
}
template <class T>
T mul_hi(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return T((Wide(a) * Wide(b)) >> (8 * sizeof(T)));
}
template <class T>
T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max_of(T a, T b) {
  return a < b ? b : a;
}
template <class T>
T neg(T a) {
  return T(0 - Unsigned<T>(a));
}
template <class T>
T abs_of(T a) {
  return a < 0 ? neg(a) : a;
}

// A division by 0 has some result, and lanes that are not active divide, too.
template <class T>
T div_of(T a, T b) {
  if (b == 0) return T(-1);
  if constexpr (std::is_signed_v<T>)
    if (b == T(-1)) return neg(a);
  return T(a / b);
}
// Divides 32 bits through double, which is exact and has vector instructions.
template <>
i32 div_of(i32 a, i32 b) {
  return b == 0 ? -1 : i32(i64(double(a) / double(b)));
}
template <>
u32 div_of(u32 a, u32 b) {
  return b == 0 ? ~0u : u32(i64(double(a) / double(b)));
}
template <class T>
T rem_of(T a, T b) {
  return sub(a, mul_lo(div_of(a, b), b));
}

template <class T>
T and_of(T a, T b) {
  return T(a & b);
}
template <class T>
T or_of(T a, T b) {
  return T(a | b);
}
template <class T>
T xor_of(T a, T b) {
  return T(a ^ b);
}
template <class T>
T not_of(T a) {
  return T(~a);
}
bool not_pred(bool a) { return !a; }

// Shifts by more bits than there are shift all out.
template <class T>
T shl(T a, u32 n) {
  return n >= 8 * sizeof(T) ? T(0) : T(Unsigned<T>(a) << n);
}
template <class T>
T shr(T a, u32 n) {
  const u32 most = 8 * sizeof(T) - 1;
  if constexpr (std::is_signed_v<T>) return T(a >> (n > most ? most : n));
  else return n > most ? T(0) : T(a >> (n > most ? most : n));
}
// The funnel shift: 32 bits of b a.
u32 shf_l(u32 a, u32 b, u32 n) { return u32(((u64(b) << 32 | a) << n) >> 32); }
u32 shf_r(u32 a, u32 b, u32 n) { return u32((u64(b) << 32 | a) >> n); }
template <u32 shift(u32, u32, u32)>
u32 shf_wrap(u32 a, u32 b, u32 n) {
  return shift(a, b, n & 31);
}
template <u32 shift(u32, u32, u32)>
u32 shf_clamp(u32 a, u32 b, u32 n) {
  return shift(a, b, n > 32 ? 32 : n);
}

// `length` bits from bit `position` on.
template <class T>
T low_bits(u32 length) {
  return length >= 8 * sizeof(T) ? T(-1) : T((T(1) << length) - 1);
}
template <class T>
T bfe(T a, u32 position, u32 length) {
  position &= 255, length &= 255;
  using U = Unsigned<T>;
  const u32 bits = 8 * sizeof(T);
  if (length == 0) return T(0);
  U field = position >= bits ? U(0) : U(U(a) >> position) & low_bits<U>(length);
  if constexpr (std::is_signed_v<T>) {
    const u32 top = position + length - 1;
    if ((a >> (top < bits - 1 ? top : bits - 1) & 1) != 0) {
      const u32 kept = top < bits - 1 ? length : position >= bits ? 0 : bits - position;
      field |= ~low_bits<U>(kept);
    }
  }
  return T(field);
}
template <class T>
T bfi(T a, T b, u32 position, u32 length) {
  position &= 255, length &= 255;
  const T mask = position >= 8 * sizeof(T) ? T(0) : T(low_bits<T>(length) << position);
  return T((shl(a, position) & mask) | (b & ~mask));
}
u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64(b) << 32 | a;
  u32 result = 0;
  for (u32 i = 0; i < 4; i++) {
    const u32 s = selector >> 4 * i & 15, byte = u32(bytes >> 8 * (s & 7)) & 255;
    result |= ((s & 8) != 0 ? (byte >> 7) * 255 : byte) << 8 * i;
  }
  return result;
}
u32 popc32(u32 a) { return u32(__builtin_popcount(a)); }
u32 popc64(u64 a) { return u32(__builtin_popcountll(a)); }
u32 clz32(u32 a) { return a == 0 ? 32 : u32(__builtin_clz(a)); }
u32 clz64(u64 a) { return a == 0 ? 64 : u32(__builtin_clzll(a)); }
// The place of the highest bit that is 1, and by how much a would have to be shifted left to bring it to the top; all
// ones if there is none.
u32 bfind32(u32 a) { return a == 0 ? ~0u : 31 - u32(__builtin_clz(a)); }
u32 bfind_shift32(u32 a) { return a == 0 ? ~0u : u32(__builtin_clz(a)); }
u32 brev32(u32 a) {
  u32 r = 0;
  for (int i = 0; i < 32; i++) r |= (a >> i & 1) << (31 - i);
  return r;
}

template <class T>
T fadd(T a, T b) {
  return a + b;
}
template <class T>
T fsub(T a, T b) {
  return a - b;
}
template <class T>
T fmul(T a, T b) {
  return a * b;
}
template <class T>
T fdiv(T a, T b) {
  return a / b;
}
float ffma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
double dfma(double a, double b, double c) { return __builtin_fma(a, b, c); }
// Rounded towards minus infinity. The product is exact in double; `rest` is what the sum in double has lost.
float ffma_rm(float a, float b, float c) {
  const double product = double(a) * double(b), sum = product + double(c);
  const double part = sum - product, rest = (product - (sum - part)) + (double(c) - part);
  const float rounded = float(sum);
  return double(rounded) > sum || (double(rounded) == sum && rest < 0) ? nextafterf(rounded, -INFINITY) : rounded;
}
template <class T>
T fneg(T a) {
  return -a;
}
template <class T>
T fabs_of(T a) {
  return std::fabs(a);
}
// The sign of a, and else b.
template <class T>
T sign_of_first(T a, T b) {
  return std::copysign(b, a);
}
template <class T>
T fsqrt(T a) {
  return std::sqrt(a);
}
template <class T>
T frcp(T a) {
  return T(1) / a;
}
// a + b rounded toward 0. `rest` is what the sum in double leaves of the exact one (Knuth's two-sum).
float add_toward_zero(float a, float b) {
  const double x = a, y = b, sum = x + y, of_y = sum - x, rest = (x - (sum - of_y)) + (y - of_y);
  const float nearest = float(sum);
  if (!std::isfinite(sum)) return nearest;
  const double missing = (sum - double(nearest)) + rest;  // of the exact sum
  const bool is_too_far = nearest > 0 ? missing < 0 : missing > 0;
  return is_too_far && nearest != 0 ? std::nextafter(nearest, 0.0f) : nearest;
}
float frsqrt(float a) { return 1 / std::sqrt(a); }

// The other operand if one is NaN; +0 is greater than -0.
template <class T>
T fmax_of(T a, T b) {
  if (a == b) return std::signbit(a) ? b : a;
  return a > b || b != b ? a : b;
}
template <class T>
T fmin_of(T a, T b) {
  if (a == b) return std::signbit(a) ? a : b;
  return a < b || b != b ? a : b;
}
template <float f(float, float)>
float nan_if_any(float a, float b) {
  return a != a || b != b ? NAN : f(a, b);
}

// Subnormal numbers are 0.
float flushed(float a) { return std::fabs(a) < 0x1p-126f ? std::copysign(0.0f, a) : a; }
template <float f(float)>
float ftz(float a) {
  return flushed(f(flushed(a)));
}
template <float f(float, float)>
float ftz2(float a, float b) {
  return flushed(f(flushed(a), flushed(b)));
}
template <float f(float, float, float)>
float ftz3(float a, float b, float c) {
  return flushed(f(flushed(a), flushed(b), flushed(c)));
}

// 2^a, to 2^-22: the whole part by the exponent, the rest, at most a half, by a polynomial whose coefficients are
// powers of ln 2 over factorials.
__attribute__((always_inline)) inline float ex2(float a) {
  const float low = a < -160.0f ? -160.0f : a, x = low > 130.0f ? 130.0f : low;
  const float whole = __builtin_nearbyintf(x), f = x - whole;
  float p = 1.5252733804e-5f;
  p = ffma(p, f, 1.5403530394e-4f);
  p = ffma(p, f, 1.3333558146e-3f);
  p = ffma(p, f, 9.6181291076e-3f);
  p = ffma(p, f, 5.5504108665e-2f);
  p = ffma(p, f, 2.4022650696e-1f);
  p = ffma(p, f, 6.9314718056e-1f);
  p = ffma(p, f, 1.0f);
  const i32 n = i32(a != a ? 0.0f : whole), half = n >> 1;  // two factors, as 2^n may be no normal number
  return p * as<float>((half + 127) << 23) * as<float>((n - half + 127) << 23);
}
float lg2(float a) { return std::log2(a); }
float sine(float a) { return std::sin(a); }
float cosine(float a) { return std::cos(a); }
float tangens_hyperbolicus(float a) { return std::tanh(a); }

enum Comparison { eq, ne, lt, le, gt, ge };
template <class T, Comparison c>
bool compare(T a, T b) {
  return c == eq ? a == b : c == ne ? a != b : c == lt ? a < b : c == le ? a <= b : c == gt ? a > b : a >= b;
}
// Compares floats: `ne` and its like are false if one is NaN; `neu`, `ltu`, ... are true.
template <class T, Comparison c>
bool ordered(T a, T b) {
  return c == ne ? a < b || a > b : compare<T, c>(a, b);
}
template <class T, Comparison c>
bool unordered(T a, T b) {
  return a != a || b != b || compare<T, c>(a, b);
}
template <class T>
bool both_numbers(T a, T b) {
  return a == a && b == b;
}
template <class T>
bool any_nan(T a, T b) {
  return a != a || b != b;
}

// ----------------------------------------------------------------------------
// Conversions

template <class To, class From>
To convert(From a) {
  return To(a);
}
// A signed or unsigned byte in a register of 16 bits.
template <class To, class Byte>
To convert_byte(u16 a) {
  return To(Byte(a));
}

float nearest(float a) { return std::nearbyint(a); }
float towards_zero(float a) { return std::trunc(a); }
float down(float a) { return std::floor(a); }
float up(float a) { return std::ceil(a); }
double nearest(double a) { return std::nearbyint(a); }
double towards_zero(double a) { return std::trunc(a); }
double down(double a) { return std::floor(a); }
double up(double a) { return std::ceil(a); }

// Converts to the nearest value that the integer type has; NaN becomes 0.
template <class To, class From, From round(From)>
To to_integer(From a) {
  const From least = From(std::numeric_limits<To>::min());
  const From limit = From(std::numeric_limits<To>::max() / 2 + 1) * 2;  // one more than the greatest
  const From r = a != a ? From(0) : round(a);
  return r <= least ? std::numeric_limits<To>::min() : r >= limit ? std::numeric_limits<To>::max() : To(r);
}
float saturate(float a) { return a > 0 ? (a < 1 ? a : 1.0f) : 0.0f; }
float relu(float a) { return a > 0 ? a : 0.0f; }

u32 two_bf16(float high, float low) { return u32(bf16_of_float(high)) << 16 | bf16_of_float(low); }
u32 two_f16(float high, float low) { return u32(f16_of_float(high)) << 16 | f16_of_float(low); }
u32 two_bf16_relu(float high, float low) { return two_bf16(relu(high), relu(low)); }
// A tf32 has 10 bits of mantissa; ties away from zero.
u32 tf32_of_float(float a) {
  const u32 bits = as<u32>(a);
  return a != a ? 0x7fffffff : std::isinf(a) ? bits : (bits + 0x1000) & ~0x1fffu;
}

// ----------------------------------------------------------------------------
// The table

using Table = std::unordered_map<std::string, Arithmetic>;

template <class T, Comparison c>
void add_comparison(Table& t, const std::string& name, const std::string& type) {
  if constexpr (std::is_floating_point_v<T>) {
    t["setp." + name + type] = arithmetic<ordered<T, c>>(ordered<T, c>);
    t["setp." + name + "u" + type] = arithmetic<unordered<T, c>>(unordered<T, c>);
  } else {
    t["setp." + name + type] = arithmetic<compare<T, c>>(compare<T, c>);
  }
}

template <class T>
void add_comparisons(Table& t, const std::string& type) {
  add_comparison<T, eq>(t, "eq", type);
  add_comparison<T, ne>(t, "ne", type);
  add_comparison<T, lt>(t, "lt", type);
  add_comparison<T, le>(t, "le", type);
  add_comparison<T, gt>(t, "gt", type);
  add_comparison<T, ge>(t, "ge", type);
}

#define ADD(name, ...) t[std::string(name) + type] = arithmetic<__VA_ARGS__>(__VA_ARGS__)

// For "add" and the like, where the sign does not matter, .s32 and .u32 are the same.
template <class T>
void add_integers(Table& t, const std::string& type) {
  ADD("add", add<T>);
  ADD("sub", sub<T>);
  ADD("mul.lo", mul_lo<T>);
  ADD("mad.lo", mad_lo<T>);
  ADD("mul.hi", mul_hi<T>);
  ADD("div", div_of<T>);
  ADD("rem", rem_of<T>);
  ADD("min", min_of<T>);
  ADD("max", max_of<T>);
  ADD("shr", shr<T>);
  ADD("mov", copy<T>);
  ADD("selp", select<T>);
  if constexpr (std::is_signed_v<T>) {
    ADD("neg", neg<T>);
    ADD("abs", abs_of<T>);
  }
  if constexpr (sizeof(T) < 8) {
    ADD("mul.wide", mul_wide<T>);
    ADD("mad.wide", mad_wide<T>);
  }
  if constexpr (sizeof(T) > 2) ADD("bfe", bfe<T>);
  add_comparisons<T>(t, type);
}

template <class T>
void add_bits(Table& t, const std::string& type) {
  ADD("and", and_of<T>);
  ADD("or", or_of<T>);
  ADD("xor", xor_of<T>);
  ADD("not", not_of<T>);
  ADD("shl", shl<T>);
  ADD("shr", shr<T>);
  ADD("mov", copy<T>);
  ADD("selp", select<T>);
  if constexpr (sizeof(T) > 2) ADD("bfi", bfi<T>);
  add_comparison<T, eq>(t, "eq", type);
  add_comparison<T, ne>(t, "ne", type);
}

template <class T>
void add_floats(Table& t, const std::string& type) {
  for (const char* rounding : {"", ".rn"}) {
    ADD(std::string("add") + rounding, fadd<T>);
    ADD(std::string("sub") + rounding, fsub<T>);
    ADD(std::string("mul") + rounding, fmul<T>);
  }
  ADD("div.rn", fdiv<T>);
  ADD("sqrt.rn", fsqrt<T>);
  ADD("rcp.rn", frcp<T>);
  ADD("neg", fneg<T>);
  ADD("abs", fabs_of<T>);
  ADD("copysign", sign_of_first<T>);
  ADD("min", fmin_of<T>);
  ADD("max", fmax_of<T>);
  ADD("mov", copy<T>);
  ADD("selp", select<T>);
  ADD("setp.num", both_numbers<T>);
  ADD("setp.nan", any_nan<T>);
  add_comparisons<T>(t, type);
}

// What a GPU approximates is exact here, but for 2^x.
void add_single(Table& t) {
  const std::string type = ".f32";
  add_floats<float>(t, type);
  ADD("fma.rn", ffma);
  ADD("fma.rm", ffma_rm);
  ADD("div.approx", fdiv<float>);
  ADD("div.full", fdiv<float>);
  ADD("sqrt.approx", fsqrt<float>);
  ADD("rcp.approx", frcp<float>);
  ADD("rsqrt.approx", frsqrt);
  ADD("ex2.approx", ex2);
  ADD("lg2.approx", lg2);
  ADD("sin.approx", sine);
  ADD("cos.approx", cosine);
  ADD("tanh.approx", tangens_hyperbolicus);
  ADD("max.NaN", nan_if_any<fmax_of<float>>);
  ADD("min.NaN", nan_if_any<fmin_of<float>>);
  ADD("add.ftz", ftz2<fadd<float>>);
  ADD("sub.ftz", ftz2<fsub<float>>);
  ADD("mul.ftz", ftz2<fmul<float>>);
  ADD("fma.rn.ftz", ftz3<ffma>);
  ADD("max.ftz", ftz2<fmax_of<float>>);
  ADD("min.ftz", ftz2<fmin_of<float>>);
  ADD("div.full.ftz", ftz2<fdiv<float>>);
  ADD("div.approx.ftz", ftz2<fdiv<float>>);
  ADD("sqrt.approx.ftz", ftz<fsqrt<float>>);
  ADD("rcp.approx.ftz", ftz<frcp<float>>);
  ADD("rsqrt.approx.ftz", ftz<frsqrt>);
  ADD("ex2.approx.ftz", ftz<ex2>);
  ADD("lg2.approx.ftz", ftz<lg2>);
}

template <class To, class From>
void add_conversion(Table& t, const std::string& to, const std::string& from) {
  t["cvt" + to + from] = arithmetic<convert<To, From>>(convert<To, From>);
}
template <class To>
void add_conversions_to_integer(Table& t, const std::string& to) {
  add_conversion<To, i16>(t, to, ".s16");
  add_conversion<To, u16>(t, to, ".u16");
  add_conversion<To, i32>(t, to, ".s32");
  add_conversion<To, u32>(t, to, ".u32");
  add_conversion<To, i64>(t, to, ".s64");
  add_conversion<To, u64>(t, to, ".u64");
  t["cvt" + to + ".s8"] = arithmetic<convert_byte<To, int8_t>>(convert_byte<To, int8_t>);
  t["cvt" + to + ".u8"] = arithmetic<convert_byte<To, uint8_t>>(convert_byte<To, uint8_t>);
  if constexpr (sizeof(To) > 2) {
    const std::string type = to + ".f32";
    ADD("cvt.rni", to_integer<To, float, nearest>);
    ADD("cvt.rzi", to_integer<To, float, towards_zero>);
    ADD("cvt.rmi", to_integer<To, float, down>);
    ADD("cvt.rpi", to_integer<To, float, up>);
  }
  if constexpr (sizeof(To) > 2) {
    const std::string type = to + ".f64";
    ADD("cvt.rni", to_integer<To, double, nearest>);
    ADD("cvt.rzi", to_integer<To, double, towards_zero>);
    ADD("cvt.rmi", to_integer<To, double, down>);
    ADD("cvt.rpi", to_integer<To, double, up>);
  }
}
template <class To>
void add_conversions_to_float(Table& t, const std::string& to) {
  add_conversion<To, i16>(t, to, ".s16");
  add_conversion<To, u16>(t, to, ".u16");
  add_conversion<To, i32>(t, to, ".s32");
  add_conversion<To, u32>(t, to, ".u32");
  add_conversion<To, i64>(t, to, ".s64");
  add_conversion<To, u64>(t, to, ".u64");
}

void add_conversions(Table& t) {
  add_conversions_to_integer<i16>(t, ".s16");
  add_conversions_to_integer<u16>(t, ".u16");
  add_conversions_to_integer<i32>(t, ".s32");
  add_conversions_to_integer<u32>(t, ".u32");
  add_conversions_to_integer<i64>(t, ".s64");
  add_conversions_to_integer<u64>(t, ".u64");
  add_conversions_to_float<float>(t, ".rn.f32");
  add_conversions_to_float<double>(t, ".rn.f64");
  const std::string type;
  ADD("cvt.f64.f32", convert<double, float>);
  ADD("cvt.rn.f32.f64", convert<float, double>);
  ADD("cvt.f32.bf16", float_of_bf16);
  ADD("cvt.f32.f16", float_of_f16);
  ADD("cvt.rn.bf16.f32", bf16_of_float);
  ADD("cvt.rn.f16.f32", f16_of_float);
  ADD("cvt.rn.bf16x2.f32", two_bf16);
  ADD("cvt.rn.relu.bf16x2.f32", two_bf16_relu);
  ADD("cvt.rn.f16x2.f32", two_f16);
  ADD("cvt.rna.tf32.f32", tf32_of_float);
  ADD("cvt.sat.f32.f32", saturate);
  ADD("cvt.rni.f32.f32", static_cast<float (*)(float)>(nearest));
  ADD("cvt.rzi.f32.f32", static_cast<float (*)(float)>(towards_zero));
  ADD("cvt.rmi.f32.f32", static_cast<float (*)(float)>(down));
  ADD("cvt.rpi.f32.f32", static_cast<float (*)(float)>(up));
}

Table make_table() {
  Table t;
  add_integers<i16>(t, ".s16");
  add_integers<u16>(t, ".u16");
  add_integers<i32>(t, ".s32");
  add_integers<u32>(t, ".u32");
  add_integers<i64>(t, ".s64");
  add_integers<u64>(t, ".u64");
  add_bits<u16>(t, ".b16");
  add_bits<u32>(t, ".b32");
  add_bits<u64>(t, ".b64");
  add_single(t);
  add_floats<double>(t, ".f64");
  add_conversions(t);
  const std::string type;
  ADD("fma.rn.f64", dfma);
  ADD("and.pred", and_of<bool>);
  ADD("or.pred", or_of<bool>);
  ADD("xor.pred", xor_of<bool>);
  ADD("not.pred", not_pred);
  ADD("mov.pred", copy<bool>);
  ADD("selp.pred", select<bool>);
  ADD("shf.l.wrap.b32", shf_wrap<shf_l>);
  ADD("shf.r.wrap.b32", shf_wrap<shf_r>);
  ADD("shf.l.clamp.b32", shf_clamp<shf_l>);
  ADD("shf.r.clamp.b32", shf_clamp<shf_r>);
  ADD("prmt.b32", prmt);
  ADD("popc.b32", popc32);
  ADD("popc.b64", popc64);
  ADD("clz.b32", clz32);
  ADD("clz.b64", clz64);
  ADD("bfind.u32", bfind32);
  ADD("bfind.shiftamt.u32", bfind_shift32);
  ADD("brev.b32", brev32);
  ADD("add.rz.f32", add_toward_zero);
  return t;
}

}  // namespace

const Arithmetic* find_arithmetic(const std::string& opcode) {
  static const Table table = make_table();
  const auto it = table.find(opcode);
  return it != table.end() ? &it->second : nullptr;
}

}  // namespace emu::ptx
