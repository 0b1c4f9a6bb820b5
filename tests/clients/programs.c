#include "programs.h"

static const struct {
    int bits, group, out_bytes;
    uint32_t precision, format, size_e, core;
} KINDS[] = {
    [INT8] = {8, 32, 4, 0, 0x80000000, 0x7fc, 0x001},
    [FP16] = {16, 16, 4, 2, 0xa8000002, 0x36e, 0x201},
    [INT4] = {4, 64, 2, 6, 0x38000006, 0x7fe, 0x601},
};

static int up(int a, int b) { return (a + b - 1) / b; }

/* What is the same in every matmul and convolution without an output stage. */
static struct registers plain(void) {
    static const uint32_t values[][2] = {
        {0x4004, 0xe},     {0x1014, 9},      {0x104c, 0xb},    {0x1050, 0x10000}, {0x1054, 0x10000}, {0x1058, 0x10000},
        {0x105c, 0x10000}, {0x1060, 0},      {0x1064, 0},      {0x1068, 0},       {0x1074, 0},       {0x1078, 0xf000f},
        {0x1100, 0},       {0x1104, 0},      {0x1184, 0},      {0x301c, 0},       {0x3030, 0},       {0x400c, 0x1e4},
        {0x4014, 0},       {0x4040, 0x53},   {0x4044, 0},      {0x4048, 0},       {0x404c, 0},       {0x4054, 0},
        {0x4060, 0x53},    {0x4064, 0},      {0x4068, 0},      {0x406c, 0},       {0x4070, 0x383},   {0x4074, 0},
        {0x4078, 1},       {0x407c, 0},      {0x4080, 0},      {0x4084, 1},       {0x4088, 0},       {0x40c4, 0},
    };
    struct registers r = {0};
    for (unsigned i = 0; i < sizeof values / sizeof *values; i++) set(&r, values[i][0], values[i][1]);
    return r;
}

struct registers matmul(enum kind kind, int M, int K, int N) {
    struct registers r = plain();
    int row = K * KINDS[kind].bits / 8, entries = up(row, 64), banks = up(M * entries, 512);
    int cube = kind == INT4;  /* one row, which is a cube of one pixel */
    uint32_t notch = cube ? 0 : N * KINDS[kind].out_bytes / 16 - 1;
    set(&r, 0x100c, (cube ? 0u : 1u << 29) | KINDS[kind].precision << 7 | KINDS[kind].precision << 4);
    set(&r, 0x1010, 16 * (M + 1));
    set(&r, 0x1020, 1 << 16 | M);
    set(&r, 0x1024, (K - 1) << 16 | K);
    set(&r, 0x1028, 1);
    set(&r, 0x102c, M);
    set(&r, 0x1030, row * N);
    set(&r, 0x1034, row);
    set(&r, 0x1038, 0x01010000 | N);
    set(&r, 0x1040, (12 - banks) << 4 | banks);
    set(&r, 0x1044, entries);
    set(&r, 0x107c, cube ? 4 : row / 16);
    set(&r, 0x1080, cube ? 0x0ffffffd : 0);
    set(&r, 0x1084, 1 << 16 | M);
    set(&r, 0x1088, K);
    set(&r, 0x3010, KINDS[kind].core);
    set(&r, 0x3014, (M - 1) << 16);
    set(&r, 0x3018, N - 1);
    set(&r, 0x4010, KINDS[kind].format);
    set(&r, 0x4024, 0x10);
    set(&r, 0x4030, 0);
    set(&r, 0x4034, M - 1);
    set(&r, 0x4038, notch << 16 | notch);
    set(&r, 0x403c, (N - 1) << 16 | (N - 1));
    set(&r, 0x4050, KINDS[kind].size_e);
    set(&r, 0x4058, N - 1);
    set(&r, 0x405c, (M - 1) << 16);
    set(&r, 0x40c0, KINDS[kind].group * KINDS[kind].out_bytes);
    return r;
}

void operands(struct registers *r, const struct buffer *a, size_t a_at, const struct buffer *b, const struct buffer *c,
              size_t c_at) {
    set(r, 0x1070, (uint32_t)(a->address + a_at));
    set(r, 0x1110, (uint32_t)b->address);
    set(r, 0x4020, (uint32_t)(c->address + c_at));
}

struct registers convolution(int C, int H, int W, int N, int k) {
    struct registers r = plain();
    int entries = up(W * C, 64), banks = up(H * entries, 512);
    set(&r, 0x100c, 0);
    set(&r, 0x1010, 16 * (H + 1));
    set(&r, 0x1020, W << 16 | H);
    set(&r, 0x1024, (C - 1) << 16 | C);
    set(&r, 0x1028, W);
    set(&r, 0x102c, W * H);
    set(&r, 0x1030, k * k * C * N);
    set(&r, 0x1034, k * k * C);
    set(&r, 0x1038, k << 24 | k << 16 | N);
    set(&r, 0x1040, (12 - banks) << 4 | banks);
    set(&r, 0x1044, entries);
    set(&r, 0x1068, k / 2 << 4 | k / 2);
    set(&r, 0x107c, 4 * W);
    set(&r, 0x1080, (H * W - 4 * W) & 0x0fffffff);
    set(&r, 0x1084, W << 16 | H);
    set(&r, 0x1088, C);
    set(&r, 0x3010, 1);
    set(&r, 0x3014, (H - 1) << 16 | (W - 1));
    set(&r, 0x3018, N - 1);
    set(&r, 0x4010, 0x80000000);
    set(&r, 0x4024, 16 * H * W);
    set(&r, 0x4030, W - 1);
    set(&r, 0x4034, H - 1);
    set(&r, 0x4038, 0);
    set(&r, 0x403c, (N - 1) << 16 | (N - 1));
    set(&r, 0x4050, 0x7fc);
    set(&r, 0x4058, N - 1);
    set(&r, 0x405c, (H - 1) << 16 | (W - 1));
    set(&r, 0x40c0, 8 * 16 * H * W);
    return r;
}

struct registers through(int M, int N) {
    static const uint32_t values[][2] = {
        {0x4004, 0xe},  {0x5004, 0xe},   {0x400c, 0x1e5}, {0x4010, 0x48000002}, {0x4014, 0},      {0x4034, 0},
        {0x4038, 0},    {0x4040, 0x53},  {0x4044, 0},     {0x4048, 0},          {0x404c, 0},      {0x4050, 2},
        {0x4054, 0},    {0x4060, 0x53},  {0x4064, 0},     {0x4068, 0},          {0x406c, 0},      {0x4070, 0x383},
        {0x4074, 0},    {0x4078, 1},     {0x407c, 0},     {0x4080, 0},          {0x4084, 0x10001}, {0x4088, 0},
        {0x40c4, 0},    {0x5010, 0},     {0x501c, 0},     {0x5020, 0},          {0x5028, 0},      {0x502c, 0},
        {0x5034, 1},    {0x5038, 0},     {0x5044, 0x17849}, {0x5048, 0},        {0x504c, 0},      {0x5064, 0},
        {0x5068, 0x01010101}, {0x506c, 0},
    };
    struct registers r = {0};
    for (unsigned i = 0; i < sizeof values / sizeof *values; i++) set(&r, values[i][0], values[i][1]);
    set(&r, 0x4024, 16 * M);
    set(&r, 0x4030, M - 1);
    set(&r, 0x403c, (N - 1) << 16 | (N - 1));
    set(&r, 0x4058, N - 1);
    set(&r, 0x405c, M - 1);
    set(&r, 0x40c0, 16 * M);
    set(&r, 0x500c, M - 1);
    set(&r, 0x5014, N - 1);
    set(&r, 0x5040, 0);
    return r;
}

struct registers addition(int M, int N, const struct buffer *b) {
    struct registers r = through(M, N);
    set(&r, 0x4070, 0x108202c0);
    set(&r, 0x5034, 0x40000008);
    set(&r, 0x5038, (uint32_t)b->address);
    set(&r, 0x5040, 16 * M);
    return r;
}

struct registers table_load(const int16_t low[513], const int16_t high[513]) {
    struct registers r = through(1, 8);
    set(&r, 0x4004, 0x30);
    set(&r, 0x5004, 0x30);
    for (int table = 0; table < 2; table++) {
        append(&r, 0x4100, 0x20000 | table << 16);
        for (int i = 0; i < 513; i++) append(&r, 0x4104, (uint32_t)(int32_t)(table ? high[i] : low[i]));
    }
    return r;
}

struct registers table_lookup(int M, int N, uint16_t multiplier, int minus_exponent) {
    struct registers r = through(M, N);
    set(&r, 0x4004, 0x30);
    set(&r, 0x5004, 0x30);
    set(&r, 0x4060, 0x20040);
    set(&r, 0x4068, (uint32_t)multiplier << 16);
    set(&r, 0x4070, 0x302);
    set(&r, 0x4088, minus_exponent << 12);
    set(&r, 0x4108, 0x68);
    set(&r, 0x410c, 0x50500);
    set(&r, 0x4110, 0xffffc000);
    set(&r, 0x4114, 0);
    set(&r, 0x4118, 0);
    set(&r, 0x411c, 0x4000);
    for (uint32_t offset = 0x4120; offset <= 0x412c; offset += 4) set(&r, offset, 0);
    return r;
}

struct registers max_pool(int C, int H, int W, int k) {
    struct registers r = {0};
    set(&r, 0x6004, 0xe);
    set(&r, 0x7004, 0xe);
    set(&r, 0x600c, W - 1);
    set(&r, 0x6010, H - 1);
    set(&r, 0x6014, C - 1);
    set(&r, 0x6018, W / k - 1);
    set(&r, 0x601c, H / k - 1);
    set(&r, 0x6020, C - 1);
    set(&r, 0x6024, 0x11);
    set(&r, 0x6034, (k - 1) * 0x110101);
    set(&r, 0x6038, 0);
    set(&r, 0x603c, 0);
    set(&r, 0x6040, 0);
    set(&r, 0x6044, 0);
    set(&r, 0x6048, 0);
    set(&r, 0x607c, 16 * (W / k) * (H / k));
    set(&r, 0x6084, 2);
    set(&r, 0x60dc, 3);
    set(&r, 0x700c, W - 1);
    set(&r, 0x7010, H - 1);
    set(&r, 0x7014, C - 1);
    set(&r, 0x7024, 16 * W);
    set(&r, 0x7028, 16 * W * H);
    set(&r, 0x7030, 2);
    return r;
}
