// FP8 block quantisation and dequantisation for CPUs: the numbers of reference.py, one pass over memory.
//
// The loops are branch-free so that the compiler vectorises them (-O3 -march=native, never -ffast-math: rounding is the
// contract). No threads: a rank has one core in tests, and an OpenMP runtime would not survive the fork of ranks.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int64_t BLOCK = 128;
constexpr float AMAX_FLOOR = 1e-30f;
constexpr uint32_t INFINITY_BITS = 0x7F800000u;

enum Kind { ROW = 0, COL = 1, TILE = 2 };

inline uint32_t bits(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float from_bits(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

struct bf16 { uint16_t raw; };
inline float load(const float* p, int64_t i) { return p[i]; }
inline float load(const bf16* p, int64_t i) { return from_bits(uint32_t(p[i].raw) << 16); }
inline void store(float* p, int64_t i, float x) { p[i] = x; }
inline void store(bf16* p, int64_t i, float x) {  // round to nearest even; NaN stays NaN
    uint32_t u = bits(x);
    uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    p[i].raw = uint16_t((u & 0x7FFFFFFFu) > INFINITY_BITS ? 0x7FC0u : rounded);
}

struct E4M3 {
    static constexpr int MANTISSA = 3, BIAS = 7;
    static constexpr float MAX = 448.0f, SUBNORMAL_STEP = 1.0f / 512, MAGIC = 16384.0f;  // MAGIC = 2^23 * step
    static constexpr uint32_t NOT_FINITE = 0x7F;  // 0x7F is NaN
};
struct E5M2 {
    static constexpr int MANTISSA = 2, BIAS = 15;
    static constexpr float MAX = 57344.0f, SUBNORMAL_STEP = 1.0f / 65536, MAGIC = 128.0f;
    static constexpr uint32_t NOT_FINITE = 0x7C;  // 0x7C is infinity, above it NaN
};

// Round to nearest even. No clamp: the scale keeps |x| within MAX up to its own rounding, and the largest code is the
// nearest one for 16 units more.
template <class F> inline uint8_t encode(float x) {
    constexpr int SHIFT = 23 - F::MANTISSA;
    uint32_t u = bits(x), sign = (u >> 24) & 0x80u, m = u & 0x7FFFFFFFu;
    float magnitude = from_bits(m);
    uint32_t normal = ((m + ((1u << (SHIFT - 1)) - 1) + ((m >> SHIFT) & 1u)) >> SHIFT) - ((127u - F::BIAS) << F::MANTISSA);
    uint32_t subnormal = bits(magnitude + F::MAGIC) - bits(F::MAGIC);  // the addition rounds to multiples of the step
    bool is_normal = m >= (uint32_t(127 - F::BIAS + 1) << 23);
    return uint8_t(sign | (is_normal ? normal : subnormal));
}

template <class F> inline float decode(uint8_t code) {
    constexpr int SHIFT = 23 - F::MANTISSA;
    uint32_t magnitude = code & 0x7Fu;
    float normal = from_bits((magnitude << SHIFT) + ((127u - F::BIAS) << 23));
    float subnormal = float(int32_t(magnitude)) * F::SUBNORMAL_STEP;
    float value = magnitude < (1u << F::MANTISSA) ? subnormal : normal;
    uint32_t special = F::NOT_FINITE == 0x7C && magnitude == 0x7C ? INFINITY_BITS : 0x7FC00000u;
    value = magnitude >= F::NOT_FINITE ? from_bits(special) : value;
    return from_bits(bits(value) | (uint32_t(code & 0x80u) << 24));
}

// `top`: bit pattern of the largest magnitude in the block; patterns of non-negative floats order like integers, and
// infinities and NaNs are the largest.
template <class F> inline float scale_of(uint32_t top, bool power_of_two, float* scale_inv) {
    if (top >= INFINITY_BITS) {
        *scale_inv = std::numeric_limits<float>::quiet_NaN();
        return *scale_inv;
    }
    float amax = std::max(from_bits(top), AMAX_FLOOR);
    if (power_of_two) {
        float scale = from_bits(bits(F::MAX / amax) & INFINITY_BITS);
        *scale_inv = 1.0f / scale;
        return scale;
    }
    *scale_inv = amax * (1.0f / F::MAX);
    return 1.0f / *scale_inv;
}

// Magnitudes of bf16 are compared as 16-bit numbers, twice as many at a time.
inline uint32_t magnitude_bits(const float* p, int64_t i) { return bits(p[i]) & 0x7FFFFFFFu; }
inline uint16_t magnitude_bits(const bf16* p, int64_t i) { return p[i].raw & 0x7FFFu; }
inline uint32_t widen(uint32_t top) { return top; }
inline uint32_t widen(uint16_t top) { return uint32_t(top) << 16; }

template <class T> inline auto largest(const T* p, int64_t n) {
    decltype(magnitude_bits(p, 0)) top = 0;
    for (int64_t i = 0; i < n; ++i) top = std::max(top, magnitude_bits(p, i));
    return top;
}

// bf16 times a power of two needs no floating point: the exponent moves, and the last mantissa bits are rounded away, in
// 16-bit lanes. True if that was right for all, false if some value is subnormal in FP8 (or zero).
template <class F> inline int16_t shifted(const bf16* x, int64_t i, int16_t offset) {
    return int16_t(int16_t(x[i].raw & 0x7FFFu) + offset);
}
template <class F> inline uint8_t rounded(const bf16* x, int64_t i, int16_t t) {
    constexpr int DROP = 7 - F::MANTISSA;
    int16_t code = int16_t(t + int16_t((1 << (DROP - 1)) - 1) + int16_t((t >> DROP) & 1)) >> DROP;
    return uint8_t(code | ((x[i].raw >> 8) & 0x80));
}
template <class F> inline int16_t offset_of(float scale) {  // of a power of two, in units of the last bf16 mantissa bit
    return int16_t((int32_t(bits(scale) >> 23) - 127 - (127 - F::BIAS)) * 128);
}

template <class F>
bool encode_shifted(const bf16* __restrict x, uint8_t* __restrict codes, int64_t n, int16_t offset) {
    int16_t least = 0x7FFF;
    for (int64_t i = 0; i < n; ++i) {
        int16_t t = shifted<F>(x, i, offset);
        least = std::min(least, t);
        codes[i] = rounded<F>(x, i, t);
    }
    return least >= 128 + std::max<int16_t>(offset, 0);  // normal in FP8, and as bf16
}
template <class F>
bool encode_shifted(const bf16* __restrict x, uint8_t* __restrict codes, int64_t n, const int16_t* __restrict offset) {
    int16_t least = 0x7FFF;
    for (int64_t i = 0; i < n; ++i) {
        int16_t t = shifted<F>(x, i, offset[i]);
        least = std::min(least, std::min<int16_t>(t, t - offset[i]));
        codes[i] = rounded<F>(x, i, t);
    }
    return least >= 128;
}
template <class F, class Offset> bool encode_shifted(const float*, uint8_t*, int64_t, Offset) { return false; }

// As encode() for numbers that are normal in FP8: rounded in place, the sign stays above the exponent.
template <class F> inline uint8_t encode_normal(uint32_t u) {
    constexpr int SHIFT = 23 - F::MANTISSA;
    u += ((1u << (SHIFT - 1)) - 1) - ((127u - F::BIAS) << 23) + ((u >> SHIFT) & 1u);
    return uint8_t(((u >> SHIFT) & 0x7Fu) | ((u >> 24) & 0x80u));
}
inline float at(float scale, int64_t) { return scale; }
inline float at(const float* scale, int64_t i) { return scale[i]; }

// True if that was right for all, false if some number is subnormal in FP8 (or zero).
template <class F, class T, class Scale>
bool encode_normals(const T* __restrict x, uint8_t* __restrict codes, int64_t n, Scale scale) {
    uint32_t least = INFINITY_BITS;
    for (int64_t i = 0; i < n; ++i) {
        uint32_t u = bits(load(x, i) * at(scale, i));
        least = std::min(least, u & 0x7FFFFFFFu);
        codes[i] = encode_normal<F>(u);
    }
    return least >= (uint32_t(128 - F::BIAS) << 23);
}

template <class F, class T>
void encode_run(const T* __restrict x, uint8_t* __restrict codes, int64_t n, float scale, bool pow2) {
    if (scale != scale) { std::memset(codes, 0x7F, n); return; }
    if (pow2 ? encode_shifted<F>(x, codes, n, offset_of<F>(scale)) : encode_normals<F>(x, codes, n, scale)) return;
    for (int64_t i = 0; i < n; ++i) codes[i] = encode<F>(load(x, i) * scale);
}

template <class F, class T>
void encode_run(const T* __restrict x, uint8_t* __restrict codes, int64_t n, const float* __restrict scale,
                const int16_t* __restrict offset, bool pow2) {
    if (pow2 ? encode_shifted<F>(x, codes, n, offset) : encode_normals<F>(x, codes, n, scale)) return;
    for (int64_t i = 0; i < n; ++i) codes[i] = encode<F>(load(x, i) * scale[i]);
}

template <class F, class T>
void quantize_rows(const T* x, int64_t rows, int64_t columns, int64_t stride, bool pow2, uint8_t* codes, float* scales) {
    int64_t per_row = (columns + BLOCK - 1) / BLOCK;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t b = 0; b < per_row; ++b) {
            const T* p = x + r * stride + b * BLOCK;
            int64_t n = std::min(BLOCK, columns - b * BLOCK);
            float scale = scale_of<F>(widen(largest(p, n)), pow2, scales + r * per_row + b);
            encode_run<F>(p, codes + r * columns + b * BLOCK, n, scale, pow2);
        }
}

// Largest magnitude of each of n columns over some rows.
template <class T, class Top>
void largest_of_columns(const T* x, int64_t rows, int64_t n, int64_t stride, Top* __restrict top) {
    std::fill(top, top + n, Top(0));
    for (int64_t r = 0; r < rows; ++r) {
        const T* __restrict p = x + r * stride;
        for (int64_t i = 0; i < n; ++i) top[i] = std::max(top[i], magnitude_bits(p, i));
    }
}

// Several tiles at a time: the runs of one are too short for the memory's prefetchers.
template <class F, class T>
void quantize_tiles(const T* x, int64_t rows, int64_t columns, int64_t stride, bool pow2, uint8_t* codes, float* scales) {
    constexpr int64_t TILES = 4;
    int64_t across = (columns + BLOCK - 1) / BLOCK;
    for (int64_t r0 = 0; r0 < rows; r0 += BLOCK)
        for (int64_t c0 = 0; c0 < columns; c0 += TILES * BLOCK) {
            int64_t height = std::min(BLOCK, rows - r0), width = std::min(TILES * BLOCK, columns - c0);
            const T* p = x + r0 * stride + c0;
            decltype(magnitude_bits(x, 0)) top[TILES * BLOCK];
            float scale[TILES];
            largest_of_columns(p, height, width, stride, top);
            for (int64_t c = 0; c < width; c += BLOCK) {
                auto most = *std::max_element(top + c, top + std::min(width, c + BLOCK));
                scale[c / BLOCK] = scale_of<F>(widen(most), pow2, scales + (r0 / BLOCK) * across + (c0 + c) / BLOCK);
            }
            for (int64_t r = 0; r < height; ++r)
                for (int64_t c = 0; c < width; c += BLOCK)
                    encode_run<F>(p + r * stride + c, codes + (r0 + r) * columns + c0 + c, std::min(BLOCK, width - c),
                                  scale[c / BLOCK], pow2);
        }
}

// Stripes of 256 columns: 128 rows of them (64 to 128 KB) stay in the second-level cache between the two passes.
template <class F, class T>
void quantize_columns(const T* x, int64_t rows, int64_t columns, int64_t stride, bool pow2, uint8_t* codes, float* scales) {
    constexpr int64_t STRIPE = 256;
    for (int64_t r0 = 0; r0 < rows; r0 += BLOCK)
        for (int64_t c0 = 0; c0 < columns; c0 += STRIPE) {
            int64_t r1 = std::min(rows, r0 + BLOCK), n = std::min(STRIPE, columns - c0);
            decltype(magnitude_bits(x, 0)) top[STRIPE];
            float scale[STRIPE];
            int16_t offset[STRIPE];
            largest_of_columns(x + r0 * stride + c0, r1 - r0, n, stride, top);
            bool bad = false;
            for (int64_t i = 0; i < n; ++i) {
                scale[i] = scale_of<F>(widen(top[i]), pow2, scales + (r0 / BLOCK) * columns + c0 + i);
                offset[i] = offset_of<F>(scale[i]);
                bad |= widen(top[i]) >= INFINITY_BITS;
            }
            for (int64_t r = r0; r < r1; ++r) {
                const T* p = x + r * stride + c0;
                uint8_t* out = codes + r * columns + c0;
                encode_run<F>(p, out, n, scale, offset, pow2);
                if (bad)
                    for (int64_t i = 0; i < n; ++i)
                        if (widen(top[i]) >= INFINITY_BITS) out[i] = 0x7F;
            }
        }
}

template <class F, class T>
void quantize_as(const T* x, int64_t rows, int64_t columns, int64_t stride, int kind, bool pow2, uint8_t* codes, float* s) {
    if (kind == ROW) quantize_rows<F>(x, rows, columns, stride, pow2, codes, s);
    else if (kind == COL) quantize_columns<F>(x, rows, columns, stride, pow2, codes, s);
    else quantize_tiles<F>(x, rows, columns, stride, pow2, codes, s);
}

template <class F, class T>
void decode_run(const uint8_t* __restrict codes, const float* __restrict scale, T* __restrict out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store(out, i, decode<F>(codes[i]) * scale[i]);
}

template <class F, class T>
void decode_run(const uint8_t* __restrict codes, float scale, T* __restrict out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) store(out, i, decode<F>(codes[i]) * scale);
}

template <class F, class T>
void dequantize_as(const uint8_t* codes, const float* scales, int64_t rows, int64_t columns, int kind, T* out) {
    int64_t across = (columns + BLOCK - 1) / BLOCK;
    for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* p = codes + r * columns;
        T* o = out + r * columns;
        if (kind == COL) {
            decode_run<F>(p, scales + (r / BLOCK) * columns, o, columns);
            continue;
        }
        const float* s = scales + (kind == ROW ? r : r / BLOCK) * across;
        for (int64_t b = 0; b < across; ++b)
            decode_run<F>(p + b * BLOCK, s[b], o + b * BLOCK, std::min(BLOCK, columns - b * BLOCK));
    }
}

}  // namespace

extern "C" {

// x: rows x columns with `stride` elements between rows, bf16 or fp32. codes: rows x columns, contiguous.
void musa_titan_fp8_quantize(const void* x, int is_bf16, int64_t rows, int64_t columns, int64_t stride, int kind,
                             int is_e5m2, int pow2, uint8_t* codes, float* scales) {
    if (is_bf16) {
        auto p = static_cast<const bf16*>(x);
        if (is_e5m2) quantize_as<E5M2>(p, rows, columns, stride, kind, pow2, codes, scales);
        else quantize_as<E4M3>(p, rows, columns, stride, kind, pow2, codes, scales);
    } else {
        auto p = static_cast<const float*>(x);
        if (is_e5m2) quantize_as<E5M2>(p, rows, columns, stride, kind, pow2, codes, scales);
        else quantize_as<E4M3>(p, rows, columns, stride, kind, pow2, codes, scales);
    }
}

// out: rows x columns, contiguous, bf16 or fp32.
void musa_titan_fp8_dequantize(const uint8_t* codes, const float* scales, int64_t rows, int64_t columns, int kind,
                               int is_e5m2, int to_bf16, void* out) {
    if (to_bf16) {
        auto o = static_cast<bf16*>(out);
        if (is_e5m2) dequantize_as<E5M2>(codes, scales, rows, columns, kind, o);
        else dequantize_as<E4M3>(codes, scales, rows, columns, kind, o);
    } else {
        auto o = static_cast<float*>(out);
        if (is_e5m2) dequantize_as<E5M2>(codes, scales, rows, columns, kind, o);
        else dequantize_as<E4M3>(codes, scales, rows, columns, kind, o);
    }
}

}  // extern "C"
