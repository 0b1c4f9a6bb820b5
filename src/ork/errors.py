"""The errors a user can cause. Each is one clear line: what, where, what to do."""

from __future__ import annotations


class OrkError(Exception):
    """Base of every error that the command line prints as one line with exit code 2."""


class UsageError(OrkError):
    """A request that cannot be met as asked: wrong flag values, prompt longer than the context, unknown name."""


class PackBusy(UsageError):
    """Another process is writing the pack."""


class SourceError(OrkError):
    """A GGUF, safetensors or hub file that is missing, damaged or not supported."""


class PackError(OrkError):
    """A `.orkpack` that cannot be opened or used; `PackDamaged` and `PackVersion` say why."""


class PackDamaged(PackError):
    """Bytes that do not match their hash, or an index that does not fit its file."""


class PackVersion(PackError):
    """A pack written by a newer (or unknown) version of the format."""


class StorageError(OrkError):
    """The disk refused: full, unreadable, no permission."""


class NpuError(OrkError):
    """The NPU, its kernel driver or the emulated chip refused something."""


class SubmitFailed(NpuError):
    """A job that did not complete, after a reset and one more attempt; its results must not be used."""
