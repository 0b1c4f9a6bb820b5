"""Real English to measure on: Botchan (Natsume Soseki; Project Gutenberg), from sentencepiece's source distribution."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from peer_env import cache_folder

PACKAGE = "sentencepiece==0.2.1"
MEMBER = "sentencepiece-0.2.1/test/botchan.txt"
SHA256 = "464bd5300c24fce16fcc4555d4231a57632caae4d0090ad6aa92854a3b227ba7"


def english() -> Path:
    """The novel's text from its first chapter on; downloaded once by pip and kept in the cache."""
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
