// 4-bit tiles and panels in plain C++: what the other panel_*.h do in registers.
//
// A 4-bit code stands for one of 16 int8 levels (i4: -8..7), so one table serves both codecs. A panel is a stretch of K of
// 64 channels, unpacked so that the channels are lanes: [K / STEP_CODES][64][STEP_CODES] codes of CODE_BYTES, 256 bytes a
// step; a dot product then needs no sum across lanes. 4-bit codes lie in it in the order of split_row or as they are, int8
// codes as they are. `Act` holds the codes of one row for ACT_STEPS steps.
#pragma once
#include <cstdint>

constexpr int PANEL_MR = 1;                        // rows held in registers,
constexpr int panel_nc(int) { return 4; }          // and with so many rows, sixteens of channels: 1, 2 or 4
constexpr int ROWS_IN_PLACE = 1, ROWS_AT_ONCE = 1; // rows that read the tiles themselves, and so many of them together
constexpr int AHEAD = 0;                           // inputs from a tile to what memory is asked for
constexpr int STEP_CODES = 4, ACT_STEPS = 1, CODE_BYTES = 1;
constexpr bool SPLIT_PANELS = true;                // the order of 4-bit codes in a panel: split_row's, or as they are

struct Levels { int8_t v[16]; };
static inline Levels levels_signed(const int8_t* table) { Levels l; __builtin_memcpy(l.v, table, 16); return l; }
static inline Levels levels_of(const int8_t* table) { return levels_signed(table); }   // as the dot products take them

// Each 32 codes in the order that row_sums and split panels want: here as they are, else even ones first.
static inline void split_row(const int8_t* a, int64_t n, int8_t* out) { __builtin_memcpy(out, a, (size_t)n); }

// sums[4 * r + c] += sums over whole tiles of 64 channels by 32 inputs with each of R <= ROWS_AT_ONCE rows, so far apart; plus
// CORRECTION times their code sums. The last pointer but one is where the walk will be AHEAD inputs on.
template <int R> static inline void row_sums(const uint8_t* w, int64_t tiles, const int8_t* a, int64_t, Levels levels, const uint8_t*, I16* sums) {
    for (int64_t t = 0; t < tiles; t++, a += 32)
        for (int c = 0; c < 64; c++, w += 16) {
            int32_t s = 0;
            for (int k = 0; k < 16; k++) s += levels.v[w[k] & 15] * a[2 * k] + levels.v[w[k] >> 4] * a[2 * k + 1];
            sums[c / 16].v[c % 16] += s;
        }
}

// The same of one int8 tile column: 32 channels, sums[2 * r + c].
template <int R> static inline void row_sums_i8(const uint8_t* w, int64_t tiles, const int8_t* a, int64_t, bool full_range, const uint8_t*, I16* sums) {
    tile_i8<1>(a, 0, w, tiles, (int32_t (*)[32])sums, full_range);
}

// One tile into 32 / STEP_CODES steps of a panel: of 64 channels; of 32 channels, `panel` being those of the first or second.
static inline void unpack_4bit(const uint8_t* tile, Levels levels, uint8_t* panel) {
    for (int c = 0; c < 64; c++)
        for (int k = 0; k < 32; k++) panel[k / 4 * 256 + c * 4 + k % 4] = (uint8_t)levels.v[tile[c * 16 + k / 2] >> 4 * (k % 2) & 15];
}
static inline void unpack_i8(const uint8_t* tile, uint8_t* panel) {
    for (int c = 0; c < 32; c++)
        for (int k = 0; k < 32; k++) panel[k / 4 * 256 + c * 4 + k % 4] = tile[c * 32 + k];
}

using W16 = const int8_t*;
using Act = const int8_t*;
static inline W16 load_weights(const uint8_t* p) { return (const int8_t*)p; }
static inline Act load_act(const int8_t* a) { return a; }
template <int> static inline I16 dot_step(I16 acc, W16 w, Act a) {   // acc[c] += the step's codes of channel c and the row
    for (int c = 0; c < 16; c++)
        for (int k = 0; k < 4; k++) acc.v[c] += w[4 * c + k] * a[k];
    return acc;
}

static inline void inflate_tile(const uint8_t* p, Levels signed_levels, int8_t* first, int8_t* second) {
    for (int i = 0; i < 1024; i++) {
        int8_t* out = i < 512 ? first + 2 * i : second + 2 * (i - 512);
        out[0] = signed_levels.v[p[i] & 15];
        out[1] = signed_levels.v[p[i] >> 4];
    }
}
