"""`ork ppl`: perplexity on a text, alone or in step with a reference: KL divergence, agreement, ratio."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ork.cli.common import add_device, add_model, check_threads, resolve, say, size_text
from ork.cli.measuring import Ticker, add_text, converted, json_text, opened, read_text
from ork.cli.recipes import add_first_run
from ork.cli.window import add_window, window_options
from ork.errors import UsageError

if TYPE_CHECKING:
    from ork.api import LoadedModel
    from ork.measure.compare import Comparison
    from ork.measure.perplexity import Chunks


def add(sub: argparse.ArgumentParser) -> None:
    add_model(sub)
    add_text(sub)
    sub.add_argument(
        "--against", metavar="MODEL", help="a reference to compare with; what is no pack is read as it is, in f32"
    )
    sub.add_argument("--save-base", type=Path, metavar="FILE", help="keep what MODEL finds, to compare others with")
    sub.add_argument("--base", type=Path, metavar="FILE", help="the reference is a file of --save-base")
    sub.add_argument("--kv", choices=("f16", "f32"), help="element type of the KV cache (default: f16, f32 for f32)")
    add_first_run(sub)
    sub.add_argument("--w4a4", action="store_true", help="4-bit rows for MODEL's i4 weights, as in ork run")
    sub.add_argument("--json", action="store_true", help="one JSON object")
    add_device(sub)
    add_window(sub)


def run(args: argparse.Namespace) -> int:
    from ork.files import check_output
    from ork.measure.base import BASE
    from ork.measure.perplexity import same_text
    from ork.quant.recipe import builtin

    if sum(x is not None for x in (args.against, args.base, args.save_base)) > 1:
        raise UsageError("--against, --base and --save-base exclude each other: there is one reference")
    if args.save_base:
        check_output(args.save_base, BASE)
    check_threads(args.threads)
    options = window_options(args)
    text = read_text(args.file)
    path = converted(resolve(args.model), args)
    other = converted(resolve(args.against), args, builtin("f32")) if args.against else None
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(opened(path, args, options={**options, "w4a4": args.w4a4}))
        models = [model]
        if other:
            models.append(stack.enter_context(opened(other, args, options=options)))
        chunks = same_text([m.tokenizer for m in models], text, args.context, args.chunks)
        start = time.perf_counter()
        found = _measure(args, models, chunks)
        seconds = time.perf_counter() - start
        reference = models[1].pack.path if other else args.base
        about = {
            "model": str(model.pack.path),
            "reference": str(reference) if reference else None,
            "text": str(args.file),
            "context": chunks.context,
            "chunks": len(chunks),
            "device": model.device.name,
            "kv": model.kv,
        }
    rate = len(chunks) * chunks.context / seconds
    if args.json:
        print(json_text({**about, "tokens_per_second": round(rate, 2), **found}))
    else:
        print(_told(found))
        say(f"{len(chunks)} chunks of {chunks.context} tokens in {seconds:.1f} s, {rate:.0f} tok/s")
    return 0


def _measure(args: argparse.Namespace, models: list[LoadedModel], chunks: Chunks) -> dict[str, Any]:
    from ork.measure.base import Recording, SavedBase, base_bytes
    from ork.measure.perplexity import Running, compare, score

    tick = Ticker(len(chunks))
    running = [Running(m.engine, chunks) for m in models]

    def alone(done: int, p: Any) -> None:
        tick(done, f"perplexity {p.perplexity:.4f} ± {p.error:.4f}")

    def beside(done: int, c: Comparison) -> None:
        tick(done, f"perplexity {c.perplexity:.4f}, ratio {c.ratio:.5f}, KL {c.kl:.5f}, top-1 {100 * c.top1:.2f} %")

    if args.base:
        saved = SavedBase(args.base)
        with contextlib.closing(saved):
            saved.check(chunks)
            return compare(saved, running[0], chunks, beside).summary().record()
    if len(models) > 1:
        return compare(running[1], running[0], chunks, beside).summary().record()
    if args.save_base:
        with Recording(running[0], chunks, args.save_base, Path(models[0].pack.path).name) as recording:
            say(f"{args.save_base}: {size_text(base_bytes(running[0].vocab, chunks))} will be written")
            found = score(recording, chunks, alone).summary().record()
            recording.finish()
        return found
    return score(running[0], chunks, alone).summary().record()


def _told(f: dict[str, Any]) -> str:
    lines = [f"perplexity {f['perplexity']:.4f} ± {f['error']:.4f} over {f['tokens']} predictions"]
    if "kl" in f:
        lines += [
            f"reference  {f['reference']:.4f} ± {f['reference_error']:.4f}",
            f"ratio      {f['ratio']:.6f} ± {f['ratio_error']:.6f}",
            f"KL         {f['kl']:.6f} ± {f['kl_error']:.6f} nats; median {f['kl_median']:.6f}, 99 % {f['kl_99']:.6f}, "
            f"99.9 % {f['kl_999']:.6f}, largest {f['kl_max']:.6f}",
            f"same top   {100 * f['top1']:.3f} ± {100 * f['top1_error']:.3f} %",
        ]
    return "\n".join(lines)
