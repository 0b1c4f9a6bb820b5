"""Where the other programs live: each in a virtual environment of its own, outside the project, made by pip.

    $ORK_HOME/peers/llama.cpp
    $ORK_HOME/peers/ik_llama.cpp

Both are compiled for this processor: the published wheels stop at AVX2 and would flatter us.
`$ORK_HOME` defaults to `~/.cache/ork`. Everything runs in them through `peer_worker.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("peer_worker.py")


@dataclass(frozen=True)
class Peer:
    """A program to compare with, the package it comes in and the module of its binding.

    `vendor` is where the program's own sources lie in the source distribution, for a package that cannot be built
    whole: its wheel is installed, the library alone is compiled, and `library_variable` tells the binding of it.
    """

    name: str
    requirement: str
    module: str
    vendor: str = ""
    library_variable: str = ""

    @property
    def folder(self) -> Path:
        return cache_folder("peers") / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def library(self) -> Path:
        return self.folder / "native" / "build" / "src" / "libllama.so"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("llama.cpp", "llama-cpp-python==0.3.36", "llama_cpp"),
        # Its source distribution lacks files of the command-line tools that its build insists on.
        Peer(
            "ik_llama.cpp",
            "ik-llama-cpp-python==0.1.5",
            "ik_llama_cpp",
            vendor="vendor/ik_llama.cpp",
            library_variable="IK_LLAMA_CPP_LIB_PATH",
        ),
    )
}


def cache_folder(name: str) -> Path:
    """A folder under `$ORK_HOME`, made if need be."""
    folder = Path(os.environ.get("ORK_HOME") or Path.home() / ".cache" / "ork") / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def installed(peer: Peer) -> bool:
    """Whether the peer's environment exists and its package (of the version asked for) is in it."""
    package, version = peer.requirement.split("==")
    check = f"import importlib.metadata as m; raise SystemExit(m.version({package!r}) != {version!r})"
    if not peer.python.exists() or (peer.vendor and not peer.library.exists()):
        return False
    return subprocess.run([peer.python, "-c", check], check=False, capture_output=True).returncode == 0


def set_up(peer: Peer) -> None:
    """Make the peer's environment: compiling takes minutes."""
    if installed(peer):
        print(f"{peer.name}: {peer.requirement} is installed", file=sys.stderr)
        return
    print(f"{peer.name}: installing {peer.requirement} ...", file=sys.stderr)
    venv.create(peer.folder, with_pip=True, clear=True)
    pip = [str(peer.python), "-m", "pip"]
    if peer.vendor:
        subprocess.run([*pip, "install", "--quiet", peer.requirement, "cmake", "ninja"], check=True)
        build_library(peer)
    else:
        package = peer.requirement.split("==")[0]
        native = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON"}
        subprocess.run([*pip, "install", "--quiet", "--no-binary", package, peer.requirement], check=True, env=native)


def build_library(peer: Peer) -> None:
    """Compile the library alone from the package's source distribution."""
    native = peer.folder / "native"
    package = peer.requirement.split("==")[0]
    download = [str(peer.python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package]
    subprocess.run([*download, "--dest", str(native), peer.requirement], check=True)
    (archive,) = native.glob("*.tar.gz")
    shutil.unpack_archive(archive, native)
    source = native / archive.name.removesuffix(".tar.gz") / peer.vendor
    tools = peer.python.parent
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF"]
    options += ["-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    options += [
        "-DGGML_IQK_FA_ALL_QUANTS=OFF"
    ]  # attention kernels for quantised KV caches: half of the build, not used
    options += ["-DCMAKE_C_FLAGS=-w", "-DCMAKE_CXX_FLAGS=-w"]  # a hundred megabytes of warnings
    log = native / "build.log"
    build = str(native / "build")
    with log.open("w") as out:
        for step in (
            ["-G", "Ninja", "-S", str(source), "-B", build, *options],
            ["--build", build, "--target", "llama"],
        ):
            if subprocess.run([str(tools / "cmake"), *step], check=False, stdout=out, stderr=out).returncode:
                raise SystemExit(f"{peer.name} does not compile here; see {log}")


def require(names: list[str]) -> list[Peer]:
    """The peers of these names; ends the program with what to do if one is missing."""
    peers = [PEERS[name] for name in names]
    if missing := [peer.name for peer in peers if not installed(peer)]:
        raise SystemExit(f"not installed: {', '.join(missing)}; run `python bench/peers.py --setup` first")
    return peers


def run_worker(peer: Peer, *arguments: object, before: Callable[[], None] | None = None) -> Any:
    """Run `peer_worker.py` in the peer's environment, `before` in its process first; returns the JSON it prints."""
    command = [str(peer.python), str(WORKER), peer.module, *map(str, arguments)]
    environment = {**os.environ, peer.library_variable: str(peer.library)} if peer.library_variable else None
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, preexec_fn=before)
    if done.returncode:
        raise SystemExit(f"{peer.name} failed: {' '.join(command)}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
