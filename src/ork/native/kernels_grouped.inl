// Products with 4-bit codes, and with int8 codes where groups along K have scales of their own. Included inside an ISA's
// namespace, after its panel_*.h and kernels_linear.inl. Column blocks are 64 wide whatever the codec.
//
// A few rows read the tiles in place, at the memory's speed. More rows: a stretch of K of one block is unpacked into a
// panel in the L1 cache, which all rows then pass over. Both make the same exact sums of each group and the same floats of
// them, so a row's result does not depend on which it took.

constexpr int64_t PANEL_K = 512 / CODE_BYTES;   // inputs of a panel: 32 KiB, beside a few rows
constexpr int UNROLLED = ACT_STEPS > 1 ? ACT_STEPS : 32 / STEP_CODES;   // steps of a panel that are written out
constexpr int64_t FEW_ROWS = 16, FEW_K = 128;   // few rows wait for memory: short stretches, so that it answers meanwhile

struct AlignedBytes {
    explicit AlignedBytes(int64_t n) : p((uint8_t*)::operator new((size_t)n, std::align_val_t(64))) {}
    ~AlignedBytes() { ::operator delete(p, std::align_val_t(64)); }
    AlignedBytes(const AlignedBytes&) = delete;
    AlignedBytes& operator=(const AlignedBytes&) = delete;
    uint8_t* const p;
};

constexpr int8_t I4_LEVELS[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
static inline const int8_t* level_table(Codec c) { return c == Codec::nf4 ? NF4_LEVELS : I4_LEVELS; }

// A walk along K through one column of tiles (32 bytes a K whatever the codec), then the next but `step - 1`: those of a K
// slice follow each other. A second walk, AHEAD inputs on, says what to ask memory for.
class Walk {
  public:
    Walk(const Slice& s, int64_t column, int64_t step, int64_t k = 0)
        : s_(s), columns_(s.n / (s.codec == Codec::i8 ? GROUP_I8 : GROUP_I4)), step_(step), column_(column + k / s.Kp * step), k_(k % s.Kp) { find(); }
    int64_t run() const { return left_; }   // inputs that lie together from here on
    const uint8_t* take(int64_t inputs) {   // no more than that
        const uint8_t* p = p_;
        p_ += inputs * 32;
        left_ -= inputs;
        if (left_ == 0) {
            if ((k_ += s_.ks) == s_.Kp) { k_ = 0; column_ += step_; }
            find();
        }
        return p;
    }

  private:
    void find() {
        const int64_t in = k_ % s_.ks;
        k_ -= in;   // from here on where the K slice begins
        p_ = s_.codes + (k_ * columns_ + column_ * s_.ks + in) * 32;
        left_ = s_.ks - in;
    }
    const Slice& s_;
    const int64_t columns_, step_;
    int64_t column_, k_, left_;
    const uint8_t* p_;
};

// Calls f(codes, inputs, ahead) along the next `inputs` of a walk: as many at a time as lie together here and ahead.
template <class F> static inline void walk_on(Walk& walk, Walk& ahead, int64_t inputs, F&& f) {
    while (inputs > 0) {
        int64_t n = walk.run() < ahead.run() ? walk.run() : ahead.run();
        if (n > inputs) n = inputs;
        const uint8_t* next = ahead.take(n);
        f(walk.take(n), n, next);
        inputs -= n;
    }
}

// Group scales of sixteen channels.
static inline const uint16_t* group_scales(const Slice& s, int64_t block, int64_t groups, int64_t group, int c) {
    if (s.codec == Codec::i8) return s.group_scales + ((2 * block + c / 2) * groups + group) * 32 + c % 2 * 16;
    return s.group_scales + (block * groups + group) * 64 + 16 * c;
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

enum class Made { sums, one_scale, row_scales, both_scales };   // of a group: the integers; floats of one, by row or by both

// R rows with one column of tiles: one walk, and where the kernels below can, one look at each code. `codes` in their order.
template <bool I8, Made MADE, int R> static inline void column_in_place(const GroupedJob& j, int64_t m, const int8_t* codes, int64_t column, Levels levels) {
    constexpr int C = I8 ? 2 : 4, G = 16 * C;   // sixteens of channels in a column of tiles
    const Rows& x = j.x;
    const Slice& s = j.s;
    const int64_t groups = j.groups, group = j.group, b = column * G / 64;
    const int c0 = (int)(column * G % 64 / 16);
    const int32_t* code_sums = x.sums + m * groups;
    const float* scales = x.scales + m * groups;
    const uint16_t* weight_scales = MADE == Made::both_scales ? s.group_scales + column * groups * G : nullptr;
    Walk walk(s, column, 1), ahead(s, column, 1, AHEAD);
    V16 y[R * C];   // [R][C], but in one: only so does gcc take a row's for scalars
    for (V16& v : y) v = vzero();
    for (int64_t g = 0; g < groups; g++) {
        I16 sums[R * C];
        for (int i = 0; i < R * C; i++) sums[i] = starting_sum(code_sums[i / C * groups + g]);
        walk_on(walk, ahead, group, [&](const uint8_t* w, int64_t n, const uint8_t* next) {
            if constexpr (I8) row_sums_i8<R>(w, n / 32, codes, x.Kp, x.full_range, next, sums);
            else row_sums<R>(w, n / 32, codes, x.Kp, levels, next, sums);
            codes += n;
        });
        if constexpr (MADE == Made::both_scales) for (int i = 0; i < G; i += 32) __builtin_prefetch(weight_scales + 512 + i);
        for (int i = 0; i < R * C; i++) {   // one loop, for the same reason
            const int c = i / R, r = i % R;
            const V16 scale = vset(scales[r * groups + g]);
            if constexpr (MADE == Made::sums) istore(j.sum(m + r, g, b) + 16 * (c0 + c), sums[r * C + c]);
            if constexpr (MADE == Made::one_scale) y[r * C + c] = scaled_sum(j, m + r, b, c0 + c, sums[r * C + c]);
            if constexpr (MADE == Made::row_scales) y[r * C + c] = vfma(vfloat(sums[r * C + c]), scale, y[r * C + c]);
            if constexpr (MADE == Made::both_scales) y[r * C + c] = vfma(vfloat(sums[r * C + c]), vmul(scale, vload_half(weight_scales + 16 * c)), y[r * C + c]);
        }
        if constexpr (MADE == Made::both_scales) weight_scales += G;
    }
    if constexpr (MADE != Made::sums)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) add_bias(j, m + r, b, c0 + c, MADE == Made::one_scale ? y[r * C + c] : vmul(vload(s.scales + 64 * b + 16 * (c0 + c)), y[r * C + c]));
}

template <bool I8, Made MADE> static void rows_in_place(const GroupedJob& j, int64_t m0, int64_t m1, int64_t b0, int64_t b1) {
    const Rows& x = j.x;
    const AlignedBytes split(I8 ? 64 : (m1 - m0) * x.Kp);
    const Levels levels = levels_of(level_table(j.s.codec));
    if (!I8) split_row(x.codes + m0 * x.Kp, (m1 - m0) * x.Kp, (int8_t*)split.p);
    const int8_t* codes = I8 ? x.codes + m0 * x.Kp : (const int8_t*)split.p;
    constexpr int per_block = I8 ? 2 : 1;
    for (int64_t column = b0 * per_block; column < b1 * per_block; column++)
        for_panels<ROWS_AT_ONCE>(m0, m1, [&](auto rows, int64_t m) { column_in_place<I8, MADE, decltype(rows)::value>(j, m, codes + (m - m0) * x.Kp, column, levels); });
}

// --- panels -----------------------------------------------------------------------------------------------------------------

// Rows as panels take them: where they are, or copied into the order of the codes, and then no power of two apart, or few
// sets of a cache would hold them all.
struct Lot {
    int64_t first, stride;
    const int8_t* codes;     // [rows][stride]
    const int32_t* starts;   // [rows][groups]
    float* carry;            // [rows][64]: a block's floats, or the integers of the one group, so far
};

// A stretch of K of one block, unpacked: whole groups, or part of the one group that is all of K.
struct Panel {
    const uint8_t* codes;
    const float* scales;   // [groups][64], or null
    int64_t block, k, length;
};

// acc[i * NC + c] += codes of row i times those of the sixteen channels c, in step S of `w`.
template <int S, int NC, size_t... I>
static inline __attribute__((always_inline)) void panel_step(I16 (&acc)[sizeof...(I) * NC], const uint8_t* w, const int8_t* a, int64_t lda, std::index_sequence<I...>) {
    W16 u[NC];
    u[0] = load_weights(w + 256 * S);
    if constexpr (NC > 1) u[1] = load_weights(w + 256 * S + 64);
    if constexpr (NC > 2) u[2] = load_weights(w + 256 * S + 128);
    if constexpr (NC > 3) u[3] = load_weights(w + 256 * S + 192);
    (([&]() __attribute__((always_inline)) {
         const Act x = load_act(a + (int64_t)I * lda + S / ACT_STEPS * ACT_STEPS * STEP_CODES);   // once for the steps that it serves
         acc[I * NC] = dot_step<S % ACT_STEPS>(acc[I * NC], u[0], x);
         if constexpr (NC > 1) acc[I * NC + 1] = dot_step<S % ACT_STEPS>(acc[I * NC + 1], u[1], x);
         if constexpr (NC > 2) acc[I * NC + 2] = dot_step<S % ACT_STEPS>(acc[I * NC + 2], u[2], x);
         if constexpr (NC > 3) acc[I * NC + 3] = dot_step<S % ACT_STEPS>(acc[I * NC + 3], u[3], x);
     }()), ...);
}
template <int MR, int NC, size_t... S>
static inline __attribute__((always_inline)) void panel_steps(I16 (&acc)[MR * NC], const uint8_t* w, const int8_t* a, int64_t lda, std::index_sequence<S...>) {
    (panel_step<(int)S, NC>(acc, w, a, lda, std::make_index_sequence<MR>()), ...);
}

// Sums of MR rows with NC sixteens of channels over `steps` steps, from what `start` says; `end` takes them.
template <int MR, int NC, class Start, class End, size_t... J>
static inline __attribute__((always_inline)) void panel_sums(const uint8_t* w, const int8_t* a, int64_t lda, int64_t steps, Start&& start, End&& end, std::index_sequence<J...>) {
    I16 acc[] = {start((int)(J / NC), (int)(J % NC))...};
    const uint8_t* last = w + 256 * steps;
    do {
        if (!SPLIT_PANELS) for (int i = 0; i < MR; i++) __builtin_prefetch(a + (MR + i) * lda);   // the next rows, which lie apart
        panel_steps<MR, NC>(acc, w, a, lda, std::make_index_sequence<UNROLLED>());
        w += 256 * UNROLLED;
        a += STEP_CODES * UNROLLED;
    } while (w != last);
    (end((int)(J / NC), (int)(J % NC), acc[J]), ...);
}

// Rows m .. m + MR - 1 with a panel. What is carried from panel to panel lies in `to`, not in the output, whose rows may lie
// a multiple of 4 KiB apart: loads would wait for stores that only look alike, and few sets of a cache would hold them all.
template <int MR, bool SCALED, size_t... J> static inline void panel_groups(const GroupedJob& j, const Lot& lot, const Panel& p, int64_t m, float (*to)[64], std::index_sequence<J...> all) {
    constexpr int NC = panel_nc(MR);
    const int64_t groups = j.groups, group = j.group, lda = lot.stride, first = p.k / group, count = p.length / group, n = group / STEP_CODES;
    for (int c0 = 0; c0 < 4; c0 += NC) {
        const int8_t* a = lot.codes + (m - lot.first) * lda + p.k;
        const int32_t* starts = lot.starts + (m - lot.first) * groups + first;
        const float* row_scales = j.x.scales + m * groups + first;
        const float* scales = SCALED ? p.scales + 16 * c0 : nullptr;
        const uint8_t* w = p.codes + 64 * c0;
        V16 y[] = {p.k == 0 ? vzero() : vload(to[J / NC] + 16 * (c0 + J % NC))...};
        for (int i = 0; !SPLIT_PANELS && i < MR; i++) {   // the next rows', as in panel_sums
            __builtin_prefetch(starts + (MR + i) * groups);
            __builtin_prefetch(row_scales + (MR + i) * groups);
        }
        for (int64_t g = 0; g < count; g++) {
            panel_sums<MR, NC>(w, a, lda, n, [&](int i, int) { return iset(starts[i * groups]); }, [&](int i, int c, I16 sum) {
                const V16 scale = vset(row_scales[i * groups]);
                y[i * NC + c] = vfma(vfloat(sum), SCALED ? vmul(scale, vload(scales + 16 * c)) : scale, y[i * NC + c]);
            }, all);
            w += n * 256;
            a += group;
            starts++;
            row_scales++;
            if (SCALED) scales += 64;
        }
        (vstore(to[J / NC] + 16 * (c0 + J % NC), y[J]), ...);
    }
}

// The same where the integers are wanted, or rest in `sum(i, c)` from panel to panel because one group is all of K.
template <int MR, class At> static inline void panel_integers(const GroupedJob& j, const Lot& lot, const Panel& p, int64_t m, int64_t g, int64_t k, int64_t length, At&& at) {
    constexpr int NC = panel_nc(MR);
    const bool carried = k > g * j.group;
    for (int c0 = 0; c0 < 4; c0 += NC)
        panel_sums<MR, NC>(p.codes + (k - p.k) / STEP_CODES * 256 + 64 * c0, lot.codes + (m - lot.first) * lot.stride + k, lot.stride, length / STEP_CODES,
                       [&](int i, int c) { return carried ? iload(at(i) + 16 * (c0 + c)) : iset(lot.starts[(m - lot.first + i) * j.groups + g]); },
                       [&](int i, int c, I16 sum) { istore(at(i) + 16 * (c0 + c), sum); },
                       std::make_index_sequence<MR * NC>());
}

template <int MR> static inline void panel_rows(const GroupedJob& j, const Lot& lot, const Panel& p, int64_t m) {
    if (j.sums) {
        const int64_t step = j.group < p.length ? j.group : p.length;
        for (int64_t k = p.k; k < p.k + p.length; k += step)
            panel_integers<MR>(j, lot, p, m, k / j.group, k, step, [&](int i) { return j.sum(m + i, k / j.group, p.block); });
        return;
    }
    float (*y)[64] = (float (*)[64])(lot.carry + 64 * (m - lot.first));
    if (!j.x.group) panel_integers<MR>(j, lot, p, m, 0, p.k, p.length, [&](int i) { return (int32_t*)y[i]; });
    else {
        if (p.scales) panel_groups<MR, true>(j, lot, p, m, y, std::make_index_sequence<MR * panel_nc(MR)>());
        else panel_groups<MR, false>(j, lot, p, m, y, std::make_index_sequence<MR * panel_nc(MR)>());
    }
    if (p.k + p.length < j.s.Kp) return;
    for (int i = 0; i < MR; i++)
        for (int c = 0; c < 4; c++)
            add_bias(j, m + i, p.block, c, j.x.group ? vmul(vload(j.s.scales + 64 * p.block + 16 * c), vload(y[i] + 16 * c))
                                                     : scaled_sum(j, m + i, p.block, c, iload((const int32_t*)y[i] + 16 * c)));
}

// One or two columns of tiles, and where they will be AHEAD inputs on.
struct BlockWalk {
    bool i8;
    Walk walk[2], ahead[2];
    BlockWalk(const Slice& s, int64_t block) : BlockWalk(s, s.codec == Codec::i8 ? 2 : 1, block) {}
    BlockWalk(const Slice& s, int64_t n, int64_t block)
        : i8(n == 2), walk{{s, n * block, n}, {s, n * block + 1, n}}, ahead{{s, n * block, n, AHEAD}, {s, n * block + 1, n, AHEAD}} {}
    void unpack(Levels levels, int64_t length, uint8_t* codes) {
        for (int h = 0; h < 1 + i8; h++) {
            uint8_t* to = codes + 128 * h;
            walk_on(walk[h], ahead[h], length, [&](const uint8_t* w, int64_t n, const uint8_t* next) {
                for (int64_t i = 0; i < n; i += 32, w += 1024, next += 1024, to += 32 / STEP_CODES * 256) {
                    if (i8) unpack_i8(w, to);
                    else unpack_4bit(w, levels, to);
                    for (int l = 0; l < 1024; l += 64) __builtin_prefetch(next + l);
                }
            });
        }
    }
};

static void unpack_scales(const GroupedJob& j, int64_t block, int64_t k, int64_t length, float* scales) {
    for (int64_t g = 0; g < length / j.group; g++)
        for (int c = 0; c < 4; c++) {
            const uint16_t* from = group_scales(j.s, block, j.groups, k / j.group + g, c);
            __builtin_prefetch(from + 512);
            vstore(scales + 64 * g + 16 * c, vload_half(from));
        }
}

// As many rows at a time as fit the L2 cache, but not so few that unpacking for each lot shows.
static void rows_by_panels(const GroupedJob& j, int64_t m0, int64_t m1, int64_t b0, int64_t b1) {
    const int64_t K = j.s.Kp, least = m1 - m0 > FEW_ROWS ? PANEL_K : FEW_K, whole = !j.x.group ? least : j.group > least ? j.group : least / j.group * j.group;
    const int64_t panels = (K + whole - 1) / whole, unit = j.x.group ? j.group : 32;   // of like lengths
    const int64_t longest = (K / unit + panels - 1) / panels * unit, code_bytes = longest * 64 * CODE_BYTES, scale_bytes = j.s.group ? longest / j.s.group * 256 : 0;
    const int64_t fit = L2_ROWS_BYTES / K, fitting = (fit < 128 ? 128 : fit > 512 ? 512 : fit) / PANEL_MR * PANEL_MR, most = fitting < m1 - m0 ? fitting : m1 - m0;
    const int64_t stride = SPLIT_PANELS ? ((K + 63) / 64 | 1) * 64 : K, copied = SPLIT_PANELS ? most * stride : 0;
    const AlignedBytes memory(code_bytes + scale_bytes + most * 256 + copied + most * j.groups * 4);
    float* scales = j.s.group && !j.sums ? (float*)(memory.p + code_bytes) : nullptr;
    float* carry = (float*)(memory.p + code_bytes + scale_bytes);
    int8_t* codes = (int8_t*)(carry + most * 64);
    int32_t* starts = (int32_t*)(codes + copied);
    const Levels levels = levels_of(level_table(j.s.codec));
    for (int64_t first = m0; first < m1; first += most) {
        const int64_t end = first + most < m1 ? first + most : m1;
        for (int64_t m = first; SPLIT_PANELS && m < end; m++) {
            const int8_t* row = j.x.codes + m * K;
            if (j.s.codec == Codec::i8) __builtin_memcpy(codes + (m - first) * stride, row, (size_t)K);
            else split_row(row, K, codes + (m - first) * stride);
        }
        for (int64_t i = 0; i < (end - first) * j.groups; i++) starts[i] = (int32_t)((uint32_t)-CORRECTION * (uint32_t)j.x.sums[first * j.groups + i]);
        const Lot lot = {first, stride, SPLIT_PANELS ? codes : j.x.codes + first * K, starts, carry};
        BlockWalk walk(j.s, b0);
        for (int64_t b = b0; b < b1; b++) {
            for (int64_t k = 0; k < K; k += longest) {
                const int64_t length = longest < K - k ? longest : K - k;
                walk.unpack(levels, length, memory.p);
                if (scales) unpack_scales(j, b, k, length, scales);
                const Panel p = {memory.p, scales, b, k, length};
                for_panels<PANEL_MR>(first, end, [&](auto rows, int64_t m) { panel_rows<decltype(rows)::value>(j, lot, p, m); });
            }
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
