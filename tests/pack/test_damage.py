"""Whatever is wrong with a file, it is found before use, and the line says file, entry, offset and remedy."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ork.errors import PackDamaged, PackError, PackVersion, StorageError
from ork.pack import Pack, verify, write_note
from ork.pack.format import SECTIONS
from tests.pack import plain_reader
from tests.pack.samples import write_sample


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "x.orkpack"
    write_sample(path)
    write_note(path, "quality", {"ppl": 12.5})
    return path


@pytest.fixture
def data(sample: Path) -> Iterator[bytearray]:
    """The sample's bytes to spoil; the file is put right afterwards."""
    whole = sample.read_bytes()
    yield bytearray(whole)
    sample.write_bytes(whole)


def refusal(path: Path, data: bytes) -> str:
    """The one line that opening and verifying this file ends with."""
    path.write_bytes(data)
    with pytest.raises(PackDamaged) as e:
        verify(path)
    line = str(e.value)
    assert "\n" not in line
    assert line.startswith(f"{path}: ")
    assert " at offset " in line
    assert line.endswith("; convert the model again")
    return line


def spans(data: bytes) -> dict[str, tuple[int, int]]:
    return dict(zip(SECTIONS, plain_reader.sections(data)))


def test_a_flipped_byte_anywhere_is_found(sample: Path, data: bytearray) -> None:
    parts = spans(data)
    offsets = {0, 7, 8, 12, 16, 24, 40, 48, 63, 64, 100, 223, 224, 2000, 4079, 4080, 4095, len(data) - 1}
    with Pack.open(sample) as pack:
        for name in pack.names():
            kind = pack.tensor if name not in pack.raw_names() else None
            for s in kind(name).slices if kind else []:
                offsets |= {s.offset, s.offset + s.nbytes // 2, s.offset + s.nbytes - 1, s.offset + s.nbytes}
    for at, nbytes in parts.values():
        offsets |= {at, at + nbytes // 2, at + max(nbytes - 1, 0), at + nbytes}
    offsets |= set(range(4096, parts["notes"][0], 1009)) | set(range(parts["notes"][0], len(data), 50_021))
    found = 0
    fd = os.open(sample, os.O_RDWR)
    for offset in sorted(o for o in offsets if o < len(data)):
        for flip in (0x01, 0x80):
            os.pwrite(fd, bytes([data[offset] ^ flip]), offset)
            with pytest.raises(PackError) as e:
                verify(sample)
            if offset >= 8:
                assert isinstance(e.value, PackDamaged), (offset, e.value)
            found += 1
        os.pwrite(fd, bytes([data[offset]]), offset)
    os.close(fd)
    assert found > 400
    assert verify(sample)


def test_a_flipped_weight_is_found_on_first_use_and_named(sample: Path, data: bytearray) -> None:
    with Pack.open(sample) as pack:
        s = pack.tensor("blk.1.up.1").slices[0]
    data[s.offset + 100] ^= 4
    sample.write_bytes(data)
    pack = Pack.open(sample)
    for name in pack.names():
        if name in pack.raw_names():
            pack.raw(name)
            continue
        for other in pack.tensor(name).slices:
            if other.entry != s.entry:
                pack.slice(other.entry)
    for _ in range(2):
        with pytest.raises(PackDamaged) as e:
            pack.slice(s.entry)
        assert f"slice {s.entry} (blk.1.up.1, columns 0-64) at offset {s.offset}:" in str(e.value)
    with pytest.raises(PackDamaged, match=r"blk\.1\.up\.1"):
        pack.verify()


@pytest.mark.parametrize("section", ["tokenizer", "chat_template", "recipe", "provenance"])
def test_a_flipped_section_is_found_on_first_use_and_named(sample: Path, data: bytearray, section: str) -> None:
    at = spans(data)[section][0]
    data[at + 3] ^= 1
    sample.write_bytes(data)
    pack = Pack.open(sample)
    with pytest.raises(PackDamaged, match=rf"section {section} at offset {at}"):
        getattr(pack, section)


@pytest.mark.parametrize("section", ["metadata", "names", "tensors", "entries", "footer"])
def test_a_flipped_index_is_found_at_opening(sample: Path, data: bytearray, section: str) -> None:
    at = spans(data)[section][0]
    data[at + 3] ^= 1
    sample.write_bytes(data)
    with pytest.raises(PackDamaged, match=rf"{section}.* at offset {at}"):
        Pack.open(sample)


def test_a_raw_tensor_and_padding(sample: Path, data: bytearray) -> None:
    pack = Pack.open(sample)
    at = pack.address(pack._record("cube", raw=True)["first_entry"]) - pack.address(0) + 4096
    data[at] ^= 1
    assert f"(raw tensor cube) at offset {at}" in refusal(sample, data)
    data[at] ^= 1
    data[at + 61] = 1
    assert "padding before entry" in refusal(sample, data)


def test_cut_or_grown_anywhere(sample: Path, data: bytearray) -> None:
    for length in [1, 7, 8, 100, 4095, 4096, 4097, 50_000, len(data) - (2 << 20), len(data) - 4096, len(data) - 1]:
        sample.write_bytes(data[:length])
        with pytest.raises(PackError, match="not an ork pack" if length < 8 else "cut off after|its header says"):
            Pack.open(sample)
    assert "its header says" in refusal(sample, data + b"\0")


def test_files_that_are_no_packs(tmp_path: Path) -> None:
    for content in (b"", b"GGUF" + bytes(9000), bytes(5000), b"\x89ork\n\x1a\n" + bytes(5000)):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(PackError, match=r"not an ork pack.*ork convert"):
            Pack.open(tmp_path / "x")
    with pytest.raises(PackError, match="no such file"):
        Pack.open(tmp_path / "nothing")
    with pytest.raises(PackError, match="is a directory"):
        Pack.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PackError, match="not a regular file"):
        Pack.open(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", "nul\0"):
        with pytest.raises(StorageError, match="cannot read"):
            Pack.open(path)


@pytest.mark.parametrize(
    ("version", "remedy"), [(2, "update ork"), (2**32 - 1, "update ork"), (0, "convert the model")]
)
def test_another_version(sample: Path, data: bytearray, version: int, remedy: str) -> None:
    data[8:12] = struct.pack("<I", version)
    plain_reader.reseal(data)
    sample.write_bytes(data)
    with pytest.raises(PackVersion, match=rf"pack version {version} .*{remedy}"):
        Pack.open(sample)


def put(fmt: str, section: str, at: int, value: int) -> Callable[[bytearray], None]:
    def edit(data: bytearray) -> None:
        start = 0 if section == "header" else spans(data)[section][0]
        struct.pack_into(fmt, data, start + at, value)

    return edit


def rename(old: bytes, new: bytes) -> Callable[[bytearray], None]:
    def edit(data: bytearray) -> None:
        at, nbytes = spans(data)["names"]
        data[at : at + nbytes] = re.sub(old, new, data[at : at + nbytes])

    return edit


T, E = 96, 48
EDITS: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "2^60 slices": (put("<Q", "header", 24, 1 << 60), "sections and counts"),
    "2^60 entries": (put("<Q", "header", 32, 1 << 60), "sections and counts"),
    "2^60 tensors": (put("<Q", "header", 40, 1 << 60), "sections and counts"),
    "fewer slices": (put("<Q", "header", 24, 3), "slices are not as many"),
    "page size": (put("<I", "header", 12, 512), "sections and counts"),
    "a section outside": (put("<Q", "header", 64 + 16 * 5, 1 << 63), "sections and counts"),
    "an endless section": (put("<Q", "header", 64 + 16 * 6 + 8, (1 << 64) - 96), "sections and counts"),
    "a shorter name": (put("<I", "tensors", 4, 3), "tensor 1 of the index"),
    "an endless name": (put("<I", "tensors", 4, 2**32 - 1), "tensor 1 of the index"),
    "a nameless tensor": (put("<I", "tensors", 4, 0), "tensor 0 of the index"),
    "an unknown kind": (put("<B", "tensors", 8, 2), "unknown kind"),
    "a weight that says raw": (put("<B", "tensors", 8, 1), "weight follows"),
    "an unknown codec": (put("<B", "tensors", 9, 9), "codec is unknown"),
    "another codec": (put("<B", "tensors", 9, 2), "size is not"),
    "three dimensions": (put("<B", "tensors", 10, 3), "shape is impossible"),
    "200 dimensions": (put("<B", "tensors", 10, 200), "shape is impossible"),
    "a layer of -2": (put("<i", "tensors", 12, -2), "below -1"),
    "2^32 - 1 entries of a tensor": (put("<I", "tensors", 28, 2**32 - 1), "tensor 1 of the index"),
    "no entries of a tensor": (put("<I", "tensors", 28, 0), "tensor 0 of the index"),
    "N of 2^60": (put("<Q", "tensors", 32, 1 << 60), "shape is impossible"),
    "N of 2^31": (put("<Q", "tensors", 32, 1 << 31), "padding, group or rotation"),
    "K of 0": (put("<Q", "tensors", 40, 0), "shape is impossible"),
    "K padded by more": (put("<I", "tensors", 64, 128), "padding, group or rotation"),
    "another ks": (put("<I", "tensors", 72, 32), "K slice is not"),
    "rotation 3": (put("<I", "tensors", 76, 3), "padding, group or rotation"),
    "group 2^31": (put("<I", "tensors", 80, 1 << 31), "padding, group or rotation"),
    "act_group 7": (put("<I", "tensors", 84, 7), "padding, group or rotation"),
    "2 of 3 blocks mixed": (put("<I", "tensors", 88, 2), "padding, group or rotation"),
    "mixed without a rotation": (put("<I", "tensors", 88 + T, 4), "padding, group or rotation"),
    "a reserved field": (put("<I", "tensors", 92, 1), "reserved"),
    "an offset of 2^64 - 1": (put("<Q", "entries", 0, 2**64 - 1), "slice 0 (token_embd.weight, columns 0-320)"),
    "an overlap": (put("<Q", "entries", E, 4096), "slice 1 (blk.0.attn_q.weight, columns 0-64) of the index"),
    "a gap": (put("<Q", "entries", E, 4096 * 40), "overlaps, or does not follow"),
    "a larger slice": (put("<Q", "entries", 8, 40_000), "size is not"),
    "a slice of 2^60 bytes": (put("<Q", "entries", 8, 1 << 60), "outside the file"),
    "another tensor's slice": (put("<I", "entries", 32, 1), "does not belong"),
    "a tensor of 2^32 - 1": (put("<I", "entries", 32, 2**32 - 1), "does not belong"),
    "columns from 64": (put("<I", "entries", 36, 64), "columns do not follow"),
    "columns to 384": (put("<I", "entries", 40, 384), "columns do not follow"),
    "no columns": (put("<I", "entries", 40, 0), "columns do not follow"),
    "another slice's hash": (put("<Q", "entries", 16, 5), "slice 0 (token_embd.weight, columns 0-320)"),
    "a name twice": (rename(rb"blk\.1\.up\.1", b"blk.1.up.0"), "blk.1.up.0 appears twice"),
    "names that ring and break lines": (
        rename(rb"blk\.1\.up\..", b"a\n\a\x1b[31mb!"),
        "a\ufffd\ufffd\ufffd[31mb! appears",
    ),
    "a name that is not UTF-8": (rename(rb"blk\.1\.up\.1", b"blk.1.up.\xff"), "not UTF-8"),
    "a recipe that is no object": (put("<B", "recipe", 0, 0x5B), "not a JSON object"),
}


@pytest.mark.parametrize("name", sorted(EDITS))
def test_a_pack_made_up_with_right_hashes(sample: Path, data: bytearray, name: str) -> None:
    edit, why = EDITS[name]
    edit(data)
    plain_reader.reseal(data)
    assert why in refusal(sample, data)
