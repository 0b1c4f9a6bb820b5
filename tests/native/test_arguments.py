"""What Python hands to the kernels is checked: a wrong shape is a ValueError, no crash; views keep memory alive."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ork import native
from tests.native.oracles import Weight

Array = native.Array
REFUSED = (ValueError, TypeError, MemoryError)


def array(rows: int, cols: int) -> Array:
    return Array.of(np.ones((rows, cols), np.float32))


def weight(N: int = 64, K: int = 64, codec: str = "i8") -> Weight:
    return Weight(np.ones((N, K), np.int8), np.ones(N, np.float32)) if codec == "i8" else Weight(np.ones((N, K), "f4"))


def refuses(call: Callable[[], object]) -> None:
    with pytest.raises(REFUSED):
        call()


def test_sizes_that_no_memory_holds() -> None:
    for rows, cols in ((-1, 4), (4, -1), (1 << 62, 4), (4, 1 << 62), (1 << 31, 1 << 31), (1 << 33, 1 << 27)):
        refuses(lambda rows=rows, cols=cols: Array(rows, cols))
    for shape in ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, 0, 1), (1, 1, 1, -1), (1 << 40, 1 << 20, 8, 8), (1, 1, 64, 0)):
        refuses(lambda shape=shape: native.KvCache(*shape, True))
    refuses(lambda: native.set_threads(0))
    refuses(lambda: native.set_threads(257))
    refuses(lambda: native.choose_isa("sse9"))


def test_weights_without_rows() -> None:
    """A vector of no rows has no values to read."""
    none = Array(0, 64)
    rows = native.quantise(array(2, 64), None, 0)
    refuses(lambda: native.rms_norm(array(2, 64), none, 1e-6))
    refuses(lambda: native.head_norm(array(2, 64), none, 1e-6))
    refuses(lambda: native.quantise(array(2, 64), none, 64))
    refuses(lambda: native.rotate(np.ones((2, 64), np.float32), none, 64))
    refuses(lambda: native.gather(weight().slices, np.zeros(1, np.int32), 64, 64, none, 64))
    refuses(lambda: native.linear(array(2, 64), rows, weight().slices, [Array(2, 64)], [none]))


def test_nothing_where_something_is_needed() -> None:
    w, x = weight(), array(2, 64)
    rows = native.quantise(x, None, 0)
    refuses(lambda: native.linear(x, None, w.slices, [Array(2, 64)], [None]))
    refuses(lambda: native.linear(x, rows, [None], [Array(2, 64)], [None]))
    refuses(lambda: native.linear(x, rows, w.slices, [None], [None]))
    refuses(lambda: native.linear(x, rows, w.slices, [Array(2, 64)], [3]))
    refuses(lambda: native.linear(x, rows, w.slices, [Array(2, 64)], []))
    refuses(lambda: native.gather([None], np.zeros(1, np.int32), 64, 64, None, 0))
    refuses(lambda: native.Slice(1, 0, 0, 64, 64, 0, 64))
    native.linear(x, rows, [], [], [])


def test_slices_behind_the_output() -> None:
    blob = np.zeros(64 * 64 + 256 + 64, np.uint8)
    at = (blob.ctypes.data + 63) // 64 * 64
    far = native.Slice(1, at, at + 4096, 64, 64, 2**31 - 64, 64)  # n0 + n does not fit 31 bits
    x = array(1, 64)
    rows = native.quantise(x, None, 0)
    refuses(lambda: native.linear(x, rows, [far], [Array(1, 64)], [None]))
    refuses(lambda: native.accumulate(rows, far, np.zeros((1, 64), np.int32)))
    for shape in ((0, 0, 0, 64), (63, 63, 0, 64), (64, 48, 0, 64), (64, 64, -64, 64), (64, 64, 0, 63), (64, 64, 0, 0)):
        refuses(lambda shape=shape: native.Slice(1, at, at + 4096, *shape))
    for codec in (-1, 5):
        refuses(lambda codec=codec: native.Slice(codec, at, at + 4096, 64, 64, 0, 64))
    for codec, group, scales, groups in (
        (0, 32, 0, at),  # floats have no groups
        (4, 32, 0, at),
        (2, 0, 0, 0),  # what is quantised has channel scales
        (2, 32, at, 0),  # groups have theirs
        (2, 0, at, at),
        (2, 48, at, at),  # not a multiple of 32
        (2, 128, at, at),  # does not divide K
        (2, -32, at, at),
    ):
        refuses(lambda a=(codec, at, scales, 64, 64, 0, 64, group, groups): native.Slice(*a))
    native.Slice(3, at, at, 64, 64, 0, 64, 32, at)
    refuses(lambda: native.Slice(1, at + 1, at + 4096, 64, 64, 0, 64))


SIZES = st.integers(0, 3) | st.sampled_from([16, 63, 64, 65, 128])
SMALL = st.integers(-2, 5)


@given(st.data())
@settings(max_examples=150)
def test_row_operations_take_what_fits(data: st.DataObject) -> None:
    """Every combination of small shapes: the documented condition decides, and nothing else happens."""
    a, b, c, d = (data.draw(SIZES) for _ in range(4))
    n, flag = data.draw(st.integers(-4, 130)), data.draw(st.booleans())
    x, y = array(a, b), array(c, d)

    def expect(fits: bool, call: Callable[[], object]) -> None:
        if fits:
            call()
        else:
            refuses(call)

    expect(c >= 1 and d == b, lambda: native.rms_norm(x, y, 1e-6))
    expect(c >= 1 and d > 0 and b % d == 0, lambda: native.head_norm(x, y, 1e-6))
    expect((a, b) == (c, d), lambda: native.add(x, y))
    expect((a, b) == (c, d) and n in (0, 1), lambda: native.gate(n, x, y))
    expect(n > 0, lambda: native.softcap(x, float(n)))
    block = n > 0 and n & (n - 1) == 0 and b % n == 0
    expect(c >= 1 and d == b and block, lambda: native.quantise(x, y, n))
    expect(c >= 1 and d == b and block, lambda: native.rotate(np.ones((a, b), np.float32), y, n, flag))
    mix = array(data.draw(st.sampled_from([1, 1, 2])), data.draw(st.sampled_from([0, 1, 4, 9, 16])))
    mixes = c >= 1 and d == b and block and mix.rows == 1 and mix.cols == (b // max(n, 1)) ** 2
    expect(mixes, lambda: native.quantise(x, y, n, 0, mix))
    expect(mixes, lambda: native.rotate(np.ones((a, b), np.float32), y, n, flag, mix))
    refuses(lambda: native.quantise(x, None, 0, 0, mix))
    group, limit = (
        data.draw(st.sampled_from([-32, 16, 32, 64, 96])),
        data.draw(st.sampled_from([-1, 0, 1, 7, 127, 128])),
    )
    divides = group > 0 and group % 32 == 0 and -(-b // 32) * 32 % group == 0
    expect(divides and 0 < limit < 128, lambda: native.quantise(x, None, 0, group, None, limit))
    expect(n > 0 and b % n == 0 and d <= n and d % 2 == 0 and c == a, lambda: native.rope(x, n, flag, y))
    rows = data.draw(st.lists(SMALL, max_size=3))
    expect(all(0 <= r < a for r in rows), lambda: native.take(x, np.array(rows, np.int32)))
    expect(0 <= n < a, lambda: native.top_k(x.numpy().copy(), n, 1))


@given(st.data())
@settings(max_examples=150)
def test_products_take_what_fits(data: st.DataObject) -> None:
    N, K, codec = (
        data.draw(st.integers(1, 130)),
        data.draw(st.integers(1, 130)),
        data.draw(st.sampled_from(["i8", "f32"])),
    )
    w = weight(N, K, codec)
    a, b, rows_out, cols = (data.draw(SIZES) for _ in range(4))
    x, out = array(a, b), Array(rows_out, cols)
    rows = native.quantise(array(data.draw(st.sampled_from([a, 1, 3])), b), None, 0)
    bias = data.draw(st.none() | st.builds(array, st.integers(0, 2), SIZES))
    Kp, Np = -(-K // 32) * 32, -(-N // 64) * 64
    holds = -(-cols // 64) * 64 >= Np and rows_out == a
    holds &= bias is None or (bias.rows >= 1 and -(-bias.cols // 64) * 64 >= Np)
    holds &= (rows.rows == a and rows.width == Kp) if codec == "i8" else b <= Kp
    call = lambda: native.linear(x, rows, w.slices, [out], [bias])  # noqa: E731
    if holds:
        call()
    else:
        refuses(call)
    ids = data.draw(st.lists(st.integers(-1, N + 1), max_size=3))
    wanted = data.draw(st.sampled_from([K, 0, -1, K + 64, 2**40]))
    look_up = lambda: native.gather(w.slices, np.array(ids, np.int32), wanted, N, None, 0)  # noqa: E731
    if all(0 <= i < N for i in ids) and 0 <= wanted <= Kp:
        assert look_up().numpy().shape == (len(ids), wanted)
    else:
        refuses(look_up)


@given(st.data())
@settings(max_examples=200)
def test_attention_takes_what_fits(data: st.DataObject) -> None:
    """Any batch and any shapes: a result or a refusal."""
    M = data.draw(st.integers(0, 3))
    count = st.integers(-1, 3)
    ints = st.sampled_from([-1, 0, 1, 2, 255, 256, 511, 512, 2**31 - 1])
    slots = data.draw(st.lists(st.sampled_from([0, 1, 300, 511, 512, -1]), min_size=M, max_size=M))
    runs = data.draw(st.lists(st.tuples(count, count, count, ints), max_size=2))
    table = data.draw(st.lists(st.integers(-1, 2), min_size=2, max_size=2))
    try:
        batch = native.Batch(
            np.zeros(M, np.int32),
            np.array(slots, np.int32),
            np.array(runs, np.int32).reshape(-1, 4),
            np.array(table, np.int32).reshape(1, 2) if data.draw(st.booleans()) else np.array([table] * 2, np.int32),
        )
    except ValueError:
        return
    cache = native.KvCache(1, 2, 16, 2, data.draw(st.booleans()))
    heads = data.draw(st.sampled_from([2, 4, 1, 3, 0, -2]))
    q, k, v = (array(data.draw(st.sampled_from([M, 1])), data.draw(st.sampled_from([32, 64, 16]))) for _ in range(3))
    try:
        out = native.attention(cache, data.draw(st.sampled_from([0, 0, 1, -1])), batch, q, k, v, heads, 0.5, 3, 0.0)
    except ValueError:
        return
    assert out.numpy().shape == (M, heads * 16)


def test_arrays_of_the_wrong_kind() -> None:
    refuses(lambda: Array.of(np.ones(4, np.float32)))
    refuses(lambda: Array.of(np.ones((2, 2, 2), np.float32)))
    refuses(lambda: native.QuantisedRows.of(np.ones((2, 31), np.int8)))
    refuses(lambda: native.softmax([], 1.0))
    refuses(lambda: native.rotate(np.ones((2, 64), np.float64), array(1, 64), 64))
    frozen = np.ones((2, 64), np.float32)
    frozen.flags.writeable = False
    refuses(lambda: native.rotate(frozen, array(1, 64), 64))
    rows = native.QuantisedRows.of(np.ones((2, 64), np.int8))
    refuses(lambda: native.accumulate(rows, weight().slices[0], np.zeros((2, 63), np.int32)))
    refuses(lambda: native.accumulate(rows, weight().slices[0], np.zeros((2, 64), np.int64)))
    refuses(lambda: native.dequantise(0, np.zeros(8, np.uint8), np.zeros(2, np.float64)))


def test_a_view_outlives_its_array() -> None:
    x = np.random.default_rng(0).standard_normal((50, 100)).astype(np.float32)
    view = Array.of(x).numpy()
    q = native.quantise(Array.of(x), None, 0)
    codes, scales = q.codes(), q.scales()
    copies = codes.copy(), scales.copy()
    del q
    gc.collect()
    others = [Array.of(np.zeros((50, 100), np.float32)) for _ in range(50)]
    others_too = [native.quantise(Array.of(np.zeros((50, 100), np.float32)), None, 0) for _ in range(50)]
    assert np.array_equal(view, x)
    assert np.array_equal(codes, copies[0])
    assert np.array_equal(scales, copies[1])
    assert len(others) == len(others_too)


def test_a_view_writes_into_its_array() -> None:
    a = array(2, 3)
    a.numpy()[1, 2] = 7
    assert a.numpy()[1, 2] == 7
    del a
