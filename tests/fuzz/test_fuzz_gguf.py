"""Thousands of damaged GGUF headers: each is read or refused with a typed error; none crashes, hangs or eats memory."""

import random
import resource
import struct

import numpy as np
import pytest

from ork.errors import OrkError
from ork.sources.base import open_source
from tests.gguf_writer import ARRAY, SCALARS, STRING, gguf_bytes, random_blocks

MUTANTS = 6000
SIZE = 64 << 10
GROWTH = 96 << 20  # bytes; the limit of metadata is 128 MiB, but nothing in 64 KiB can ask for that much

EXTREMES = [0, 1, 2, 3, 7, 31, 32, 33, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1]
EXTREMES64 = [*EXTREMES, 2**32, 2**40, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**63 + 8, 2**64 - 8, 2**64 - 1]


def seed_file(version: int) -> bytes:
    """64 KiB that hold every value type, arrays of each, a vocabulary, and tensors of several types."""
    rng = np.random.default_rng(5)
    metadata = {"general.architecture": "llama", "general.alignment": 32, "text": "some text", "empty": ""}
    for dtype in SCALARS:
        metadata[f"scalar.{dtype}"] = np.array([1]).astype(dtype)[0]
        metadata[f"array.{dtype}"] = np.arange(5).astype(dtype)
    metadata["tokenizer.ggml.tokens"] = [f"token{i}" for i in range(1500)]
    metadata["tokenizer.ggml.scores"] = np.linspace(-1, 0, 1500, dtype=np.float32)
    metadata["tokenizer.ggml.token_type"] = np.ones(1500, np.int32)
    tensors = {
        "token_embd.weight": ("Q8_0", random_blocks("Q8_0", 16, rng), (8, 64)),
        "blk.0.ffn_up.weight": ("Q4_K", random_blocks("Q4_K", 4, rng), (2, 512)),
        "blk.0.ffn_gate_exps.weight": ("Q4_0", random_blocks("Q4_0", 12, rng), (2, 3, 64)),
        "output_norm.weight": ("F32", np.ones(64, np.float32), (64,)),
    }
    tensors |= {f"blk.{i}.attn_norm.weight": ("F16", np.ones(32, np.float32), (32,)) for i in range(40)}
    data = gguf_bytes(metadata, tensors, version)
    return data + bytes(SIZE - len(data))


def fields(data: bytes) -> list[tuple[int, int]]:
    """(offset, width) of every count, length, type, dimension and offset of a good file: where lies hurt most."""
    found = [(4, 4), (8, 8), (16, 8)]
    tensors, pairs = struct.unpack_from("<QQ", data, 8)
    at = 24
    widths = {number: dtype.itemsize for dtype, number in SCALARS.items()}

    def take(width: int) -> int:
        nonlocal at
        found.append((at, width))
        at += width
        return int.from_bytes(data[at - width : at], "little")

    def text() -> None:
        nonlocal at
        size = take(8)
        at += size

    for _ in range(pairs):
        text()
        kind, count = take(4), 1
        if kind == ARRAY:
            kind, count = take(4), take(8)
        for i in range(count):
            if kind != STRING:
                at += widths[kind] * (count - i)
                break
            text()
    for _ in range(tensors):
        text()
        for _ in range(take(4)):
            take(8)
        take(4)
        take(8)
    return found


def mutate(data: bytes, places: list[tuple[int, int]], rng: random.Random) -> bytes:
    out = bytearray(data)
    structural = [p for p in places if p[0] < 3000 or p[0] > places[-1][0] - 4000]  # not only the vocabulary's lengths
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        how = rng.randrange(7)
        at = rng.randrange(len(out))
        if how == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif how in (1, 2):
            offset, width = rng.choice(places if rng.random() < 0.1 else structural)
            extreme = rng.choice(EXTREMES if width == 4 else EXTREMES64)
            out[offset : offset + width] = extreme.to_bytes(width, "little")
        elif how == 3:
            offset, width = rng.choice(structural)
            near = int.from_bytes(out[offset : offset + width], "little") + rng.choice([-33, -8, -1, 1, 8, 33])
            out[offset : offset + width] = (near % (1 << (8 * width))).to_bytes(width, "little")
        elif how == 4:  # swapped types
            offset, _ = rng.choice([p for p in structural if p[1] == 4])
            out[offset : offset + 4] = rng.randrange(45).to_bytes(4, "little")
        elif how == 5:  # a splice: inserted, so that all behind it moves
            source = rng.randrange(len(data))
            out[at:at] = data[source : source + rng.randrange(64)]
        else:
            del out[rng.randrange(4, len(out)) :]
        if len(out) < 64:
            break
    return bytes(out)


@pytest.mark.parametrize("version", [2, 3])
def test_damaged_headers(tmp_path, version):
    good = seed_file(version)
    places = fields(good)
    rng = random.Random(20 + version)
    path = tmp_path / "x.gguf"
    path.write_bytes(good)
    assert len(open_source(path).tensors) == 44
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    messages = []
    for _ in range(MUTANTS // 2):
        path.write_bytes(mutate(good, places, rng))
        try:
            source = open_source(path)
            for name, t in source.tensors.items():
                source.rows(name, 0, min(t.rows, 4))
                source.release(name)
            source.digest()
            source.close()
        except OrkError as e:
            messages.append(str(e))
    assert not [m for m in messages if "\n" in m]
    assert MUTANTS // 2 * 0.3 < len(messages) < MUTANTS // 2
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < GROWTH
