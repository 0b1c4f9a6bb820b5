"""A model's shape, read from GGUF metadata and checked before anything is built from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ork.errors import SourceError

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_EXPERTS = 4096
MAX_TAPS = 16  # of a short convolution
GATINGS = {1: "softmax", 2: "sigmoid"}  # GGUF's expert_gating_func; 0: what the architecture does


@dataclass(frozen=True)
class RopeScaling:
    """How positions are stretched: 'none', or 'linear' by `factor`. llama3's comes as a tensor of divisors."""

    kind: str = "none"
    factor: float = 1.0


@dataclass(frozen=True)
class Experts:
    """Experts of a layer and how rows are routed to them (`Ops.route`). `ffn` and `shared_ffn` are inner widths, of a
    routed and of the shared expert (0: there is none), which may be `gated`; the first `dense` layers have an ordinary
    feed-forward."""

    count: int
    used: int
    ffn: int
    shared_ffn: int
    gated: bool
    dense: int
    gating: str
    normalise: bool
    scale: float
    groups: int
    used_groups: int


@dataclass(frozen=True)
class MoeDefaults:
    """What an architecture does where the metadata are silent. `ffn` of an expert: 'given' must be there, 'whole' is
    the feed-forward length, 'parts' that over the number of experts used. `shared`: the whole is that of a gated shared
    expert; `always`: there are experts."""

    gating: str = "softmax"
    normalise: bool = True
    ffn: str = "given"
    shared: bool = False
    always: bool = True


@dataclass(frozen=True)
class Config:
    """Sizes in elements, eps and bases as the model was trained; `window` 0 means no sliding window.

    A layer whose `kv_heads_of` is 0 has a short convolution over `taps` positions in place of attention; `kv_heads` is
    the number of the others. `residual_scale` multiplies what a half block adds, `logit_scale` divides the logits.
    """

    arch: str
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    rope_base: float
    rope_dim: int
    rope_scaling: RopeScaling
    window: int
    window_pattern: tuple[bool, ...]  # per layer: does it use the window
    local_rope_base: float
    attention_scale: float
    attention_softcap: float
    final_softcap: float
    tied: bool
    kv_heads_of: tuple[int, ...] = ()
    taps: int = 0
    experts: Experts | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def attention_layers(self) -> int:
        return sum(map(bool, self.kv_heads_of))

    @property
    def conv_layers(self) -> int:
        return self.layers - self.attention_layers

    def place(self, layer: int) -> int:
        """The number of a layer among those of its kind, attention or convolution: where its cache lies."""
        kind = bool(self.kv_heads_of[layer])
        return sum(bool(n) == kind for n in self.kv_heads_of[:layer])

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense


class _Reader:
    def __init__(self, metadata: Mapping[str, object], arch: str):
        self.metadata = metadata
        self.arch = arch

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self.arch}.{key}"
        value = self.metadata.get(name, default)
        if isinstance(value, np.ndarray) and value.size and bool(np.all(value == value[0])):
            value = value[0].item()  # a per-layer array whose layers agree
        if value is None:
            raise SourceError(f"metadata: {name} is missing, so this is not a complete {self.arch} model")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
            raise SourceError(f"metadata: {name} = {str(value)[:60]!r} is not one number for all layers")
        return value

    def count(self, key: str, default: int | None = None, top: int = MAX_WIDTH, least: int = 1) -> int:
        value = self.number(key, default)
        if value != int(value) or not least <= value <= top:
            raise SourceError(f"metadata: {self.arch}.{key} = {value} lies outside of {least}..{top}")
        return int(value)


def read_config(
    metadata: Mapping[str, object],
    vocab: int,
    tied: bool,
    *,
    default_pattern: int = 0,
    local_base: float = 0.0,
    moe: MoeDefaults | None = None,
    mixed: bool = False,
) -> Config:
    """The shape of a model whose embedding has `vocab` rows; `tied` if it has no output tensor of its own.

    `default_pattern` n: where the metadata has a window but no pattern, every n-th layer is global; 0: all are local.
    `moe`: the architecture may have experts; `mixed`: some layers may be short convolutions.
    Raises SourceError naming the key that is missing or makes no sense.
    """
    arch = str(metadata["general.architecture"])
    read = _Reader(metadata, arch)
    layers = read.count("block_count", top=MAX_LAYERS)
    width = read.count("embedding_length")
    heads = read.count("attention.head_count", top=1024)
    kv_heads_of = _kv_heads(read, layers, heads, mixed)
    kv_heads = max(kv_heads_of)
    if heads % kv_heads:
        raise SourceError(f"metadata: {heads} query heads cannot share {kv_heads} key heads")
    key_length = f"{arch}.attention.key_length"
    if key_length not in metadata and width % heads:
        raise SourceError(f"metadata: width {width} does not divide into {heads} heads and {key_length} is missing")
    head_dim = read.count("attention.key_length", max(1, width // heads), top=1024)
    if read.count("attention.value_length", head_dim, top=1024) != head_dim:
        raise SourceError(f"metadata: {arch}.attention.value_length differs from the key length {head_dim}")
    rope_dim = read.count("rope.dimension_count", head_dim, top=head_dim, least=2)
    window = read.count("attention.sliding_window", 0, top=1 << 30, least=0)
    ffn = read.count("feed_forward_length")
    return Config(
        arch=arch,
        layers=layers,
        width=width,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        context=read.count("context_length", top=1 << 30),
        eps=_at_least_zero(read, "attention.layer_norm_rms_epsilon"),
        rope_base=_positive(read, "rope.freq_base", 10000.0),
        rope_dim=rope_dim - rope_dim % 2,
        rope_scaling=_scaling(read),
        window=window,
        window_pattern=_pattern(read, layers, window, default_pattern),
        local_rope_base=_positive(read, "rope.freq_base_swa", local_base or 10000.0),
        attention_scale=_at_least_zero(read, "attention.scale", 0.0) or head_dim**-0.5,
        attention_softcap=_at_least_zero(read, "attn_logit_softcapping", 0.0),
        final_softcap=_at_least_zero(read, "final_logit_softcapping", 0.0),
        tied=tied,
        kv_heads_of=kv_heads_of,
        taps=read.count("shortconv.l_cache", top=MAX_TAPS) if mixed else 0,
        experts=_experts(read, layers, ffn, moe) if moe else None,
        embedding_scale=_positive(read, "embedding_scale", 1.0),
        residual_scale=_positive(read, "residual_scale", 1.0),
        logit_scale=_positive(read, "logit_scale", 1.0),
    )


def _kv_heads(read: _Reader, layers: int, heads: int, mixed: bool) -> tuple[int, ...]:
    """Key heads of each layer: all the same, but for those that are 0 in a model of mixed layers."""
    name = f"{read.arch}.attention.head_count_kv"
    value = read.metadata.get(name)
    if not (mixed and isinstance(value, np.ndarray)):
        return (read.count("attention.head_count_kv", heads, top=heads),) * layers
    if value.size != layers or value.dtype.kind not in "iu":
        raise SourceError(f"metadata: {name} has {value.size} values, not a count for each of {layers} layers")
    counts = tuple(int(v) for v in value)
    others = sorted({n for n in counts if n})
    if len(others) != 1 or not 0 < others[0] <= heads:
        raise SourceError(f"metadata: {name} = {str(counts)[:60]}: layers with attention must agree, 1 to {heads}")
    return counts


def _experts(read: _Reader, layers: int, ffn: int, moe: MoeDefaults) -> Experts | None:
    count = read.count("expert_count", None if moe.always else 0, top=MAX_EXPERTS, least=int(moe.always))
    if not count:
        return None
    used = read.count("expert_used_count", top=count)
    if moe.ffn == "given":
        inner = read.count("expert_feed_forward_length")
    else:
        inner = read.count("expert_feed_forward_length", max(1, ffn if moe.ffn == "whole" else ffn // used))
    gating = read.count("expert_gating_func", 0, top=max(GATINGS), least=0)
    groups = read.count("expert_group_count", 1, top=count)
    used_groups = read.count("expert_group_used_count", groups, top=groups)
    if count % groups or used > used_groups * (count // groups):
        raise SourceError(
            f"metadata: {read.arch}.expert_group_count = {groups}, {used_groups} of them used: {count} experts, {used} "
            "used, do not go with that"
        )
    return Experts(
        count=count,
        used=used,
        ffn=inner,
        shared_ffn=read.count("expert_shared_feed_forward_length", ffn if moe.shared else 0, least=0),
        gated=moe.shared,
        dense=read.count("leading_dense_block_count", 0, top=layers, least=0),
        gating=GATINGS.get(gating, moe.gating),
        normalise=_flag(read, "expert_weights_norm", moe.normalise),
        scale=_at_least_zero(read, "expert_weights_scale", 1.0) or 1.0,
        groups=groups,
        used_groups=used_groups,
    )


def _flag(read: _Reader, key: str, default: bool) -> bool:
    value = read.metadata.get(f"{read.arch}.{key}", default)
    if not isinstance(value, bool):
        raise SourceError(f"metadata: {read.arch}.{key} = {str(value)[:60]!r} is not true or false")
    return value


def _positive(read: _Reader, key: str, default: float) -> float:
    value = read.number(key, default)
    if value <= 0:
        raise SourceError(f"metadata: {read.arch}.{key} = {value} must be positive")
    return value


def _at_least_zero(read: _Reader, key: str, default: float | None = None) -> float:
    value = read.number(key, default)
    if value < 0:
        raise SourceError(f"metadata: {read.arch}.{key} = {value} must not be negative")
    return value


def _scaling(read: _Reader) -> RopeScaling:
    kind = str(read.metadata.get(f"{read.arch}.rope.scaling.type", "none"))
    if kind in ("none", ""):
        factor = _positive(read, "rope.scale_linear", 1.0)  # the key's older name
        return RopeScaling("linear", factor) if factor != 1.0 else RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", _positive(read, "rope.scaling.factor", 1.0))
    raise SourceError(f"metadata: rope scaling {kind!r} is not supported; known are none, linear and llama3")


def _pattern(read: _Reader, layers: int, window: int, default_pattern: int) -> tuple[bool, ...]:
    if not window:
        return (False,) * layers
    value = read.metadata.get(f"{read.arch}.attention.sliding_window_pattern")
    if isinstance(value, np.ndarray):
        if value.size < layers:
            raise SourceError(f"metadata: the sliding window pattern names {value.size} of {layers} layers")
        return tuple(bool(v) for v in value[:layers])
    every = (
        default_pattern if value is None else read.count("attention.sliding_window_pattern", top=MAX_LAYERS, least=0)
    )
    return tuple(not every or (i + 1) % every != 0 for i in range(layers))
