"""The Python API: `ork.load(path)` gives a model that generates, chats and returns logits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ork import models
from ork.build.cache import cached_pack
from ork.build.convert import DEFAULT_MAX_RAM
from ork.build.running import RunningPack
from ork.devices.choose import check_experts, check_w4a4, open_device, place_experts, placement_reason
from ork.engine.draft import DraftModel, relative_cost
from ork.engine.ngram import PromptLookup
from ork.engine.sampling import SamplingParams
from ork.engine.session import Engine, Session, Stats
from ork.engine.speculative import DEFAULT_MOST, check_most
from ork.errors import OrkError, PackError, UsageError
from ork.measure.compare import Comparison, Perplexity
from ork.measure.perplexity import Running, compare, same_text, score
from ork.npu.kernel import Kernel
from ork.ops import Ops
from ork.pack.notes import write_note
from ork.pack.reader import Pack
from ork.quant.recipe import builtin
from ork.residency.experts import Profile, check_policy, profile_of
from ork.residency.planner import Placement, arrange
from ork.residency.source import PackSource
from ork.residency.stream import Ready, SliceSource, Stream, Streams
from ork.residency.window import Window
from ork.text.chat import ChatTemplate
from ork.text.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096
NGRAM = "ngram"  # the draft that is no model: prompt look-up


class LoadedModel:
    """A model in memory with its tokenizer. `close` lets the pack go; also a context manager."""

    def __init__(
        self,
        pack: Pack | RunningPack,
        *,
        device: str,
        threads: int | None,
        context: int | None,
        kv: str | None,
        sequences: int = 1,
        min_rows: int | None = None,
        board: Kernel | None = None,
        window: int | None = None,
        prefetch: bool = True,
        preload: bool = False,
        domains: int | None = None,
        w4a4: bool = False,
        unproven: bool = False,
        expert_policy: str = "lru",
        experts: str | None = None,
    ):
        self.pack = pack
        self._expert_policy = check_policy(expert_policy)
        self._window, self._prefetch = window, prefetch
        check_experts(experts, device)
        self.device, self.device_reason = open_device(
            device, threads=threads, min_rows=min_rows, board=board, w4a4=w4a4, unproven=unproven
        )
        self.ready: Ready | None = None  # what was brought in before the first op, and how long it took
        try:
            self._build(context, kv, sequences)
            slices = [t.slices[0] for t in self.stream.tensors]
            if w4a4:
                check_w4a4(slices)
            if left := placement_reason(self.device, slices):
                self.device_reason += f"; {left}"
            self._place_experts(experts)
            self.placement = self._place(domains)
            if preload or (self.placement is not None and len(self.placement.bytes) > 1):
                self.reside()
        except BaseException:
            if "stream" in self.__dict__:
                self.stream.close()
            self.device.close()
            raise

    def _place_experts(self, asked: str | None) -> None:
        """Decides where routed experts are computed, if the model has any."""
        layers, about = self.stream.expert_layers, self.model.config.experts
        if not layers or about is None:
            return
        others = sum(self.device.mapped_bytes(s) for t in self.stream.tensors for s in t.slices)
        where = place_experts(
            self.device,
            asked,
            [[t.slices for t in layer.tensors(0)] for layer in layers],
            experts=len(layers[0]),
            top_k=about.used,
            window=self._window,
            others=others,
        )
        self.device_reason += f"; {where}" if where else ""

    def _place(self, domains: int | None) -> Placement | None:
        """Decides which slices go into which domain, where the device has several; noted in the pack where it uses
        more than one."""
        capacity = self.device.capacity()
        if capacity.domains == 1 and domains is None:
            self.stream.staying()  # refuses a window that is too small before anything is computed
            return None
        noted = None
        if isinstance(self.pack, Pack):
            with contextlib.suppress(PackError):  # notes that are damaged hold nobody up
                noted = self.pack.notes().get("placement")
        placement = arrange(self.stream, capacity, domains=domains, note=noted)
        if isinstance(self.pack, Pack) and len(placement.bytes) > 1 and placement.note() != noted:
            with contextlib.suppress(OrkError):  # a pack that cannot be written to is placed anew each time
                write_note(self.pack.path, "placement", placement.note())
        return placement

    def profile(self) -> Profile | None:
        """How often each expert was chosen when `ork skew --save` counted, if the pack's notes say."""
        if isinstance(self.pack, Pack):
            with contextlib.suppress(PackError):
                return profile_of(self.pack.notes().get("routing"))
        return None

    @property
    def windowed(self) -> bool:
        """Whether the model has a window, whether or not all of it fits there."""
        return self._window is not None

    def reside(self) -> Ready:
        """Brings in everything that stays, by memory calls alone: no op runs. What it took is in `ready`."""
        self.ready = self.stream.reside()
        return self.ready

    def _build(self, context: int | None, kv: str | None, sequences: int) -> None:
        pack = self.pack
        self.source: SliceSource = pack if isinstance(pack, RunningPack) else PackSource(pack)
        self.stream: Streams = (
            Stream(self.source, self.device)
            if self._window is None
            else Window(
                self.source,
                self.device,
                self._window,
                prefetch=self._prefetch,
                expert_policy=self._expert_policy,
                profile=self.profile(),
            )
        )
        self.ops = ops = Ops(self.stream, self.device)
        self.model = models.build(ops)
        self.stream.tensors, self.stream.expert_layers = models.cycle(ops), ops.expert_layers
        config = self.model.config
        if context is not None and not 1 <= context <= config.context:
            raise UsageError(f"-c {context}: this model was trained for contexts of 1 to {config.context}")
        self.context = context or min(config.context, DEFAULT_CONTEXT)
        kv = kv or ("f32" if pack.recipe.get("default", {}).get("codec") == "f32" else "f16")
        if kv not in ("f16", "f32"):
            raise UsageError(f"--kv {kv}: known are f16, f32")
        self.kv = kv
        self.sequences = sequences
        self.engine = Engine(ops, self.model, context=self.context, half=kv == "f16", sequences=sequences)
        self.tokenizer = Tokenizer.load(pack.tokenizer)
        self.draft: LoadedModel | str | None = None
        self.draft_max = DEFAULT_MOST

    def use_draft(
        self, draft: Pack | RunningPack | str, *, most: int | None = None, threads: int | None = None
    ) -> None:
        """Lets a small model, or `"ngram"`, propose up to `most` tokens for each pass; the text stays the same.

        The small model runs on the CPU, where it is in place: it computes one row at a time. Its pack belongs to this
        model from now on. Raises UsageError if the two do not share their vocabulary.
        """
        self.draft_max = check_most(most)
        if isinstance(draft, str):
            if draft != NGRAM:
                raise ValueError(f"a draft is a pack or {NGRAM!r}")
            self.draft = draft
            return
        if not self.tokenizer.shared_with(Tokenizer.load(draft.tokenizer)):
            raise UsageError(
                f"{draft.path} cannot draft for {self.pack.path}: their vocabularies differ; take a model of one family"
            )
        trained = draft.metadata.get(f"{draft.metadata.get('general.architecture')}.context_length")
        context = min(self.context, trained) if isinstance(trained, int) else self.context
        self.draft = LoadedModel(
            draft, device="cpu", threads=threads, context=context, kv=None, sequences=self.sequences
        )

    def session(self) -> Session:
        """A conversation's place in the cache, with a drafter of its own if there is a draft."""
        session = Session(self.engine, self.tokenizer, draft_max=self.draft_max)
        if isinstance(self.draft, LoadedModel):
            small = self.draft
            session.drafter = DraftModel(
                small.engine,
                small.tokenizer,
                vocab=self.tokenizer.shared_with(small.tokenizer),
                cost=relative_cost(small.pack.nbytes, self.pack.nbytes, self._window),
            )
        elif self.draft is not None:
            session.drafter = PromptLookup()
        return session

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = -1,
        stop: Iterable[str] = (),
        stats: Stats | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """Text that follows `prompt`, piece by piece. Sampling as in `SamplingParams`; greedy by default."""
        session = self.session()
        try:
            yield from session.generate(
                self.tokenizer.encode(prompt), SamplingParams(**sampling), limit=max_tokens, stop=stop, stats=stats
            )
        finally:
            session.close()

    def chat(self, template: str | None = None) -> Chat:
        """A conversation with a memory, in the model's own chat template (or a named one: chatml, gemma, llama3)."""
        return Chat(self, template)

    def logits(self, tokens: Seq[int], chunk: int = 512) -> npt.NDArray[np.float32]:
        """Logits f32 [len(tokens), vocab] after each token."""
        return self.engine.logits(tokens, chunk)

    def perplexity(self, text: str, *, context: int = 512, chunks: int | None = None) -> Perplexity:
        """Perplexity on a text as `ork ppl` counts it (docs/measuring.md), in chunks of `context` tokens.

        Raises UsageError for a text too short for one chunk, or a `context` beyond the one loaded.
        """
        cut = same_text([self.tokenizer], text, context, chunks)
        return score(Running(self.engine, cut), cut).summary()

    def compare(
        self, reference: LoadedModel, text: str, *, context: int = 512, chunks: int | None = None
    ) -> Comparison:
        """This model against a reference on a text: KL divergence, agreement, perplexity ratio; else as `perplexity`.

        Raises UsageError too if the two make different tokens of the text.
        """
        cut = same_text([reference.tokenizer, self.tokenizer], text, context, chunks)
        return compare(Running(reference.engine, cut), Running(self.engine, cut), cut).summary()

    def close(self) -> None:
        if isinstance(self.draft, LoadedModel):
            self.draft.close()
        self.stream.close()
        self.device.close()
        self.pack.close()

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Chat:
    """Messages so far; `send` answers the next one. What the cache holds of the conversation is not computed again."""

    def __init__(self, model: LoadedModel, template: str | None = None):
        t = model.tokenizer
        self.session = model.session()
        self.template = ChatTemplate.of(model.pack.metadata, _piece(t, t.bos), _piece(t, t.eos), template)
        self.model = model
        self.messages: list[dict[str, str]] = []

    def send(
        self,
        text: str,
        *,
        max_tokens: int = -1,
        stop: Iterable[str] = (),
        stats: Stats | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """The answer, piece by piece; the part that was yielded becomes the assistant's message."""
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self.model.tokenizer.encode(self.template.render(asked), bos=False)
        self.messages = asked
        answer: list[str] = []
        try:
            for piece in self.session.generate(
                prompt, SamplingParams(**sampling), limit=max_tokens, stop=stop, stats=stats
            ):
                answer.append(piece)
                yield piece
        except UsageError:
            self.messages.pop()
            raise
        finally:
            if self.messages and self.messages[-1]["role"] == "user":
                self.messages.append({"role": "assistant", "content": "".join(answer)})

    def close(self) -> None:
        """Gives the conversation's part of the cache back; the messages stay, and `send` computes them again."""
        self.session.close()

    __del__ = close


def _piece(tokenizer: Tokenizer, token: int | None) -> str:
    return tokenizer.piece(token) if token is not None else ""


def load(
    path: str | os.PathLike[str],
    *,
    codec: str = "i8",
    rotate: bool = True,
    device: str = "auto",
    threads: int | None = None,
    n_ctx: int | None = None,
    kv: str | None = None,
    sequences: int = 1,
    min_rows: int | None = None,
    window: int | None = None,
    prefetch: bool = True,
    preload: bool = False,
    domains: int | None = None,
    w4a4: bool = False,
    expert_policy: str = "lru",
    experts: str | None = None,
    draft: str | os.PathLike[str] | None = None,
    draft_max: int | None = None,
    max_ram: int = DEFAULT_MAX_RAM,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Opens a pack; a GGUF file or Hugging Face folder is converted once into the cache.

    `codec` is the name of a built-in recipe (docs/recipes.md): int8, i4, nf4, f16, f32.
    `window` bytes of weights at most are kept on the device, the rest is streamed, ahead of the ops with `prefetch`.
    `preload` brings in what stays before the first op (see `LoadedModel.ready`); `domains` spreads it over so many of
    the NPU's 4 GiB domains (default: as few as hold it).
    `expert_policy` says which routed experts a window keeps: "lru", "lfu", or "pinned" by the pack's routing profile
    (`ork skew --save`); `experts` where they are computed: "npu", "cpu", or "auto" by what is predicted to be faster
    (default: auto where the CPU shares the work, else the device).
    `draft` is a small model of the same vocabulary, or "ngram" for prompt look-up: up to `draft_max` of its tokens are
    checked in one pass, and the text stays the same.
    `w4a4` quantises the rows that meet i4 weights to four bits, as the NPU's int4 products want them.
    `kv` is 'f16' or 'f32' (default: f32 for an f32 pack). Raises the errors of `ork.errors`.
    """
    pack = cached_pack(Path(path), builtin(codec, rotate=rotate), max_ram=max_ram, progress=progress)
    model = LoadedModel(
        Pack.open(pack),
        device=device,
        threads=threads,
        context=n_ctx,
        kv=kv,
        sequences=sequences,
        min_rows=min_rows,
        window=window,
        prefetch=prefetch,
        preload=preload,
        domains=domains,
        w4a4=w4a4,
        expert_policy=expert_policy,
        experts=experts,
    )
    if draft is not None:
        try:
            small = None if draft == NGRAM else cached_pack(Path(draft), builtin("int8"), max_ram=max_ram)
            model.use_draft(Pack.open(small) if small else NGRAM, most=draft_max, threads=threads)
        except BaseException:
            model.close()
            raise
    return model
