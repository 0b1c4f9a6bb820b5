"""`ork run`: text to standard output and nothing else there; what it took goes to standard error."""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ork.cli.common import (
    add_device,
    add_fault,
    add_model,
    check_threads,
    faulty_board,
    parse_size,
    progress_bar,
    resolve,
    say,
    size_text,
)
from ork.cli.recipes import add_first_run, first_run_recipe
from ork.cli.window import add_window, ready_facts, say_ready, say_window, window_facts, window_options
from ork.errors import UsageError

if TYPE_CHECKING:
    from ork.api import LoadedModel
    from ork.build.running import RunningPack
    from ork.emulator.kernel import EmulatedKernel
    from ork.engine.session import Stats
    from ork.pack.reader import Pack
    from ork.quant.recipe import Recipe

MAX_PROMPT_BYTES = 64 << 20
DRAFT_MAX = 8  # as `ork.engine.speculative` has it, which --help does not import


def add(sub: argparse.ArgumentParser) -> None:
    add_model(sub)
    text = sub.add_mutually_exclusive_group()
    text.add_argument("-p", "--prompt", metavar="TEXT", help="the text to go on from, or the first message of a chat")
    text.add_argument("-f", "--file", type=Path, metavar="FILE", help="the same from a file (default: standard input)")
    sub.add_argument("--chat", action="store_true", help="a conversation in the model's chat template")
    sub.add_argument("--chat-template", metavar="NAME", help="a built-in template: chatml, gemma, llama3")
    sub.add_argument("-n", "--max-tokens", type=int, default=512, metavar="N", help="tokens at most, -1: no limit")
    sub.add_argument("-c", "--context", type=int, metavar="N", help="positions of the KV cache (default: up to 4096)")
    sub.add_argument("--temp", type=float, default=0.0, metavar="T", help="temperature; 0 is greedy (default)")
    sub.add_argument("--top-k", type=int, default=40, metavar="K", help="the K likeliest tokens; 0: all (default: 40)")
    sub.add_argument(
        "--top-p", type=float, default=0.95, metavar="P", help="those that make up P together; 1: off (default: 0.95)"
    )
    sub.add_argument(
        "--min-p", type=float, default=0.05, metavar="P", help="P times the likeliest's or more; 0: off (default: 0.05)"
    )
    sub.add_argument("--repeat-penalty", type=float, default=1.0, metavar="R", help="over the last 64 tokens; 1: off")
    sub.add_argument("--seed", type=int, metavar="S", help="makes sampling repeatable")
    sub.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    sub.add_argument("--draft", metavar="MODEL", help="a small model of the same vocabulary, or ngram: proposes tokens")
    sub.add_argument("--draft-max", type=int, metavar="K", help=f"proposals checked in one pass (default: {DRAFT_MAX})")
    sub.add_argument("--kv", choices=("f16", "f32"), help="element type of the KV cache (default: f16, f32 for f32)")
    add_first_run(sub)
    sub.add_argument("--verify", action="store_true", help="check every hash of the pack first")
    sub.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    sub.add_argument("--trace", type=Path, metavar="FILE", help="what ran when, for chrome://tracing or Perfetto")
    add_device(sub)
    add_window(sub)
    sub.add_argument("--w4a4", action="store_true", help="4-bit rows for i4 weights: the NPU's int4 products")
    sub.add_argument("--unproven", action="store_true", help="with --w4a4: K slices whose int16 sums might overflow")
    sub.add_argument("--preload", action="store_true", help="bring in what stays first, and say how long that took")
    add_fault(sub)


def run(args: argparse.Namespace) -> int:
    from ork.engine.sampling import SamplingParams
    from ork.engine.speculative import check_most

    if args.max_tokens < -1:
        raise UsageError(f"-n {args.max_tokens}: give a number of tokens, or -1 for no limit")
    if args.draft_max is not None and args.draft is None:
        raise UsageError("--draft-max bounds what a draft proposes: it goes with --draft")
    check_most(args.draft_max)
    check_threads(args.threads)
    window_options(args)
    sampling = {
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repeat_penalty": args.repeat_penalty,
        "seed": args.seed,
    }
    SamplingParams(**sampling).check()  # before a model is converted for it
    interactive = args.chat and args.prompt is None and args.file is None and sys.stdin and sys.stdin.isatty()
    text = None if interactive else _prompt(args)
    with faulty_board(args.fault, args.device) as board, _load(args, board) as model, _traced(model, args.trace):
        if args.chat:
            code = _chat(model, args, text, sampling)
        else:
            assert text is not None
            code = _complete(model, args, text, sampling)
        if code == 0:
            _finish(model)
        return code


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return str(args.prompt)
    try:
        if args.file is not None:
            with args.file.open("rb") as f:
                data = f.read(MAX_PROMPT_BYTES + 1)
        elif sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompt: give -p TEXT, -f FILE, --chat, or text on standard input")
        else:
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{args.file or 'standard input'}: {error.strerror}") from None
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(f"the prompt is larger than {MAX_PROMPT_BYTES >> 20} MiB")
    return str(data.decode("utf-8", "replace"))


@contextlib.contextmanager
def _load(args: argparse.Namespace, board: EmulatedKernel | None) -> Iterator[LoadedModel]:
    from ork.api import NGRAM, LoadedModel
    from ork.quant.recipe import builtin

    draft_path = resolve(args.draft) if args.draft not in (None, NGRAM) else None
    with contextlib.ExitStack() as packs:
        path = resolve(args.model)
        pack = _open(args, path, first_run_recipe(args, path))
        packs.callback(pack.close)
        draft: Any = args.draft
        if draft_path:
            draft = _open(args, draft_path, builtin("int8"))
            packs.callback(draft.close)
        with LoadedModel(
            pack,
            device=args.device,
            threads=args.threads,
            context=args.context,
            kv=args.kv,
            min_rows=args.min_rows,
            board=board,
            preload=args.preload,
            w4a4=args.w4a4,
            unproven=args.unproven,
            **window_options(args),
        ) as model:
            if args.w4a4 and not args.json:
                say("W4A4: the chip multiplies int4 by int4 alone, so rows have four bits; they have eight without it")
            if not args.json:
                say_ready(model)
            if draft is not None:
                model.use_draft(draft, most=args.draft_max, threads=args.threads)
            yield model


@contextlib.contextmanager
def _traced(model: LoadedModel, path: Path | None) -> Iterator[None]:
    """Writes what the model does meanwhile to `path`, also when it fails or is interrupted."""
    if path is None:
        yield
        return
    from ork.files import TRACE, check_output
    from ork.measure.trace import Trace

    check_output(path, TRACE)
    trace = Trace()
    trace.save(path)  # a file that cannot be written is told before the work
    trace.attach(model.ops)
    try:
        yield
    finally:
        trace.detach()
        trace.save(path)


def _open(args: argparse.Namespace, path: Path, recipe: Recipe) -> Pack | RunningPack:
    from ork.build.running import RunningPack, open_running

    pack = open_running(path, recipe, max_ram=parse_size(args.max_ram), announce=say)
    if args.verify and not isinstance(pack, RunningPack):  # what is made now needs no check
        with progress_bar("verifying") as progress:
            pack.verify(progress)
    return pack


def _until_text(model: LoadedModel, pieces: Iterator[str]) -> Iterator[str]:
    """The same pieces; until the first one a bar shows how far a first run's conversion is."""
    with _converting(model.pack):
        first = next(pieces, None)
    if first is not None:
        yield first
        yield from pieces


@contextlib.contextmanager
def _converting(pack: Any) -> Iterator[None]:
    from ork.build.running import RunningPack

    if not isinstance(pack, RunningPack) or pack.finished:
        yield
        return
    with progress_bar("converting") as progress:
        pack.watch(progress)
        try:
            yield
        finally:
            pack.watch(None)


def _finish(model: LoadedModel) -> None:
    """After a first run's text: the rest of its pack, and of its draft's."""
    from ork.build.running import RunningPack

    draft = None if model.draft is None or isinstance(model.draft, str) else model.draft.pack
    for pack in (model.pack, draft):
        if isinstance(pack, RunningPack) and not pack.finished:
            say(f"writing the rest of {pack.path}; Ctrl-C leaves it to the next run")
            with _converting(pack):
                pack.finish()


def _complete(model: LoadedModel, args: argparse.Namespace, text: str, sampling: dict[str, Any]) -> int:
    from ork.engine.session import Stats

    stats = Stats()
    pieces = model.generate(text, max_tokens=args.max_tokens, stop=args.stop, stats=stats, **sampling)
    answer = _stream(_until_text(model, pieces), stats, quiet=args.json)
    _report(model, args, stats, answer)
    return 130 if stats.reason == "interrupted" else 0


def _chat(model: LoadedModel, args: argparse.Namespace, text: str | None, sampling: dict[str, Any]) -> int:
    from ork.engine.session import Stats

    chat = model.chat(args.chat_template)
    once = text is not None
    if not once:
        say("an empty line or Ctrl-D ends the chat, Ctrl-C an answer")
    while True:
        if text is None:
            text = _ask()
            if not text:
                return 0
        stats = Stats()
        pieces = chat.send(text, max_tokens=args.max_tokens, stop=args.stop, stats=stats, **sampling)
        answer = _stream(_until_text(model, pieces), stats, quiet=args.json)
        _report(model, args, stats, answer)
        text = None
        if once:
            return 130 if stats.reason == "interrupted" else 0


def _ask() -> str:
    sys.stderr.write("> ")
    sys.stderr.flush()
    try:
        return sys.stdin.readline().strip()
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return ""


def _stream(pieces: Iterator[str], stats: Stats, *, quiet: bool) -> str:
    """Prints pieces as they come; Ctrl-C ends the generation and keeps what is there."""
    out = []
    try:
        for piece in pieces:
            out.append(piece)
            if not quiet:
                sys.stdout.write(piece)
                sys.stdout.flush()
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        stats.reason = "interrupted"
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return "".join(out)


def _report(model: LoadedModel, args: argparse.Namespace, stats: Stats, answer: str) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    kv = model.engine.pool.nbytes(max(1, len_context(stats)))
    facts = {
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "new_tokens": stats.new_tokens,
        "prefill_tok_s": round(stats.prefill_rate, 2),
        "decode_tok_s": round(stats.decode_rate, 2),
        "end": stats.reason,
        "device": model.device.name,
        "device_reason": model.device_reason,
        **npu_facts(model),
        **draft_facts(model, stats),
        "isa": model.device.isa,
        "threads": model.device.threads,
        "kv": model.kv,
        "kv_bytes": kv,
        "weight_bytes": model.stream.stats.resident_bytes,
        **window_facts(model),
        **ready_facts(model),
        "peak_rss_bytes": peak,
        "pack": str(model.pack.path),
    }
    if args.json:
        print(json.dumps({"text": answer, **facts}))
        return
    if model.draft is not None:
        name = model.draft if isinstance(model.draft, str) else Path(model.draft.pack.path).name
        share = 100 * stats.accepted / max(1, stats.proposed)
        say(
            f"draft {name}: {stats.accepted} of {stats.proposed} proposed tokens right ({share:.0f} %), "
            f"{stats.tokens_per_pass:.2f} tokens a pass over {stats.passes} passes"
        )
    npu = npu_facts(model)
    if npu:
        say(", ".join(f"{key} {value}" for key, value in npu.items()))
    device = f"{model.device.name} ({model.device.isa}, {model.device.threads} threads; {model.device_reason})"
    say_window(model)
    how = "copied to NPU memory from" if npu else "in a window on" if model.windowed else "in place in"
    weights = f"{size_text(model.stream.stats.resident_bytes)} {how}"
    say(
        f"prefill {stats.prompt_tokens} tokens at {stats.prefill_rate:.1f} tok/s, decode {stats.new_tokens} at "
        f"{stats.decode_rate:.1f} tok/s, ended by {stats.reason}; {device}; weights {weights} {model.pack.path}; "
        f"KV {size_text(kv)} {model.kv}; peak RSS {size_text(peak)}"
    )


def draft_facts(model: LoadedModel, stats: Stats) -> dict[str, Any]:
    """What the draft was good for, if there is one."""
    if model.draft is None:
        return {}
    return {
        "draft": model.draft if isinstance(model.draft, str) else str(model.draft.pack.path),
        "draft_passes": stats.passes,
        "draft_proposed": stats.proposed,
        "draft_accepted": stats.accepted,
        "tokens_per_pass": round(stats.tokens_per_pass, 2),
    }


def npu_facts(model: LoadedModel) -> dict[str, int]:
    """What the NPU did, if the device has one."""
    from ork.devices.npu import NpuDevice

    device = model.device
    if not isinstance(device, NpuDevice):
        return {}
    counters = device.npu.counters
    return {
        "npu_ops": device.npu_ops,
        "cpu_ops": device.cpu_ops,
        "failed_ops": device.failed_ops,
        "submits": sum(counters.submits),
        "programs": sum(counters.programs),
        "npu_resets": counters.resets,
    }


def len_context(stats: Stats) -> int:
    return stats.cached_tokens + stats.prompt_tokens + stats.new_tokens
