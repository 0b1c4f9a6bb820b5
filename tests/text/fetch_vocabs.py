"""Fetch llama.cpp's test vocabularies and chat templates, and print the folder for ORK_VOCABS.

They are in the source distribution of llama-cpp-python (76 MB, MIT), which is unpacked in part and never built.
Usage: python tests/text/fetch_vocabs.py [FOLDER]      (default: $ORK_HOME/vocabs, else ~/.cache/ork/vocabs)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SOURCE = "llama-cpp-python==0.3.36"
WANTED = re.compile(r"[^/]+/vendor/llama\.cpp/models/(?:templates/)?([\w.+-]+\.(?:gguf|inp|out|jinja))")


def unpack(archive: Path, folder: Path) -> int:
    """The wanted members, by their last name only; whatever else is in the archive stays there."""
    count = 0
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            name = WANTED.fullmatch(member.name)
            if not name or not member.isfile():
                continue
            source = tar.extractfile(member)
            assert source is not None
            with open(folder / name[1], "wb") as out:
                shutil.copyfileobj(source, out)
            count += 1
    return count


def main() -> None:
    home = Path(os.environ.get("ORK_HOME") or Path.home() / ".cache" / "ork")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else home / "vocabs"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", temporary]
            subprocess.run([*pip, SOURCE], check=True, stdout=sys.stderr)
            (archive,) = Path(temporary).glob("*.tar.gz")
            fresh = Path(temporary) / "vocabs"
            fresh.mkdir()
            if unpack(archive, fresh) < 100:
                raise SystemExit(f"{SOURCE} does not hold the vocabularies")
            os.replace(fresh, folder)
    print(folder)


if __name__ == "__main__":
    main()
