// Causal attention over KV blocks of 256 positions. Included inside an ISA's namespace.
//
// Each block is computed by itself: p = exp(s - max), the sum of p in lanes, o = sum p * v with positions ascending;
// blocks are then merged in order. So a row's result depends on that row and its keys alone, and blocks can run in parallel.

template <bool HALF> static inline V16 kv_load(const void* base, int64_t i) {
    if constexpr (HALF) return vload_half((const uint16_t*)base + i);
    else return vload((const float*)base + i);
}

// acc[MR][NV] += a[MR rows][count] x b[count][16 * NV], count ascending; rows of `a` are a_stride apart, element k a_step.
template <int MR, int NV, bool HALF>
static inline void small_gemm(const float* a, int64_t a_stride, const void* b, int64_t b_offset, int64_t b_stride, int64_t count, float* out, int64_t out_stride) {
    V16 acc[MR][NV];
    for (int i = 0; i < MR; i++) for (int j = 0; j < NV; j++) acc[i][j] = vzero();
    for (int64_t k = 0; k < count; k++) {
        V16 w[NV];
        for (int j = 0; j < NV; j++) w[j] = kv_load<HALF>(b, b_offset + k * b_stride + 16 * j);
        for (int i = 0; i < MR; i++) {
            const V16 v = vset(a[i * a_stride + k]);
            for (int j = 0; j < NV; j++) acc[i][j] = vfma(v, w[j], acc[i][j]);
        }
    }
    for (int i = 0; i < MR; i++) for (int j = 0; j < NV; j++) vstore(out + i * out_stride + 16 * j, acc[i][j]);
}

template <bool HALF>
static inline void gemm_rows(const float* a, int64_t a_stride, int64_t rows, const void* b, int64_t b_offset, int64_t b_stride, int64_t count, float* out, int64_t out_stride, int64_t columns) {
    int64_t c = 0;
    for (; c + 16 * ATT_NV <= columns; c += 16 * ATT_NV)
        for_panels<ATT_ROWS>(0, rows, [&](auto r, int64_t m) {
            small_gemm<decltype(r)::value, ATT_NV, HALF>(a + m * a_stride, a_stride, b, b_offset + c, b_stride, count, out + m * out_stride + c, out_stride);
        });
    for (; c < columns; c += 16)
        for_panels<ATT_ROWS>(0, rows, [&](auto r, int64_t m) {
            small_gemm<decltype(r)::value, 1, HALF>(a + m * a_stride, a_stride, b, b_offset + c, b_stride, count, out + m * out_stride + c, out_stride);
        });
}

// Positions [from, to) of a block that one query vector sees.
struct Seen { int64_t from, to; };

// out[MR][16 * NV] = sum of p[k] * values[k], k ascending over what each vector sees and no further: 0 times an infinity or
// NaN of a later position, or of one behind the window, would spoil it. The spans ascend with the vectors.
template <int MR, int NV, bool HALF>
static inline void weigh_values(const float* p, const Seen* seen, const void* values, int64_t offset, int64_t stride, float* out) {
    V16 acc[MR][NV];
    for (int i = 0; i < MR; i++) for (int j = 0; j < NV; j++) acc[i][j] = vzero();
    const int64_t all_from = seen[MR - 1].from, all_to = seen[0].to;   // all vectors see these
    auto some = [&](int64_t from, int64_t to) {
        for (int64_t k = from; k < to; k++)
            for (int i = 0; i < MR; i++) {
                if (k < seen[i].from || k >= seen[i].to) continue;
                for (int j = 0; j < NV; j++) acc[i][j] = vfma(vset(p[i * KV_BLOCK + k]), kv_load<HALF>(values, offset + k * stride + 16 * j), acc[i][j]);
            }
    };
    some(seen[0].from, all_from);
    for (int64_t k = all_from; k < all_to; k++) {
        V16 w[NV];
        for (int j = 0; j < NV; j++) w[j] = kv_load<HALF>(values, offset + k * stride + 16 * j);
        for (int i = 0; i < MR; i++) {
            const V16 v = vset(p[i * KV_BLOCK + k]);
            for (int j = 0; j < NV; j++) acc[i][j] = vfma(v, w[j], acc[i][j]);
        }
    }
    some(all_from > all_to ? all_from : all_to, seen[MR - 1].to);
    for (int i = 0; i < MR; i++) for (int j = 0; j < NV; j++) vstore(out + i * stride + 16 * j, vadd(acc[i][j], vzero()));   // -0 becomes +0
}

template <bool HALF, class F>
static inline void weigh_rows(const float* p, F&& seen_by, int64_t rows, const void* values, int64_t offset, int64_t pad, float* out) {
    for_panels<ATT_ROWS>(0, rows, [&](auto r, int64_t m) {
        constexpr int MR = decltype(r)::value;
        Seen seen[MR];
        for (int i = 0; i < MR; i++) seen[i] = seen_by(m + i);
        int64_t c = 0;
        for (; c + 16 * ATT_NV <= pad; c += 16 * ATT_NV) weigh_values<MR, ATT_NV, HALF>(p + m * KV_BLOCK, seen, values, offset + c, pad, out + m * pad + c);
        for (; c < pad; c += 16) weigh_values<MR, 1, HALF>(p + m * KV_BLOCK, seen, values, offset + c, pad, out + m * pad + c);
    });
}

static int64_t attention_scratch(const AttentionArgs& a, int64_t tile_rows) {
    const int64_t vectors = tile_rows * (a.heads / a.kv.heads);
    return vectors * (KV_BLOCK + a.kv.dim_pad);
}

// First position that row `r` of the tile sees.
static inline int64_t first_seen(const AttentionArgs& a, const Tile& t, int64_t r) {
    const int64_t lo = t.first_position + r - a.window + 1;
    return a.window > 0 && lo > 0 ? lo : 0;
}

template <bool HALF> static void block_of(const AttentionArgs& a, const Tile& t, int64_t kv_head, int64_t block, float* scratch, const Partial& p) {
    const int64_t share = a.heads / a.kv.heads, dim = a.kv.dim, pad = a.kv.dim_pad, vectors = t.count * share, base = block * KV_BLOCK;
    float* scores = scratch;                       // [vectors][256]
    float* q = scratch + vectors * KV_BLOCK;       // [vectors][dim_pad]: row r, head h of the group at r * share + h
    for (int64_t r = 0; r < t.count; r++)
        for (int64_t h = 0; h < share; h++)
            __builtin_memcpy(q + (r * share + h) * pad, a.q.data + (t.row + r) * a.q.stride + (kv_head * share + h) * dim, sizeof(float) * dim);
    int64_t lo = first_seen(a, t, 0) - base, hi = t.first_position + t.count - base;   // columns that some row sees
    lo = lo < 0 ? 0 : lo & ~int64_t(15);
    hi = hi > KV_BLOCK ? KV_BLOCK : (hi + 15) & ~int64_t(15);
    const int64_t store = a.block_table[t.seq * a.table_stride + block];
    const int64_t keys = (store * a.kv.heads + kv_head) * dim * KV_BLOCK, values = (store * a.kv.heads + kv_head) * KV_BLOCK * pad;
    gemm_rows<HALF>(q, pad, vectors, a.kv.keys, keys + lo, KV_BLOCK, dim, scores + lo, KV_BLOCK, hi - lo);

    const V16 scale = vset(a.scale), cap = vset(a.softcap), minus_inf = vset(-__builtin_inff());
    alignas(64) float ramp[16];
    for (int i = 0; i < 16; i++) ramp[i] = (float)i;
    const V16 lane = vload(ramp);
    for (int64_t i = 0; i < vectors; i++) {
        const int64_t r = i / share;
        const float from = (float)(first_seen(a, t, r) - base), to = (float)(t.first_position + r + 1 - base);
        float* s = scores + i * KV_BLOCK;
        V16 top = minus_inf;
        for (int64_t c = lo; c < hi; c += 16) {
            V16 x = vmul(vload(s + c), scale);
            if (a.softcap > 0.0f) x = vmul(cap, vtanh(vdiv(x, cap)));
            const V16 column = vadd(lane, vset((float)c));
            x = vless_select(column, vset(from), minus_inf, x);
            x = vless_select(column, vset(to), x, minus_inf);
            vstore(s + c, x);
            top = vmax(top, x);
        }
        const float m = vmax_lanes(top);
        p.max[i] = m;
        V16 sum = vzero();
        const V16 vm = vset(m);
        const bool any = m > -__builtin_inff();    // false: the row sees nothing here, or a NaN, which then divides 0 by 0
        for (int64_t c = lo; c < hi; c += 16) {
            V16 x = vload(s + c);
            V16 e = any ? vexp(vsub(x, vm)) : vzero();
            vstore(s + c, e);
            sum = vadd(sum, e);
        }
        p.sum[i] = vsum(sum);
    }
    auto seen_by = [&](int64_t i) {
        const int64_t from = first_seen(a, t, i / share) - base, to = t.first_position + i / share + 1 - base;
        return Seen{from < lo ? lo : from > hi ? hi : from, to < lo ? lo : to > hi ? hi : to};
    };
    weigh_rows<HALF>(scores, seen_by, vectors, a.kv.values, values, pad, p.out);
}

static void attention_block(const AttentionArgs& a, const Tile& t, int64_t kv_head, int64_t block, float* scratch, const Partial& p) {
    if (a.kv.half) block_of<true>(a, t, kv_head, block, scratch, p);
    else block_of<false>(a, t, kv_head, block, scratch, p);
}

static void attention_merge(const AttentionArgs& a, const Tile& t, const Partial& into, const Partial& from) {
    const int64_t vectors = t.count * (a.heads / a.kv.heads), pad = a.kv.dim_pad;
    const float none = -__builtin_inff();
    for (int64_t i = 0; i < vectors; i++) {
        float* o = into.out + i * pad;
        const float* b = from.out + i * pad;
        if (into.max[i] == none) {
            into.max[i] = from.max[i];
            into.sum[i] = from.sum[i];
            __builtin_memcpy(o, b, sizeof(float) * pad);
            continue;
        }
        if (from.max[i] == none) continue;
        const float m = into.max[i] > from.max[i] ? into.max[i] : from.max[i];
        alignas(64) float e[16];
        const float shift[2] = {into.max[i] - m, from.max[i] - m};
        vstore(e, vexp(vload_part(shift, 2)));
        into.max[i] = m;
        into.sum[i] = into.sum[i] * e[0] + from.sum[i] * e[1];
        const V16 x = vset(e[0]), y = vset(e[1]);
        for (int64_t d = 0; d < pad; d += 16) vstore(o + d, vfma(vload(o + d), x, vmul(vload(b + d), y)));
    }
}

static void attention_finish(const AttentionArgs& a, const Tile& t, int64_t kv_head, const Partial& p) {
    const int64_t share = a.heads / a.kv.heads, dim = a.kv.dim, pad = a.kv.dim_pad;
    for (int64_t r = 0; r < t.count; r++)
        for (int64_t h = 0; h < share; h++) {
            const int64_t i = r * share + h;
            float* o = a.out.data + (t.row + r) * a.out.stride + (kv_head * share + h) * dim;
            const V16 sum = vset(p.sum[i]);
            for (int64_t d = 0; d < dim; d += 16) {
                const V16 y = vdiv(vload(p.out + i * pad + d), sum);
                if (d + 16 <= dim) vstore(o + d, y);
                else vstore_part(o + d, y, dim - d);
            }
        }
}

// Writes rows' keys and values of heads [h0, h1) to their slots (block * 256 + offset).
static void kv_append(const KvLayer& kv, const Mat& k, const Mat& v, const int32_t* slots, int64_t h0, int64_t h1) {
    const int64_t dim = kv.dim, pad = kv.dim_pad;
    for (int64_t h = h0; h < h1; h++)
        for (int64_t m = 0; m < k.rows; m++) {
            const int64_t block = slots[m] / KV_BLOCK, offset = slots[m] % KV_BLOCK, at = block * kv.heads + h;
            const float *ks = k.data + m * k.stride + h * dim, *vs = v.data + m * v.stride + h * dim;
            for (int64_t d = 0; d < dim; d += 16) {
                const int64_t n = dim - d < 16 ? dim - d : 16;
                const V16 a = n == 16 ? vload(ks + d) : vload_part(ks + d, n), b = n == 16 ? vload(vs + d) : vload_part(vs + d, n);
                if (kv.half) {
                    uint16_t t[16];
                    vstore_half(t, a);
                    uint16_t* dst = (uint16_t*)kv.keys + at * dim * KV_BLOCK + offset;
                    for (int64_t i = 0; i < n; i++) dst[(d + i) * KV_BLOCK] = t[i];
                    vstore_half((uint16_t*)kv.values + (at * KV_BLOCK + offset) * pad + d, b);
                } else {
                    float* dst = (float*)kv.keys + at * dim * KV_BLOCK + offset;
                    for (int64_t i = 0; i < n; i++) dst[(d + i) * KV_BLOCK] = ks[d + i];
                    vstore((float*)kv.values + (at * KV_BLOCK + offset) * pad + d, b);
                }
            }
        }
}
