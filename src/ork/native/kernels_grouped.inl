// Products with 4-bit codes, and with int8 codes where groups along K have scales of their own. Included inside an ISA's
// namespace, after its panel_*.h and kernels_linear.inl. Column blocks are 64 wide whatever the codec.
//
// Few rows: each reads the tiles in place, once, at the memory's speed. More rows: a stretch of K of one block is unpacked
// into a panel in the L1 cache, which all rows then pass over. Both make the same exact sums of each group and the same
// floats of them, so a row's result does not depend on which it took.

constexpr int64_t PANEL_K = 512 / CODE_BYTES;   // inputs of a panel: 32 KiB, beside a few rows
constexpr int64_t ROWS_IN_PLACE = 6;            // up to as many, unpacking costs more than it saves

struct AlignedBytes {
    explicit AlignedBytes(int64_t n) : p((uint8_t*)::operator new((size_t)n, std::align_val_t(64))) {}
    ~AlignedBytes() { ::operator delete(p, std::align_val_t(64)); }
    AlignedBytes(const AlignedBytes&) = delete;
    AlignedBytes& operator=(const AlignedBytes&) = delete;
    uint8_t* const p;
};

constexpr int8_t I4_LEVELS[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
static inline const int8_t* level_table(Codec c) { return c == Codec::nf4 ? NF4_LEVELS : I4_LEVELS; }

// A walk along K through one column of tiles (32 bytes a K whatever the codec): those of a K slice follow each other.
class Walk {
  public:
    Walk(const Slice& s, int64_t column, int64_t k = 0) : ks_(s.ks), left_(s.ks - k % s.ks) {
        const int64_t columns = s.n / (s.codec == Codec::i8 ? GROUP_I8 : GROUP_I4), length = 32 * s.ks;
        p_ = s.codes + (k / s.ks * columns + column) * length + k % s.ks * 32;
        jump_ = (columns - 1) * length;
    }
    int64_t run(int64_t most) const { return most < left_ ? most : left_; }   // inputs that lie together from here on
    const uint8_t* take(int64_t inputs) {                                      // no more than that
        const uint8_t* p = p_;
        p_ += inputs * 32;
        left_ -= inputs;
        if (left_ == 0) { p_ += jump_; left_ = ks_; }
        return p;
    }

  private:
    const uint8_t* p_;
    int64_t ks_, left_, jump_;
};

// Group scales of sixteen channels.
static inline V16 group_scales(const Slice& s, int64_t block, int64_t groups, int64_t group, int c) {
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
};

// Sums begin at this where weights are u8 (see CORRECTION), from the row's code sum.
static inline I16 starting_sum(int32_t code_sum) { return iset((int32_t)((uint32_t)-CORRECTION * (uint32_t)code_sum)); }

static inline V16 scaled_sum(const GroupedJob& j, int64_t m, int64_t block, int c, I16 sum) {
    return vmul(vfloat(sum), vmul(vset(j.x.scales[m]), vload(j.s.scales + 64 * block + 16 * c)));
}
static inline void add_bias(const GroupedJob& j, int64_t m, int64_t block, int c, V16 y) {
    if (j.bias) y = vadd(y, vload(j.bias + j.s.n0 + 64 * block + 16 * c));
    vstore(j.row(m, block) + 16 * c, y);
}

// --- in place ---------------------------------------------------------------------------------------------------------------

// Sums of the next group of a row: `walk` holds the block's column of tiles, or int8's two.
template <bool I8> static inline void sums_in_place(const int8_t* a, int64_t group, bool full_range, Levels levels, Walk (&walk)[2], I16 (&sums)[4]) {
    if constexpr (!I8) {
        for (int64_t k = 0, n; k < group; k += n) {
            n = walk[0].run(group - k);
            row_sums(walk[0].take(n), n / 32, a + k, levels, sums);
        }
    } else {
        for (int64_t k = 0, n; k < group; k += n) {
            n = walk[0].run(group - k);
            for (int h = 0; h < 2; h++) row_sums_i8(walk[h].take(n), n / 32, a + k, full_range, sums[2 * h], sums[2 * h + 1]);
        }
    }
}

enum class Made { sums, one_scale, row_scales, both_scales };   // of a group: the integers; floats of one, by row or by both

template <bool I8, Made MADE> static void rows_in_place(const GroupedJob& j, int64_t m0, int64_t m1, int64_t b0, int64_t b1) {
    const Rows& x = j.x;
    const Slice& s = j.s;
    const AlignedBytes split(I8 ? 64 : (m1 - m0) * x.Kp);
    const Levels levels = levels_of(level_table(s.codec));
    if (!I8) split_row(x.codes + m0 * x.Kp, (m1 - m0) * x.Kp, (int8_t*)split.p);
    const int64_t groups = j.groups, group = j.group;
    constexpr int G = I8 ? GROUP_I8 : GROUP_I4;
    for (int64_t b = b0; b < b1; b++)
        for (int64_t m = m0; m < m1; m++) {
            const int8_t* a = I8 ? x.codes + m * x.Kp : (const int8_t*)split.p + (m - m0) * x.Kp;
            const int32_t* code_sums = x.sums + m * groups;
            const float* scales = x.scales + m * groups;
            const uint16_t* weight_scales = MADE == Made::both_scales ? s.group_scales + 64 * b * groups : nullptr;
            Walk walk[2] = {{s, I8 ? 2 * b : b}, {s, I8 ? 2 * b + 1 : b}};
            V16 y[4] = {vzero(), vzero(), vzero(), vzero()};
            for (int64_t g = 0; g < groups; g++, a += group) {
                const I16 start = starting_sum(code_sums[g]);
                I16 sums[4] = {start, start, start, start};
                sums_in_place<I8>(a, group, x.full_range, levels, walk, sums);
                const V16 scale = vset(scales[g]);
                for (int c = 0; c < 4; c++) {
                    if constexpr (MADE == Made::sums) istore(j.sum(m, g, b) + 16 * c, sums[c]);
                    if constexpr (MADE == Made::one_scale) y[c] = vmul(vfloat(sums[c]), vmul(scale, vload(s.scales + 64 * b + 16 * c)));
                    if constexpr (MADE == Made::row_scales) y[c] = vfma(vfloat(sums[c]), scale, y[c]);
                    if constexpr (MADE == Made::both_scales) {
                        const uint16_t* w = weight_scales + (16 * c / G * groups + g) * G + 16 * c % G;
                        __builtin_prefetch(w + 512);
                        y[c] = vfma(vfloat(sums[c]), vmul(scale, vload_half(w)), y[c]);
                    }
                }
            }
            if constexpr (MADE == Made::one_scale) for (int c = 0; c < 4; c++) add_bias(j, m, b, c, y[c]);
            else if constexpr (MADE != Made::sums) for (int c = 0; c < 4; c++) add_bias(j, m, b, c, vmul(vload(s.scales + 64 * b + 16 * c), y[c]));
        }
}

// --- panels -----------------------------------------------------------------------------------------------------------------

// A stretch of K of one block, unpacked: whole groups, or part of the one group that is all of K.
struct Panel {
    const uint8_t* codes;
    const float* scales;   // [groups][64], or null
    int64_t block, k, length;
    float* carry;          // [row - first][64]: the floats, or the integers of the one group, so far
    int64_t first;
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
static inline __attribute__((always_inline)) void panel_sums(const uint8_t* w, const int8_t* a, int64_t lda, int64_t steps, Start&& start, End&& end, std::index_sequence<J...> all, std::index_sequence<S...>) {
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
        if constexpr (MR > 6) x[6] = load_act(a + 6 * lda);
        if constexpr (MR > 7) x[7] = load_act(a + 7 * lda);
        (panel_step<(int)S>(acc, w, x, all), ...);
        w += 256 * ACT_STEPS;
        a += STEP_CODES * ACT_STEPS;
    } while (w != last);
    (end((int)(J % MR), (int)(J / MR), acc[J]), ...);
}

// Rows m .. m + MR - 1 with a panel. What is carried from group to group lies in `y`, not in the output, whose rows may lie
// a multiple of 4 KiB apart: loads would wait for stores that only look alike, and few sets of a cache would hold them all.
template <int MR, bool SCALED> static inline void panel_groups(const GroupedJob& j, const Panel& p, int64_t m, float (*y)[64]) {
    const int64_t groups = j.groups, group = j.group, lda = j.x.Kp, first = p.k / group, count = p.length / group, n = group / STEP_CODES;
    const int8_t* a = j.x.codes + m * lda + p.k;
    const int32_t* code_sums = j.x.sums + m * groups + first;
    const float* row_scales = j.x.scales + m * groups + first;
    for (int64_t g = 0; g < count; g++)
        for (int c0 = 0; c0 < 4; c0 += PANEL_NC) {
            asm volatile("" : : : "memory");   // or the compiler keeps y in registers that it then spills, beside y
            I16 start[MR];
            V16 scale[MR];
            for (int i = 0; i < MR; i++) start[i] = starting_sum(code_sums[i * groups + g]);
            const float* w = SCALED ? p.scales + 64 * g + 16 * c0 : nullptr;
            panel_sums<MR>(p.codes + g * n * 256 + 64 * c0, a + g * group, lda, n, [&](int i, int) { return start[i]; }, [&](int i, int c, I16 sum) {
                if (c == 0) scale[i] = vset(row_scales[i * groups + g]);
                float* to = y[i] + 16 * (c0 + c);
                vstore(to, vfma(vfloat(sum), SCALED ? vmul(scale[i], vload(w + 16 * c)) : scale[i], vload(to)));
            }, std::make_index_sequence<MR * PANEL_NC>(), std::make_index_sequence<ACT_STEPS>());
        }
}

// The same where the integers are wanted, or rest in `sum(i, c)` from panel to panel because one group is all of K.
template <int MR, class At> static inline void panel_integers(const GroupedJob& j, const Panel& p, int64_t m, int64_t g, int64_t k, int64_t length, At&& at) {
    const bool carried = k > g * j.group;
    for (int c0 = 0; c0 < 4; c0 += PANEL_NC)
        panel_sums<MR>(p.codes + (k - p.k) / STEP_CODES * 256 + 64 * c0, j.x.codes + m * j.x.Kp + k, j.x.Kp, length / STEP_CODES,
                       [&](int i, int c) { return carried ? iload(at(i) + 16 * (c0 + c)) : starting_sum(j.x.sums[(m + i) * j.groups + g]); },
                       [&](int i, int c, I16 sum) { istore(at(i) + 16 * (c0 + c), sum); },
                       std::make_index_sequence<MR * PANEL_NC>(), std::make_index_sequence<ACT_STEPS>());
}

template <int MR> static inline void panel_rows(const GroupedJob& j, const Panel& p, int64_t m) {
    if (j.sums) {
        const int64_t step = j.group < p.length ? j.group : p.length;
        for (int64_t k = p.k; k < p.k + p.length; k += step)
            panel_integers<MR>(j, p, m, k / j.group, k, step, [&](int i) { return j.sum(m + i, k / j.group, p.block); });
        return;
    }
    float (*y)[64] = (float (*)[64])(p.carry + 64 * (m - p.first));
    if (!j.x.group) panel_integers<MR>(j, p, m, 0, p.k, p.length, [&](int i) { return (int32_t*)y[i]; });
    else {
        if (p.k == 0) __builtin_memset(y, 0, sizeof(float) * 64 * MR);
        if (p.scales) panel_groups<MR, true>(j, p, m, y);
        else panel_groups<MR, false>(j, p, m, y);
    }
    if (p.k + p.length < j.s.Kp) return;
    for (int i = 0; i < MR; i++)
        for (int c = 0; c < 4; c++)
            add_bias(j, m + i, p.block, c, j.x.group ? vmul(vload(j.s.scales + 64 * p.block + 16 * c), vload(y[i] + 16 * c))
                                                     : scaled_sum(j, m + i, p.block, c, iload((const int32_t*)y[i] + 16 * c)));
}

static void unpack(const GroupedJob& j, Levels levels, int64_t block, int64_t k, int64_t length, uint8_t* codes, float* scales) {
    const Slice& s = j.s;
    const bool i8 = s.codec == Codec::i8;
    Walk walk[2] = {{s, i8 ? 2 * block : block, k}, {s, i8 ? 2 * block + 1 : block, k}};
    for (int64_t i = 0; i < length; i += 32) {
        uint8_t* to = codes + i / STEP_CODES * 256;
        if (!i8) unpack_4bit(walk[0].take(32), levels, to);
        else for (int h = 0; h < 2; h++) unpack_i8(walk[h].take(32), to + 128 * h);
    }
    if (scales)
        for (int64_t g = 0; g < length / s.group; g++)
            for (int c = 0; c < 4; c++) vstore(scales + 64 * g + 16 * c, group_scales(s, block, j.groups, k / s.group + g, c));
}

// As many rows at a time as fit the L2 cache, but not so few that unpacking for each lot shows.
static void rows_by_panels(const GroupedJob& j, int64_t m0, int64_t m1, int64_t b0, int64_t b1) {
    const int64_t K = j.s.Kp, whole = j.x.group ? (PANEL_K < j.group ? j.group : PANEL_K / j.group * j.group) : PANEL_K;
    const int64_t longest = whole < K ? whole : K, code_bytes = longest * 64 * CODE_BYTES, scale_bytes = j.s.group ? longest / j.s.group * 256 : 0;
    const int64_t fit = L2_ROWS_BYTES / K, lot = (fit < 128 ? 128 : fit > 512 ? 512 : fit) / PANEL_MR * PANEL_MR, most = lot < m1 - m0 ? lot : m1 - m0;
    const AlignedBytes memory(code_bytes + scale_bytes + most * 256);
    float* scales = j.s.group && !j.sums ? (float*)(memory.p + code_bytes) : nullptr;
    float* carry = (float*)(memory.p + code_bytes + scale_bytes);
    const Levels levels = levels_of(level_table(j.s.codec));
    for (int64_t first = m0; first < m1; first += lot) {
        const int64_t end = first + lot < m1 ? first + lot : m1;
        for (int64_t b = b0; b < b1; b++)
            for (int64_t k = 0; k < K; k += longest) {
                const int64_t length = longest < K - k ? longest : K - k;
                unpack(j, levels, b, k, length, memory.p, scales);
                const Panel p = {memory.p, scales, b, k, length, carry, first};
                // meanwhile the next stretch comes into the cache: few rows are done before memory would answer
                const int64_t panels = (end - first + PANEL_MR - 1) / PANEL_MR, share = (length * 32 / panels + 63) / 64 * 64;
                const char* next = (const char*)j.s.codes + 32 * (b * j.s.ks + k + length);   // where K is one slice
                for_panels<PANEL_MR>(first, end, [&](auto rows, int64_t m) {
                    for (int64_t i = 0; i < share; i += 64) __builtin_prefetch(next + i);
                    next += share;
                    panel_rows<decltype(rows)::value>(j, p, m);
                });
            }
    }
}

template <bool I8> static void few_rows(const GroupedJob& j, int64_t m0, int64_t m1, int64_t b0, int64_t b1) {
    if (j.sums) rows_in_place<I8, Made::sums>(j, m0, m1, b0, b1);
    else if (!j.x.group) rows_in_place<I8, Made::one_scale>(j, m0, m1, b0, b1);
    else if (!j.s.group) rows_in_place<I8, Made::row_scales>(j, m0, m1, b0, b1);
    else rows_in_place<I8, Made::both_scales>(j, m0, m1, b0, b1);
}

static void grouped(const GroupedJob& j, int64_t m0, int64_t m1, int64_t b0, int64_t b1) {
    if (m1 - m0 > ROWS_IN_PLACE) rows_by_panels(j, m0, m1, b0, b1);
    else if (j.s.codec == Codec::i8) few_rows<true>(j, m0, m1, b0, b1);
    else few_rows<false>(j, m0, m1, b0, b1);
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
