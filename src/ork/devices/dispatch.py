"""Where the experts of a mixture are computed: NPU or CPU, by what was published of the RK3588, with the reason.

No figure is measured here: `BOARD` is a table, and what comes of it is a prediction that says so. Decode, and experts
that get a few rows each, are a walk over weight bytes, of which the CPU's 4-bit ones are half the NPU's int8 ones;
many rows each are products, which the NPU has more of; and weights that must be brought in first cost more than either.
"""

from __future__ import annotations

from dataclasses import dataclass

from ork.devices.npu_experts import MAC_RATE, TASK

PLACES = ("auto", "cpu", "npu")
CORES = 3
ROWS = 512  # of a chunk of prefill
LEAST = 32  # rows of a pass: below, products that an NPU should win were seen to lose (published: 16 lose, 32 win)
MARGIN = 0.9  # what is predicted to be nearly as fast stays on the CPU


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes, products or results a second; seconds a piece. The sources are ork-driver's roadmap (RM), its page on
    streaming (LS) and rk-llama.cpp's README (RKL)."""

    submit: float = 132e-6  # a blocking one beside the work (RM tier 11)
    task: float = TASK  # a program (RM tier 13)
    npu_macs: float = CORES * MAC_RATE  # int8 512 x 2048 x 2048 in 3967 us, three cores pulling: 3x (RM 1c, tier 6)
    npu_bytes: float = 20e9  # of weights, six products at once (RM); one core alone 10.8e9
    bring: float = 16e6 / 13e-3  # a weight of 16 MB from the pack into NPU memory (LS)
    scale: float = 2 * 512 * 2048 / 1793e-6  # sums that the host adds and scales (RM 1c)
    cpu_macs: float = 65e9  # four A76: 7.3e1 and 1.75e1 tok/s of models with 1.0e9 and 3.4e9 weights (RKL)
    cpu_bytes: float = 9.4e9  # four A76 (RM)


BOARD = Rates()


@dataclass(frozen=True, slots=True)
class Mixture:
    """The routed experts of a layer. Bytes of one expert: in the pack, and where the NPU maps it."""

    experts: int
    top_k: int
    width: int
    inner: int
    pack_bytes: int
    mapped_bytes: int

    def active(self, rows: int) -> float:
        """Experts that a pass of so many rows reaches, if routing were even; skew makes them fewer."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** rows)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a layer's experts in one pass, and of the NPU's part those that bring weights in."""

    npu: float
    cpu: float
    brought: float


def estimate(m: Mixture, rows: int, streamed: float = 0.0, rates: Rates = BOARD) -> Estimate:
    """A pass of `rows` rows, of whose experts the share `streamed` is not in the NPU's memory yet.

    What both read from the disk is left out: it is the same.
    """
    active, gathered = m.active(rows), rows * m.top_k
    macs = 3 * gathered * m.width * m.inner
    tasks = 3 * active * rates.task / CORES  # gate, up and down of each, where one program takes all of its rows
    computing = max(3 * active * m.width * m.inner / rates.npu_bytes, macs / rates.npu_macs)
    results = gathered * (2 * m.inner + m.width) / rates.scale
    brought = streamed * active * m.mapped_bytes / rates.bring
    npu = 2 * rates.submit + tasks + computing + results + brought
    cpu = max(active * m.pack_bytes / rates.cpu_bytes, macs / rates.cpu_macs)
    return Estimate(npu, cpu, brought)


def rows_from(m: Mixture, streamed: float = 0.0, most: int = ROWS) -> int | None:
    """The fewest rows of a pass with which the NPU is clearly ahead, up to a chunk; None: it never is."""
    each = ((rows, estimate(m, rows, streamed)) for rows in range(LEAST, most + 1))
    return next((rows for rows, e in each if e.npu < MARGIN * e.cpu), None)


@dataclass(frozen=True, slots=True)
class Choice:
    """`rows`: of an expert, on average, from which on the NPU computes; None: the CPU always does."""

    rows: float | None
    reason: str


def choose(mode: str, m: Mixture, *, streamed: float = 0.0, why_not: str = "") -> Choice:
    """Where experts are computed if asked for `mode`; `why_not`: what keeps auto from the NPU whatever it costs."""
    if mode == "cpu":
        return Choice(None, "experts on the CPU: asked for")
    if mode == "npu":
        return Choice(0, "experts on the NPU: asked for")
    if why_not:
        return Choice(None, f"experts on the CPU: auto: {why_not}")
    least = rows_from(m, streamed)
    at = ROWS if least is None else least
    e = estimate(m, at, streamed)
    bringing = f", {1e3 * e.brought:.1f} of them to bring weights in" if e.brought else ""
    said = (
        f"a pass of {at} rows, top {m.top_k} of {m.experts} experts, takes {1e3 * e.npu:.1f} ms a layer on the NPU"
        f"{bringing}, {1e3 * e.cpu:.1f} on the CPU (predicted from published figures of an RK3588)"
    )
    if least is None:
        return Choice(None, f"experts on the CPU: auto: {said}")
    return Choice(least * m.top_k / m.active(least), f"experts on the NPU for {least} rows and more: auto: {said}")
