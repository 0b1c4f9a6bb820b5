"""`ork imatrix`: how much each input of each weight matters on a text, as a GGUF imatrix file."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from ork.cli.calibration import OWN_TEXT, calibration
from ork.cli.common import add_model, check_threads, parse_size, resolve, say, step_bar


def add(sub: argparse.ArgumentParser) -> None:
    add_model(sub)
    sub.add_argument("-f", "--file", type=Path, metavar="TEXT", help="the text (default: the one that comes with ork)")
    sub.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the imatrix to write (.gguf)")
    sub.add_argument("-c", "--context", type=int, default=512, metavar="N", help="tokens of a chunk (default: 512)")
    sub.add_argument("--chunks", type=int, metavar="N", help="chunks of the text to read (default: all)")
    sub.add_argument("--max-ram", default="2G", metavar="SIZE", help="memory to use at most (default: 2G)")
    sub.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: the physical, big cores)")


def run(args: argparse.Namespace) -> int:
    from ork.build.cache import is_pack
    from ork.build.imatrix import IMATRIX
    from ork.build.importance import collect
    from ork.build.layerwise import PackLayers, SourceLayers
    from ork.files import check_output
    from ork.measure.perplexity import cut
    from ork.pack.reader import Pack
    from ork.sources.base import open_source
    from ork.text.tokenizer import Tokenizer, build_tokenizer

    check_threads(args.threads)
    check_output(args.output, IMATRIX)
    max_ram = parse_size(args.max_ram)
    path = resolve(args.model)
    text, name = calibration(args.file)
    if args.file is None:
        say(OWN_TEXT)
    with contextlib.ExitStack() as stack:
        if path.is_file() and is_pack(path):
            pack = stack.enter_context(contextlib.closing(Pack.open(path)))
            tokenizer = Tokenizer.load(pack.tokenizer)
            chunks = cut(tokenizer, text, args.context, args.chunks)
            layers: PackLayers | SourceLayers = PackLayers(pack, args.threads)
        else:
            source = stack.enter_context(contextlib.closing(open_source(path)))
            tokenizer = Tokenizer.load(build_tokenizer(source.metadata))
            chunks = cut(tokenizer, text, args.context, args.chunks)
            layers = SourceLayers(source, args.threads)
        stack.callback(layers.stream.close)
        update = stack.enter_context(step_bar(f"{len(chunks)} chunks"))
        imatrix = collect(layers, chunks.tokens, dataset=name, max_ram=max_ram, progress=update)
    imatrix.write(args.output)
    say(f"{args.output}: {len(imatrix.sums)} tensors over {len(chunks)} chunks of {args.context} tokens of {name}")
    return 0
