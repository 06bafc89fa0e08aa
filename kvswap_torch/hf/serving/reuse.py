"""Answers prompts, each from the cache that has read most of it already."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.chunks import even_chunks
from kvswap_torch.config import SwapConfig
from kvswap_torch.errors import BudgetError, CorruptionError, KVSwapError
from kvswap_torch.hf.cache import KVSwapCache
from kvswap_torch.hf.families import changes_with_length, model_parts
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.line import Turn
from kvswap_torch.hf.serving.logprobs import PromptScores
from kvswap_torch.hf.serving.store import CacheStore, Entry, common_tokens, is_passing
from kvswap_torch.process_memory import give_back_memory

logger = logging.getLogger(__name__)

_COUNTED = {"read_bytes": "bytes_read", "written_bytes": "bytes_written",
            "disk_wait_seconds": "wait_seconds"}  # fmt: skip

LOGITS_BYTES = 64 << 20  # of a pass whose logits are wanted


class GoneError(KVSwapError):
    """The client has hung up: nobody waits for the rest."""


class LateError(GoneError):
    """The longest time for an answer is over before there is a token of it."""


class EndedError(GoneError):
    """The server ends before there is a token of the answer."""


@dataclass(frozen=True)
class CacheOptions:
    """How caches are opened, which prompts they stand for, and how these are read.

    Parameters
    ----------
    path, config, preset, kv_memory_bytes, max_context
        As for `KVSwapCache`.
    save_from
        Fewest tokens that no saved cache has read, for one more to be saved.
    prefill_chunk
        Most tokens of a forward pass.
    """

    path: Path
    config: SwapConfig | str | Path | None = None
    preset: str | None = None
    kv_memory_bytes: int | str | None = None
    max_context: int | None = None
    save_from: int = 1024
    prefill_chunk: int = 4096


class PrefixReuse:
    """A model, the cache of the newest prompt, and a store of others.

    A prompt goes on from the cache that begins with most of its tokens, cropped to them; the rest
    is read. A prefix counts that is `save_from` tokens long, or half of its cache: the few words
    that all prompts begin with are not worth another text's projections.

    One thread at a time; `generate` and `settle` take turns.
    """

    def __init__(self, model: Any, store: CacheStore, options: CacheOptions, counts: Counts):
        self._model = model
        self._parts = model_parts(model)
        self.store = self._store = store
        self._options = options
        self._counts = counts
        self._cache: KVSwapCache | None = None
        self._entry: Entry | None = None  # what the cache was opened from
        self._prompt: torch.Tensor | None = None  # the first one that the cache has read
        self._owner = ""  # whose prompts the cache has read
        self._counted: dict[str, float] = {}
        self._rows = self._rows_open = 1  # answers that the cache is for
        self._scores: PromptScores | None = None
        self._range = 0, 0  # of the prompt, that the pass reads
        self._can_crop = True
        self._reuses = not changes_with_length(self._parts)

    def generate(
        self,
        turn: Turn,
        streamer: Any = None,
        answers: int = 1,
        scores: PromptScores | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """As the model's own: ``input_ids`` ``[1, tokens]``, and what ``generate()`` takes.

        Several `answers` go on from one prompt, side by side: ``[answers, tokens]``. With `scores`
        the whole prompt is read, and they get the logits of its tokens.

        A cache that fails before there is a token of the answer is left, and the prompt read anew.

        Raises
        ------
        GoneError
            The client hung up; what was read until then stays in the cache.
        """
        with self._watched(turn):
            self._store.refresh()
            if answers > 1 and scores is None:
                self._keep_prompt(arguments["input_ids"], turn)
            self._rows, self._scores = answers, scores
            return self._generate(turn, _Stream(streamer), arguments)

    def _generate(self, turn: Turn, stream: _Stream, arguments: dict[str, Any]) -> torch.Tensor:
        prompt = arguments["input_ids"][0].to("cpu", torch.int32)
        try:
            self._go_on(prompt, turn)
            return self._answer(turn, stream, arguments)
        except GoneError:
            raise
        except Exception as error:
            is_ours = isinstance(error, KVSwapError)
            if stream.is_cut or not (is_ours or isinstance(error, RuntimeError)):
                raise  # of what was asked, or between two steps: the cache is whole
            entry = self._entry
            self._leave_cache()
            if entry is not None and isinstance(error, CorruptionError):
                self._store.set_aside(entry, error)
            if turn.cached_tokens == 0 or stream.tokens > 0:
                raise
            logger.info("read anew, since the cache that was reused failed: %s", error)
            self._begin(prompt, turn)
            answer = self._answer(turn, stream, arguments)
            if entry is not None and not is_ours:
                self._store.set_aside(entry, error)  # the model failed with it, and not without
            return answer

    def read(self, turn: Turn, ids: torch.Tensor, progress: Callable[[int], None]) -> None:
        """Reads a document, ``[1, tokens]``, and saves it, however short; no answer.

        progress: called before each layer with the tokens that are read by then, about.
        """
        with self._watched(turn, progress):
            self._store.refresh()
            self._rows, self._scores = 1, None
            prompt = ids[0].to("cpu", torch.int32)
            self._go_on(prompt, turn)
            self._read_all(ids, turn)
            if self._cache.get_seq_length() < len(prompt):
                self._pass(ids[:, -1:], turn)
            self._count(self._cache)
            if self._reuses and self._store.covered(prompt, turn.owner) < len(prompt):
                self._store.save(self._cache, prompt, turn.owner)
        give_back_memory()

    @contextmanager
    def _watched(
        self, turn: Turn, progress: Callable[[int], None] = lambda tokens: None
    ) -> Iterator[None]:
        """A pass that nobody waits for ends before its next layer; the cache takes it back."""
        mixers = [each for each in self._parts.mixers if each is not None]

        def watch(index: int) -> Callable[..., None]:
            def before(module: Any, arguments: Any) -> None:
                _check_client(turn)
                begin, end = self._range
                progress(begin + (end - begin) * index // len(mixers))

            return before

        handles = [each.register_forward_pre_hook(watch(i)) for i, each in enumerate(mixers)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def try_opening(self) -> None:
        """Opens an empty cache and closes it: who could open none is refused at the start.

        Raises
        ------
        KVSwapError
            As `KVSwapCache` does.
        """
        self._empty().close()

    def settle(self) -> None:
        """After an answer: saves what is worth it, gives free memory back. Nothing is raised."""
        try:
            self._settle()
        except Exception:
            logger.exception("serve: after an answer")
            self._leave_cache()
        give_back_memory()

    def close(self) -> None:
        """Frees the cache; saved ones stay."""
        self._leave_cache()

    # The cache.

    def _go_on(self, prompt: torch.Tensor, turn: Turn) -> None:
        """Makes the cache begin with as much of the prompt as any."""
        if turn.owner != self._owner or self._rows != self._rows_open:
            self._leave_cache()
            self._owner = turn.owner
        for length, entry in self._candidates(prompt):
            if self._take(entry, length):
                turn.cached_tokens = length
                self._counts.add("hits")
                return
        self._begin(prompt, turn)

    def _candidates(self, prompt: torch.Tensor) -> list[tuple[int, Entry | None]]:
        """The longest first, the open cache (None) before saved ones."""
        if not self._reuses or self._scores is not None:
            return []
        caches = [
            (self._tokens(), None),
            *((e.tokens, e) for e in self._store.entries(self._owner)),
        ]
        found = []
        for tokens, entry in caches:
            length = min(common_tokens(tokens, prompt), len(prompt) - 1)  # one is computed
            is_enough = length >= min(self._options.save_from, (len(tokens) + 1) // 2)
            if length > 0 and is_enough and (self._can_crop or length == len(tokens)):
                found.append((length, entry))
        return sorted(found, key=lambda pair: -pair[0])

    def _take(self, entry: Entry | None, length: int) -> bool:
        """Whether the cache holds that many tokens of that one now."""
        if entry is not None:
            self._leave_cache()
            try:
                self._cache = KVSwapCache.open(
                    self._model,
                    entry.path,
                    path=self._options.path,
                    kv_memory_bytes=self._options.kv_memory_bytes,
                    max_context=self._options.max_context,
                    max_batch=self._rows,
                    probe=not entry.is_probed,
                )
                self._rows_open = self._rows
            except Exception as error:  # of this cache: another one, or none, answers
                if self._rows > 1 and isinstance(error, BudgetError):
                    raise  # no cache has memory for so many answers
                if not is_passing(error):
                    self._store.set_aside(entry, error)
                return False
            if not self._store.is_as_before(entry):  # others have put another there
                self._leave_cache()
                return False
            self._entry, self._prompt, entry.is_probed = entry, entry.tokens, True
        beyond = self._cache.get_seq_length() - length
        try:
            if beyond > 0:
                self._cache.crop(-beyond)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            if isinstance(error, CorruptionError) and self._entry is not None:
                self._store.set_aside(self._entry, error)
            elif not isinstance(error, KVSwapError):
                self._can_crop = False  # layers in memory that cannot go back
            self._leave_cache()
            return False
        if self._entry is not None:
            self._store.use(self._entry)
        return True

    def _begin(self, prompt: torch.Tensor, turn: Turn) -> None:
        """An empty cache."""
        self._leave_cache()
        self._cache, self._rows_open = self._empty(), self._rows
        self._prompt = prompt
        turn.cached_tokens = 0
        self._counts.add("misses")

    def _empty(self) -> KVSwapCache:
        return KVSwapCache(
            self._model,
            path=self._options.path,
            config=self._options.config,
            preset=self._options.preset,
            kv_memory_bytes=self._options.kv_memory_bytes,
            max_context=self._options.max_context,
            max_batch=self._rows,
        )

    def _leave_cache(self) -> None:
        cache, self._cache = self._cache, None
        try:
            if cache is not None:
                self._count(cache)
        finally:
            if cache is not None:
                cache.close()
            self._entry, self._prompt, self._counted = None, None, {}

    def _tokens(self) -> torch.Tensor:
        """``[tokens]`` int32 that the open cache has read; none where there is no cache."""
        ids = None if self._cache is None else self._cache.token_ids
        if ids is None or len(ids) != 1:
            return torch.empty(0, dtype=torch.int32)
        return ids[0].to(torch.int32)

    # The answer.

    def _answer(self, turn: Turn, stream: _Stream, arguments: dict[str, Any]) -> torch.Tensor:
        ids = arguments["input_ids"]
        if self._scores is not None:
            self._read_with_logits(ids, turn, self._scores)
        elif self._rows > 1:
            self._read_all(ids, turn)
        else:
            self._read(ids, turn)
        stream.begin()
        config = arguments.get("generation_config")
        if config is not None and config.max_new_tokens == 0:
            return ids.repeat_interleave(self._rows, dim=0)
        given = arguments.get("stopping_criteria") or []
        whole = arguments | self._cache.as_argument()
        whole["stopping_criteria"] = StoppingCriteriaList([*given, _Hung(turn.gone)])
        if self._rows > 1:
            self._cache.batch_repeat_interleave(self._rows)
            for name in ("input_ids", "attention_mask"):
                whole[name] = arguments[name].repeat_interleave(self._rows, dim=0)
        if stream.target is not None:
            whole["streamer"] = stream
        return self._model.generate(**whole)

    @torch.no_grad()
    def _read(self, ids: torch.Tensor, turn: Turn) -> None:
        """All but the last pass's tokens, so that a client may hang up between passes."""
        begun = self._cache.get_seq_length()
        most = self._options.prefill_chunk if self._reuses else ids.shape[1]
        for begin, end in even_chunks(ids.shape[1] - begun, most)[:-1]:
            self._pass(ids[:, begun + begin : begun + end], turn)
        _check_client(turn)

    @torch.no_grad()
    def _read_all(self, ids: torch.Tensor, turn: Turn) -> None:
        """All but the last token, which is each answer's own."""
        begun = self._cache.get_seq_length()
        unread = ids.shape[1] - 1 - begun
        if unread > 0:
            most = self._options.prefill_chunk if self._reuses else unread
            for begin, end in even_chunks(unread, most):
                self._pass(ids[:, begun + begin : begun + end], turn)

    def _pass(self, chunk: torch.Tensor, turn: Turn) -> None:
        _check_time(turn)
        begun = self._cache.get_seq_length()
        self._range = begun, begun + chunk.shape[1]
        decoder = self._cache.parts.decoder
        decoder(input_ids=chunk, **cache_argument(decoder, self._cache), use_cache=True)

    @torch.no_grad()
    def _read_with_logits(self, ids: torch.Tensor, turn: Turn, scores: PromptScores) -> None:
        """As `_read_all`, in passes whose logits are no more than `LOGITS_BYTES`."""
        scores.restart()
        unread = ids.shape[1] - 1
        if unread == 0:
            return
        vocabulary = self._model.get_input_embeddings().weight.shape[0]
        most = min(self._options.prefill_chunk, max(32, LOGITS_BYTES // (4 * vocabulary)))
        for begin, end in even_chunks(unread, most if self._reuses else unread):
            _check_time(turn)
            chunk = ids[:, begin:end]
            out = self._model(
                input_ids=chunk, **cache_argument(self._model, self._cache), use_cache=True
            )
            scores.take(out.logits[0])

    def _keep_prompt(self, ids: torch.Tensor, turn: Turn) -> None:
        """Reads and saves what is worth it, as for one answer: a cache for several is not saved."""
        prompt = ids[0].to("cpu", torch.int32)
        if len(prompt) - self._store.covered(prompt, turn.owner) >= self._options.save_from:
            self._rows, self._scores = 1, None
            self._go_on(prompt, turn)
            self._read_all(ids, turn)
            self._settle()

    # Afterwards.

    def _settle(self) -> None:
        if self._cache is None:
            return
        self._count(self._cache)
        tokens = self._tokens()
        if len(tokens) == 0:
            self._leave_cache()  # a request has made more sequences of it, or the last one failed
            return
        if self._rows_open > 1:
            self._leave_cache()  # its settings are for so many answers
            return
        if not self._reuses:
            return
        if len(tokens) - self._store.covered(tokens, self._owner) < self._options.save_from:
            return
        self._store.save(self._cache, self._prompt, self._owner)
        if not self._store.is_within_limit:
            # A file with holes, larger than it was thought to be; in use, it could not leave.
            self._leave_cache()
            self._store.make_room(0)

    def _count(self, cache: KVSwapCache) -> None:
        """A cache that cannot be asked is not counted. What was dropped unwritten is no minus."""
        with suppress(KVSwapError):
            stats = cache.stats()
            for name, field in _COUNTED.items():
                value = getattr(stats, field)
                self._counts.add(name, max(0, value - self._counted.get(name, 0)))
                self._counted[name] = value


def _check_client(turn: Turn) -> None:
    """Whether somebody waits for the pass; an answer that has begun ends with its step."""
    if turn.gone.is_set():
        raise GoneError("serve: the client hung up")
    if turn.ending.is_set() and turn.generated_tokens == 0:
        raise EndedError("serve: the server ends")


def _check_time(turn: Turn) -> None:
    _check_client(turn)
    if time.monotonic() >= turn.ends:
        raise LateError(
            "serve: the prompt could not be read in the longest time for an answer "
            "(--answer-seconds); what was read is kept: ask again"
        )


class _Hung(StoppingCriteria):
    """Ends an answer that nobody waits for."""

    def __init__(self, gone: threading.Event) -> None:
        self._gone = gone

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._gone.is_set(), device=input_ids.device)


class _Stream:
    """Passes tokens on, and the prompt that comes before them once, however often it is put."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.tokens = 0
        self.is_cut = False  # nobody takes what is put
        self._puts = 0
        self._has_prompt = False

    def begin(self) -> None:
        """Another ``generate()``."""
        self._puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._puts += 1
        if self._puts > 1:
            self.tokens += 1
        elif self._has_prompt:
            return
        self._has_prompt = True
        try:
            self.target.put(value)
        except Exception:
            self.is_cut = True
            raise

    def end(self) -> None:
        self.target.end()
