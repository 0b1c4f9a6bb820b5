"""Runs llama.cpp or ik_llama.cpp through the C API of its binding, inside the peer's environment (see peer_env.py).

    peer_worker.py llama_cpp|ik_llama_cpp speed MODEL --threads 2 --pp 512 --tg 128 --repeats 3
    peer_worker.py llama_cpp tokens MODEL TEXT OUT.npy --chunks 4 --length 512
    peer_worker.py llama_cpp logits MODEL TOKENS.npy OUT.npy --threads 2
    peer_worker.py llama_cpp greedy MODEL PROMPT --threads 2 --count 16 --seconds 60
    peer_worker.py llama_cpp compare REFERENCE MODEL TOKENS.npy --threads 2
    peer_worker.py llama_cpp follow MODEL TOKENS.npy OUT.npy --threads 2
    peer_worker.py llama_cpp along MODEL TOKENS.npy --threads 2 --skip 16 --seconds 60
    peer_worker.py llama_cpp quantize MODEL OUT.gguf Q4_K_M --threads 2

The last line on stdout is JSON. `TOKENS.npy` is int32 [chunks, T]; each chunk is a sequence of its own.
Needs numpy and the binding, nothing of ork.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from agreement import Agreement

API_MODULES = {"llama_cpp": "llama_cpp.llama_cpp", "ik_llama_cpp": "ik_llama_cpp._ctypes_api"}
GGML_F32, GGML_F16 = 0, 1
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}  # of enum llama_ftype
FLASH_OFF = 0


class Session:
    """A model and one context on it. `exact` asks for an f32 KV cache and plain attention; `mapped` leaves weights in
    the mapped file, where llama.cpp would copy those of some types into another order (what --no-repack does)."""

    def __init__(self, binding: str, model: str, threads: int, n_ctx: int, exact: bool = False, mapped: bool = False):
        self.api: Any = importlib.import_module(API_MODULES[binding])
        self.api.llama_backend_init()
        loading = self.api.llama_model_default_params()
        if mapped:
            loading.use_extra_bufts = False
        self.model = self.api.llama_model_load_from_file(model.encode(), loading)
        if not self.model:
            raise SystemExit(f"cannot load {model}")
        params = self.api.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = GGML_F32 if exact else GGML_F16
        if exact:
            params.flash_attn_type = FLASH_OFF
        self.context = self.api.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"cannot make a context of {n_ctx} for {model}")
        self.vocab = self.api.llama_model_get_vocab(self.model)
        self.n_vocab = int(self.api.llama_vocab_n_tokens(self.vocab))
        self.batch = self.api.llama_batch_init(512, 0, 1)

    def clear(self) -> None:
        """Forget all positions."""
        if hasattr(self.api, "llama_kv_cache_clear"):
            self.api.llama_kv_cache_clear(self.context)
        else:
            self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def decode(self, tokens: list[int], start: int, all_logits: bool = False) -> None:
        """Evaluate `tokens` at positions from `start` on; logits of the last one, or of all."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == len(tokens) - 1
        if status := self.api.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode failed with {status}")

    def last_logits(self) -> np.ndarray:
        """Logits [vocab] of the last token (a view until the next call)."""
        pointer = self.api.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self.n_vocab,))

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits [T, vocab] of a sequence of up to 512 tokens (a view until the next call)."""
        self.clear()
        self.decode(tokens, 0, all_logits=True)
        pointer = self.api.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, (len(tokens), self.n_vocab))


def prefill(session: Session, tokens: list[int]) -> float:
    """Tokens per second of one batch, as llama-bench's pp test: from an empty cache, logits of the last token."""
    session.clear()
    start = time.perf_counter()
    session.decode(tokens, 0)
    session.last_logits()
    return len(tokens) / (time.perf_counter() - start)


def generate(session: Session, tokens: list[int]) -> float:
    """Tokens per second one at a time, as llama-bench's tg test: from an empty cache, the tokens given beforehand."""
    session.clear()
    start = time.perf_counter()
    for position, token in enumerate(tokens):
        session.decode([token], position)
        session.last_logits()
    return len(tokens) / (time.perf_counter() - start)


def random_tokens(session: Session, count: int) -> list[int]:
    rng = np.random.default_rng(0)
    return [int(t) for t in rng.integers(0, session.n_vocab, count)]


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Samples of both tests in tokens per second; everything was run once before the first is timed."""
    session = Session(args.binding, args.model, args.threads, n_ctx=max(args.pp, args.tg))
    prompt, reply = random_tokens(session, args.pp), random_tokens(session, args.tg)
    prefill(session, prompt)
    generate(session, reply[:16])
    return {
        "pp": [prefill(session, prompt) for _ in range(args.repeats)],
        "tg": [generate(session, reply) for _ in range(args.repeats)],
    }


def greedy(args: argparse.Namespace) -> dict[str, Any]:
    """Up to `count` likeliest tokens after a prompt, fewer once `seconds` have passed: their text, rate, number."""
    session = Session(args.binding, args.model, args.threads, n_ctx=512)
    text = args.prompt.encode()
    buffer = (ctypes.c_int32 * (len(text) + 8))()
    count = session.api.llama_tokenize(session.vocab, text, len(text), buffer, len(buffer), True, False)
    session.decode(list(buffer[:count]), 0)
    out: list[int] = []
    piece, said = ctypes.create_string_buffer(256), b""
    start = time.perf_counter()
    while len(out) < args.count and time.perf_counter() - start < args.seconds:
        token = int(session.last_logits().argmax())
        length = session.api.llama_token_to_piece(session.vocab, token, piece, len(piece), 0, False)
        said += piece.raw[:length]
        session.decode([token], count + len(out))
        out.append(token)
    return {"text": said.decode(errors="replace"), "rate": len(out) / (time.perf_counter() - start), "tokens": len(out)}


def tokens(args: argparse.Namespace) -> dict[str, Any]:
    """The text's first tokens as chunks [chunks, length], each beginning with the BOS token if the model wants one."""
    session = Session(args.binding, args.model, args.threads, n_ctx=512)
    text = Path(args.text).read_bytes()
    buffer = (ctypes.c_int32 * (len(text) + 8))()
    count = session.api.llama_tokenize(session.vocab, text, len(text), buffer, len(buffer), False, False)
    start = [session.api.llama_vocab_bos(session.vocab)] if session.api.llama_vocab_get_add_bos(session.vocab) else []
    body = args.length - len(start)
    if count < body * args.chunks:
        raise SystemExit(f"the text has {count} tokens, {body * args.chunks} are needed")
    chunks = [start + buffer[i * body : (i + 1) * body] for i in range(args.chunks)]
    np.save(args.out, np.array(chunks, np.int32))
    return {"bos": start}


def sequences(path: str) -> Iterator[list[int]]:
    for row in np.load(path):
        yield [int(t) for t in row]


def logits(args: argparse.Namespace) -> dict[str, Any]:
    """All logits, f32 [chunks, T, vocab], to a .npy file."""
    chunks = list(sequences(args.tokens))
    session = Session(args.binding, args.model, args.threads, n_ctx=512, exact=True)
    shape = (len(chunks), len(chunks[0]), session.n_vocab)
    partial = Path(args.out).with_suffix(".part")
    out = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
    for i, tokens in enumerate(chunks):
        out[i] = session.logits(tokens)
    out.flush()
    partial.rename(args.out)
    return {"shape": shape}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """How far one model's predictions are from another's, both run here with an f32 KV cache."""
    reference = Session(args.binding, args.reference, args.threads, n_ctx=512, exact=True)
    model = Session(args.binding, args.model, args.threads, n_ctx=512, exact=True)
    agreement = Agreement()
    for tokens in sequences(args.tokens):
        agreement.add(reference.logits(tokens)[:-1], model.logits(tokens)[:-1], np.array(tokens[1:]))
    return agreement.summary()


def follow(args: argparse.Namespace) -> dict[str, Any]:
    """For every line on stdin, the next chunk's logits f32 [T, vocab] into OUT.npy, answered by a line on stdout: the
    reader takes them before it asks for more."""
    chunks = list(sequences(args.tokens))
    session = Session(args.binding, args.model, args.threads, n_ctx=512, exact=True)
    out = np.lib.format.open_memmap(args.out, mode="w+", dtype=np.float32, shape=(len(chunks[0]), session.n_vocab))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for tokens, _ in zip(chunks, sys.stdin):
        out[...] = session.logits(tokens)
        sys.stdout.write("done\n")
        sys.stdout.flush()
    return {}


def along(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second through the tokens of a file: `skip` in one batch, then one at a time for so many seconds."""
    session = Session(args.binding, args.model, args.threads, n_ctx=512, mapped=True)
    text = [int(t) for t in np.load(args.tokens).reshape(-1)]
    session.decode(text[: args.skip], 0)
    session.last_logits()
    seconds: list[float] = []
    start = time.perf_counter()
    for position in range(args.skip, len(text)):
        session.decode([text[position]], position)
        session.last_logits()
        seconds.append(time.perf_counter() - start)
        if seconds[-1] > args.seconds:
            break
    return {"rate": len(seconds) / seconds[-1], "tokens": len(seconds)}


def quantize(args: argparse.Namespace) -> dict[str, Any]:
    """What `llama-quantize MODEL OUT TYPE` does; `seconds` it took, quantising alone."""
    api: Any = importlib.import_module(API_MODULES[args.binding])
    api.llama_backend_init()
    params = api.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[args.type]
    params.nthread = args.threads
    params.allow_requantize = True
    start = time.perf_counter()
    if status := api.llama_model_quantize(args.model.encode(), args.out.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama_model_quantize failed with {status}")
    return {"seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binding", choices=API_MODULES)
    commands = parser.add_subparsers(required=True)
    for run, names, counts in (
        (speed, ("model",), {"pp": 512, "tg": 128, "repeats": 3}),
        (tokens, ("model", "text", "out"), {"chunks": 4, "length": 512}),
        (logits, ("model", "tokens", "out"), {}),
        (greedy, ("model", "prompt"), {"count": 16, "seconds": 60}),
        (compare, ("reference", "model", "tokens"), {}),
        (follow, ("model", "tokens", "out"), {}),
        (along, ("model", "tokens"), {"skip": 16, "seconds": 60}),
        (quantize, ("model", "out", "type"), {}),
    ):
        command = commands.add_parser(run.__name__)
        command.set_defaults(run=run)
        for name in names:
            command.add_argument(name)
        for name, default in {"threads": 2, **counts}.items():
            command.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    answer = args.run(args)
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the bindings' own clean-up at exit is not what is tested here


if __name__ == "__main__":
    main()
