"""What is measured on: models by path or name, packs made anew from them, and real English."""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path

from ork.sources import hub
from peer_env import cache_folder

DEFAULT_MODELS = ["smollm2-135m", "gemma3-270m"]
PACKAGE = "sentencepiece==0.2.1"
MEMBER = "sentencepiece-0.2.1/test/botchan.txt"
AUSTEN_PACKAGE = "r-cran-janeaustenr"
AUSTEN_DATA = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")
SHA256 = "464bd5300c24fce16fcc4555d4231a57632caae4d0090ad6aa92854a3b227ba7"


def add_models(parser: argparse.ArgumentParser) -> None:
    """The positional argument `models`: GGUF files, as paths or names that `ork pull` knows."""
    parser.add_argument("models", nargs="*", default=DEFAULT_MODELS, metavar="MODEL", help="GGUF files or known names")


def gguf_file(model: str) -> Path:
    """The file of a model, fetched if it is a name."""
    return hub.pull(model)


def fresh_pack(model: Path, folder: Path, *options: str) -> Path:
    """The model's pack as `ork convert` with these options makes it now: no older pack of the cache is measured."""
    pack = folder / f"{model.stem}-{re.sub(r'[^A-Za-z0-9.]+', '-', ''.join(options))[:60]}.orkpack"
    command = [sys.executable, "-m", "ork", "convert", str(model), "-o", str(pack), *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return pack


def english() -> Path:
    """Botchan (Natsume Soseki; Project Gutenberg) from its first chapter on, in sentencepiece's source distribution.

    Downloaded once by pip and kept in the cache.
    """
    kept = cache_folder("texts") / "botchan.txt"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "sentencepiece"]
            subprocess.run([*pip, "--dest", folder, PACKAGE], check=True, stdout=sys.stderr)
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                member = tar.extractfile(MEMBER)
                assert member is not None
                data = member.read()
        if hashlib.sha256(data).hexdigest() != SHA256:
            raise SystemExit(f"{MEMBER} of {PACKAGE} is not the expected text")
        kept.write_bytes(data[data.index(b"CHAPTER I") :].replace(b"\r\n", b"\n"))
    return kept


def austen(novel: str = "persuasion") -> Path:
    """One of Jane Austen's six novels (public domain), from Debian's package of them; kept in the cache."""
    kept = cache_folder("texts") / f"{novel}.txt"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["apt-get", "download", AUSTEN_PACKAGE], check=True, cwd=folder, stdout=sys.stderr)
            (archive,) = Path(folder).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
            kept.write_bytes(b"\n".join(_lines((Path(folder) / AUSTEN_DATA).read_bytes(), NOVELS.index(novel))))
    return kept


def _lines(rdb: bytes, index: int) -> list[bytes]:
    """The strings of vector `index` of an R lazy-load database: records of [big-endian size][zlib stream], each a
    serialised object: header 'X\\n', three versions, the encoding's name, then type 16 with its length, and for every
    string its flags, length and bytes (R Internals, "Serialization Formats")."""
    for _ in range(index + 1):
        stream = zlib.decompressobj()
        data = stream.decompress(rdb[4:])
        rdb = stream.unused_data

    def word(at: int) -> int:
        return int.from_bytes(data[at : at + 4], "big")

    at = 18 + word(14)
    if data[:2] != b"X\n" or word(at) & 0xFF != 16:
        raise SystemExit("the package of Austen's novels is not laid out as expected")
    count, at, lines = word(at + 4), at + 8, []
    for _ in range(count):
        size = word(at + 4)
        lines.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return lines
