// Products with 4-bit codes, and with int8 codes where groups along K have scales of their own. Included inside an ISA's
// namespace, after its panel_*.h and kernels_linear.inl. Column blocks are 64 wide whatever the codec.
//
// Few rows: each reads the tiles in place, once, at the memory's speed. More rows: a stretch of K of one block is unpacked
// into a panel in the L1 cache, which all rows then pass over. Both make the same exact sums of each group and the same
// floats of them, so a row's result does not depend on which it took.

constexpr int64_t PANEL_K = 512 / CODE_BYTES;   // inputs of a panel: 32 KiB, beside a few rows
constexpr int64_t ROWS_IN_PLACE = 1;            // up to as many, unpacking costs more than it saves

struct AlignedBytes {
    explicit AlignedBytes(int64_t n) : p((uint8_t*)::operator new((size_t)n, std::align_val_t(64))) {}
    ~AlignedBytes() { ::operator delete(p, std::align_val_t(64)); }
    AlignedBytes(const AlignedBytes&) = delete;
    AlignedBytes& operator=(const AlignedBytes&) = delete;
    uint8_t* const p;
};

constexpr int8_t I4_LEVELS[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
static inline const int8_t* level_table(Codec c) { return c == Codec::nf4 ? NF4_LEVELS : I4_LEVELS; }

// Where the tile of a column block (i8: of its first or second half) and of inputs from k on lies, k a multiple of 32.
static inline const uint8_t* tile_4bit(const Slice& s, int64_t block, int64_t k) { return s.codes + k / s.ks * s.ks * s.n / 2 + block * 32 * s.ks + k % s.ks * 32; }
static inline const uint8_t* tile_i8(const Slice& s, int64_t half, int64_t k) { return s.codes + k / s.ks * s.ks * s.n + half * 32 * s.ks + k % s.ks * 32; }

// Group scales of sixteen channels.
static inline V16 group_scales(const Slice& s, int64_t block, int64_t group, int c) {
    const int64_t groups = s.Kp / s.group;
    if (s.codec == Codec::i8) return vload_half(s.group_scales + ((2 * block + c / 2) * groups + group) * 32 + c % 2 * 16);
    return vload_half(s.group_scales + (block * groups + group) * 64 + 16 * c);
}

// What a group's sums become. `sums` of null: floats, else the sums themselves, [M][groups][stride].
struct GroupedJob {
    const Rows& x;
    const Slice& s;
    const Mat& out;
    const float* bias;
    int32_t* sums;
    int64_t stride;
    int64_t group, groups;   // inputs that share a scale, and their number: K and 1 where a row has one

    GroupedJob(const Rows& r, const Slice& w, const Mat& o, const float* b, int32_t* i, int64_t t)
        : x(r), s(w), out(o), bias(b), sums(i), stride(t), group(r.group ? r.group : w.Kp), groups(w.Kp / group) {}
    float* row(int64_t m, int64_t block) const { return out.data + m * out.stride + s.n0 + 64 * block; }
    int32_t* sum(int64_t m, int64_t g, int64_t block) const { return sums + (m * groups + g) * stride + s.n0 + 64 * block; }
    I16 start(int64_t m, int64_t g) const { return iset((int32_t)((uint32_t)-CORRECTION * (uint32_t)x.sums[m * groups + g])); }
};

static inline void add_bias(const GroupedJob& j, int64_t m, int64_t block, int c, V16 y) {
    if (j.bias) y = vadd(y, vload(j.bias + j.s.n0 + 64 * block + 16 * c));
    vstore(j.row(m, block) + 16 * c, y);
}

// --- in place ---------------------------------------------------------------------------------------------------------------

static inline void sums_in_place(const GroupedJob& j, int64_t m, const int8_t* a, Levels levels, int64_t block, int64_t g, I16 (&sums)[4]) {
    const Slice& s = j.s;
    const int64_t end = (g + 1) * j.group;
    if (s.codec != Codec::i8) {
        for (auto& v : sums) v = j.start(m, g);
        for (int64_t k = g * j.group, n; k < end; k += n) {   // per K slice: a group of an i8 or per-channel tensor may lie in two
            n = end - k < s.ks - k % s.ks ? end - k : s.ks - k % s.ks;
            row_sums(tile_4bit(s, block, k), n / 32, a + k, levels, sums);
        }
        return;
    }
    alignas(64) int32_t half[2][1][32] = {};
    for (int64_t k = g * j.group, n; k < end; k += n) {
        n = end - k < s.ks - k % s.ks ? end - k : s.ks - k % s.ks;
        for (int h = 0; h < 2; h++) tile_i8<1>(a + k, j.x.Kp, tile_i8(s, 2 * block + h, k), n / 32, half[h], j.x.full_range);
    }
    for (int c = 0; c < 4; c++) sums[c] = iadd(j.start(m, g), iload(half[c / 2][0] + c % 2 * 16));
}

static void rows_in_place(const GroupedJob& j, int64_t m0, int64_t m1, int64_t b0, int64_t b1) {
    const Rows& x = j.x;
    const bool tiles_4bit = j.s.codec != Codec::i8;
    const AlignedBytes split(tiles_4bit ? (m1 - m0) * x.Kp : 64);
    const Levels levels = levels_of(level_table(j.s.codec));
    if (tiles_4bit) split_row(x.codes + m0 * x.Kp, (m1 - m0) * x.Kp, (int8_t*)split.p);
    for (int64_t b = b0; b < b1; b++)
        for (int64_t m = m0; m < m1; m++) {
            const int8_t* a = tiles_4bit ? (const int8_t*)split.p + (m - m0) * x.Kp : x.codes + m * x.Kp;
            V16 y[4] = {vzero(), vzero(), vzero(), vzero()};
            I16 sums[4] = {iset(0), iset(0), iset(0), iset(0)};
            for (int64_t g = 0; g < j.groups; g++) {
                sums_in_place(j, m, a, levels, b, g, sums);
                if (j.sums) { for (int c = 0; c < 4; c++) istore(j.sum(m, g, b) + 16 * c, sums[c]); continue; }
                if (!x.group) break;
                const V16 scale = vset(x.scales[m * j.groups + g]);
                if (j.s.group) for (int c = 0; c < 4; c++) y[c] = vfma(vfloat(sums[c]), vmul(scale, group_scales(j.s, b, g, c)), y[c]);
                else for (int c = 0; c < 4; c++) y[c] = vfma(vfloat(sums[c]), scale, y[c]);
            }
            if (j.sums) continue;
            for (int c = 0; c < 4; c++) {
                const V16 channel = vload(j.s.scales + 64 * b + 16 * c);
                add_bias(j, m, b, c, x.group ? vmul(channel, y[c]) : vmul(vfloat(sums[c]), vmul(vset(x.scales[m]), channel)));
            }
        }
}

// --- panels -----------------------------------------------------------------------------------------------------------------

// A stretch of K of one block, unpacked: whole groups, or part of the one group that is all of K.
struct Panel {
    const uint8_t* codes;
    const float* scales;   // [groups][64], or null
    int64_t block, k, length;
};

template <int S, int MR, size_t... J>
static inline __attribute__((always_inline)) void panel_step(I16 (&acc)[sizeof...(J)], const uint8_t* w, const Act (&x)[MR], std::index_sequence<J...>) {
    W16 u;
    (([&] {
         if constexpr (J % MR == 0) u = load_weights(w + 256 * S + 64 * (J / MR));
         acc[J] = dot_step<S>(acc[J], u, x[J % MR]);
     }()), ...);
}

// Sums of MR rows with PANEL_NC sixteens of channels over `steps` steps, from what `start` says; `end` takes them.
template <int MR, class Start, class End, size_t... J, size_t... S>
static inline void panel_sums(const uint8_t* w, const int8_t* a, int64_t lda, int64_t steps, Start&& start, End&& end, std::index_sequence<J...> all, std::index_sequence<S...>) {
    I16 acc[] = {start((int)(J % MR), (int)(J / MR))...};
    const uint8_t* last = w + 256 * steps;
    do {
        Act x[MR];
        x[0] = load_act(a);
        if constexpr (MR > 1) x[1] = load_act(a + lda);
        if constexpr (MR > 2) x[2] = load_act(a + 2 * lda);
        if constexpr (MR > 3) x[3] = load_act(a + 3 * lda);
        if constexpr (MR > 4) x[4] = load_act(a + 4 * lda);
        if constexpr (MR > 5) x[5] = load_act(a + 5 * lda);
        (panel_step<(int)S>(acc, w, x, all), ...);
        w += 256 * ACT_STEPS;
        a += STEP_CODES * ACT_STEPS;
    } while (w != last);
    (end((int)(J % MR), (int)(J / MR), acc[J]), ...);
}

// One group, or the part of it that the panel holds, of rows m .. m + MR - 1.
template <int MR> static inline void panel_group(const GroupedJob& j, const Panel& p, int64_t m, int64_t g, int64_t k, int64_t length) {
    const uint8_t* w = p.codes + (k - p.k) / STEP_CODES * 256;
    const float* scales = p.scales ? p.scales + (k - p.k) / j.group * 64 : nullptr;
    const int8_t* a = j.x.codes + m * j.x.Kp + k;
    const bool carried = k > g * j.group;   // the group began in an earlier panel
    constexpr auto all = std::make_index_sequence<MR * PANEL_NC>();
    constexpr auto steps = std::make_index_sequence<ACT_STEPS>();
    for (int c0 = 0; c0 < 4; c0 += PANEL_NC) {
        const int64_t n = length / STEP_CODES;
        if (j.sums || !j.x.group) {   // the sums themselves; without groups they rest in the output until K ends
            auto at = [&](int i, int c) { return (j.sums ? j.sum(m + i, g, p.block) : (int32_t*)j.row(m + i, p.block)) + 16 * (c0 + c); };
            panel_sums<MR>(w + 64 * c0, a, j.x.Kp, n, [&](int i, int c) { return carried ? iload(at(i, c)) : j.start(m + i, g); },
                           [&](int i, int c, I16 sum) { istore(at(i, c), sum); }, all, steps);
        } else if (scales) {
            panel_sums<MR>(w + 64 * c0, a, j.x.Kp, n, [&](int i, int) { return j.start(m + i, g); }, [&](int i, int c, I16 sum) {
                float* y = j.row(m + i, p.block) + 16 * (c0 + c);
                const V16 scale = vmul(vset(j.x.scales[(m + i) * j.groups + g]), vload(scales + 16 * (c0 + c)));
                vstore(y, vfma(vfloat(sum), scale, g ? vload(y) : vzero()));
            }, all, steps);
        } else {
            panel_sums<MR>(w + 64 * c0, a, j.x.Kp, n, [&](int i, int) { return j.start(m + i, g); }, [&](int i, int c, I16 sum) {
                float* y = j.row(m + i, p.block) + 16 * (c0 + c);
                vstore(y, vfma(vfloat(sum), vset(j.x.scales[(m + i) * j.groups + g]), g ? vload(y) : vzero()));
            }, all, steps);
        }
    }
}

template <int MR> static inline void panel_rows(const GroupedJob& j, const Panel& p, int64_t m) {
    const int64_t step = j.group < p.length ? j.group : p.length;
    for (int64_t k = p.k; k < p.k + p.length; k += step) panel_group<MR>(j, p, m, k / j.group, k, step);
    if (j.sums || p.k + p.length < j.s.Kp) return;
    for (int i = 0; i < MR; i++)
        for (int c = 0; c < 4; c++) {
            const V16 channel = vload(j.s.scales + 64 * p.block + 16 * c);
            const float* y = j.row(m + i, p.block) + 16 * c;
            add_bias(j, m + i, p.block, c, j.x.group ? vmul(channel, vload(y)) : vmul(vfloat(iload((const int32_t*)y)), vmul(vset(j.x.scales[m + i]), channel)));
        }
}

static void unpack(const GroupedJob& j, Levels levels, int64_t block, int64_t k, int64_t length, uint8_t* codes, float* scales) {
    const Slice& s = j.s;
    for (int64_t i = 0; i < length; i += 32) {
        uint8_t* to = codes + i / STEP_CODES * 256;
        if (s.codec != Codec::i8) unpack_4bit(tile_4bit(s, block, k + i), levels, to);
        else for (int h = 0; h < 2; h++) unpack_i8(tile_i8(s, 2 * block + h, k + i), to + 128 * h);
    }
    if (scales)
        for (int64_t g = 0; g < length / s.group; g++)
            for (int c = 0; c < 4; c++) vstore(scales + 64 * g + 16 * c, group_scales(s, block, k / s.group + g, c));
}

static void rows_by_panels(const GroupedJob& j, int64_t m0, int64_t m1, int64_t b0, int64_t b1) {
    const int64_t K = j.s.Kp, whole = j.x.group ? (PANEL_K < j.group ? j.group : PANEL_K / j.group * j.group) : PANEL_K;
    const int64_t longest = whole < K ? whole : K, code_bytes = longest * 64 * CODE_BYTES;
    const AlignedBytes memory(code_bytes + (j.s.group ? longest / j.s.group * 256 : 0));
    float* scales = j.s.group && !j.sums ? (float*)(memory.p + code_bytes) : nullptr;
    const Levels levels = levels_of(level_table(j.s.codec));
    for (int64_t k = 0; k < K; k += longest) {
        const int64_t length = longest < K - k ? longest : K - k;
        for (int64_t b = b0; b < b1; b++) {
            unpack(j, levels, b, k, length, memory.p, scales);
            const Panel p = {memory.p, scales, b, k, length};
            for_panels<PANEL_MR>(m0, m1, [&](auto rows, int64_t m) { panel_rows<decltype(rows)::value>(j, p, m); });
        }
    }
}

static void grouped(const GroupedJob& j, int64_t m0, int64_t m1, int64_t b0, int64_t b1) {
    if (m1 - m0 <= ROWS_IN_PLACE) rows_in_place(j, m0, m1, b0, b1);
    else rows_by_panels(j, m0, m1, b0, b1);
}

static void linear_grouped(const Rows& x, int64_t m0, int64_t m1, const Slice& s, int64_t b0, int64_t b1, const Mat& out, const float* bias) {
    grouped(GroupedJob(x, s, out, bias, nullptr, 0), m0, m1, b0, b1);
}

static void accumulate_grouped(const Rows& x, const Slice& s, int64_t b0, int64_t b1, int32_t* out, int64_t stride) {
    const Mat none = {};
    grouped(GroupedJob(x, s, none, nullptr, out, stride), 0, x.M, b0, b1);
}

static void inflate(Codec codec, const uint8_t* src, int64_t tiles, int8_t* first, int8_t* second) {
    const Levels levels = levels_signed(level_table(codec));
    for (int64_t t = 0; t < tiles; t++) inflate_tile(src + 1024 * t, levels, first + 1024 * t, second + 1024 * t);
}
