"""Where the other programs live: each in a virtual environment of its own, outside the project, made by pip.

    $ORK_HOME/peers/llama.cpp
    $ORK_HOME/peers/ik_llama.cpp

Both are compiled for this processor from their source distributions: the published wheels stop at AVX2 and would
flatter us. `$ORK_HOME` defaults to `~/.cache/ork`. Everything runs in them through `peer_worker.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("peer_worker.py")


@dataclass(frozen=True)
class Peer:
    """A program to compare with and the package it comes in."""

    name: str
    requirement: str
    module: str


NATIVE = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}
PEERS = {
    peer.name: peer
    for peer in (
        Peer("llama.cpp", "llama-cpp-python==0.3.36", "llama_cpp"),
        Peer("ik_llama.cpp", "ik-llama-cpp-python==0.1.5", "ik_llama_cpp"),
    )
}


def cache_folder(name: str) -> Path:
    """A folder under `$ORK_HOME`, made if need be."""
    folder = Path(os.environ.get("ORK_HOME") or Path.home() / ".cache" / "ork") / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def python_of(peer: Peer) -> Path:
    return cache_folder("peers") / peer.name / "bin" / "python"


def installed(peer: Peer) -> bool:
    """Whether the peer's environment exists and its package (of the version asked for) is in it."""
    package, version = peer.requirement.split("==")
    check = f"import importlib.metadata as m; raise SystemExit(m.version({package!r}) != {version!r})"
    python = python_of(peer)
    return python.exists() and subprocess.run([python, "-c", check], check=False, capture_output=True).returncode == 0


def set_up(peer: Peer) -> None:
    """Make the peer's environment: compiling takes minutes."""
    if installed(peer):
        print(f"{peer.name}: {peer.requirement} is installed", file=sys.stderr)
        return
    print(f"{peer.name}: installing {peer.requirement} ...", file=sys.stderr)
    venv.create(python_of(peer).parent.parent, with_pip=True, clear=True)
    package = peer.requirement.split("==")[0]
    pip = [python_of(peer), "-m", "pip", "install", "--quiet", "--no-binary", package, peer.requirement]
    subprocess.run(pip, check=True, env={**os.environ, **NATIVE})


def require(names: list[str]) -> list[Peer]:
    """The peers of these names; ends the program with what to do if one is missing."""
    peers = [PEERS[name] for name in names]
    if missing := [peer.name for peer in peers if not installed(peer)]:
        raise SystemExit(f"not installed: {', '.join(missing)}; run `python bench/peers.py --setup` first")
    return peers


def run_worker(peer: Peer, *arguments: object) -> Any:
    """Run `peer_worker.py` in the peer's environment; returns the JSON it prints."""
    command = [str(python_of(peer)), str(WORKER), peer.module, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{peer.name} failed: {' '.join(command)}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
