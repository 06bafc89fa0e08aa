"""Several processes that run one model: they open together, go in step, and fail together.

Without this a process that fails leaves the others waiting for it, half an hour by default, and
processes that sample different tokens go on as if nothing were wrong.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kvswap_torch.config import SwapConfig
from kvswap_torch.config.nested import settings_of
from kvswap_torch.errors import ConfigError, KVSwapError, RankError

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache

OWN_DISK = (
    *("storage.io_backend", "storage.io_mode", "storage.queue_depth"),
    *("storage.coalesce_gap_bytes", "storage.max_read_bytes", "storage.simulated_device"),
    *("storage.max_disk_bytes", "storage.io_timeout_seconds"),
)
_numbers = itertools.count()  # every rank opens its caches in the same order


class Ranks:
    """The processes of one cache, and a process group of their own for what they tell each other.

    Made by every rank at once. Messages are small and go by gloo, whatever the model uses.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        store = dist.distributed_c10d._get_default_store()
        self._failures = dist.PrefixStore(f"kvswap/{next(_numbers)}", store)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._has_ended = False

    def open_together(self, open_: Callable[[], Mapping[str, Any]]) -> None:
        """Opens on every rank or on none.

        Parameters
        ----------
        open_
            Opens this rank's part; returns what must be alike on all ranks, by name.

        Raises
        ------
        RankError
            Another rank could not open; says which and why.
        ConfigError
            Ranks have different settings; names each.
        Exception
            What `open_` raised here.
        """
        error: Exception | None = None
        facts: Mapping[str, Any] = {}
        try:
            facts = open_()
        except Exception as mine:
            error = mine
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, (dict(facts), _said(error)), group=self._group)
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(told):
            if failure is not None:
                raise RankError(
                    f"KVSwapCache: rank {rank} of {self.size} could not open: {failure}"
                )
        self._refuse_differences([of_rank for of_rank, _ in told])

    def _refuse_differences(self, facts: list[Mapping[str, Any]]) -> None:
        for name in facts[0]:
            values = [repr(of_rank.get(name)) for of_rank in facts]
            if len(set(values)) > 1:
                listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                raise ConfigError(
                    f"KVSwapCache: {name} must be alike on all ranks, got {listed}; pass the same "
                    "settings to every process"
                )

    def check_in_step(self, tokens: torch.Tensor | None, positions: int) -> None:
        """Before a forward pass: all ranks must run the same tokens at the same place.

        Parameters
        ----------
        tokens
            ``[batch, tokens]`` ids, or embeddings, or None.
        positions
            Tokens in the cache.
        """
        if self._has_ended:
            raise RankError(
                "KVSwapCache: ranks that run one model must all go on, but an earlier pass failed "
                "on one of them; start all processes again"
            )
        here = torch.tensor([positions, *_fingerprint(tokens)], dtype=torch.int64)
        told = [torch.empty_like(here) for _ in range(self.size)]
        dist.all_gather(told, here, group=self._group)
        different = [rank for rank in range(self.size) if not torch.equal(told[rank], told[0])]
        if different:
            listed = ", ".join(
                f"rank {rank} has {of_rank[0]} tokens and runs {of_rank[1]} more that end in "
                f"{of_rank[2]}"
                for rank, of_rank in enumerate(map(torch.Tensor.tolist, told))
            )
            raise RankError(
                f"KVSwapCache: all ranks must run the same tokens, but {listed}; sample with the "
                "same seed on every rank (torch.manual_seed), or greedily"
            )

    def fail(self, error: BaseException) -> None:
        """Tells the others why this rank cannot go on, and lets none of them wait for it."""
        if self._has_ended:
            return
        self._has_ended = True
        with contextlib.suppress(dist.DistError):  # the rank that holds the store has ended
            self._failures.compare_set("failed", "", f"{self.rank} {_said(error)}")
        if dist.is_initialized():
            dist.destroy_process_group()

    def failure(self) -> str | None:
        """What another rank said when it failed."""
        try:
            if not self._failures.check(["failed"]):
                return None
            rank, said = self._failures.get("failed").decode().split(" ", 1)
        except dist.DistError:
            return None  # the rank that holds the store has ended
        return None if int(rank) == self.rank else f"rank {rank} of {self.size} failed: {said}"


class Guard:
    """Stands before a model's `forward` while one of its caches is shared by several ranks.

    Passes with other caches go through untouched.
    """

    def __init__(self, cache: KVSwapCache, ranks: Ranks):
        self._cache = weakref.ref(cache)
        self._ranks = ranks
        self._model = cache.parts.outermost
        self._had = vars(self._model).get("forward")  # transformers puts one there for stages
        forward = self._model.forward

        @functools.wraps(forward)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            cache = self._cache()
            if cache is None or not any(v is cache for v in (*args, *kwargs.values())):
                return forward(*args, **kwargs)
            tokens = kwargs.get("input_ids", kwargs.get("inputs_embeds", args[0] if args else None))
            return self._run(cache, tokens, functools.partial(forward, *args, **kwargs))

        self._guarded = guarded
        self._model.forward = guarded

    def _run(self, cache: KVSwapCache, tokens: Any, forward: Callable[[], Any]) -> Any:
        in_step = False
        try:
            self._ranks.check_in_step(tokens, cache.get_seq_length())
            in_step = True
            return forward()
        except BaseException as error:
            if isinstance(error, RankError) and not in_step:
                raise  # all ranks have found the same
            elsewhere = self._ranks.failure()
            self._ranks.fail(error)
            if elsewhere is not None:
                raise RankError(f"KVSwapCache: {elsewhere}") from error
            if _is_lost_connection(error):
                raise RankError(
                    "KVSwapCache: another rank ended without a word; was it killed? See the log "
                    f"of the others ({error})"
                ) from error
            raise

    def remove(self) -> None:
        """Takes itself off again."""
        if vars(self._model).get("forward") is not self._guarded:
            return
        if self._had is None:
            del self._model.forward
        else:
            self._model.forward = self._had


def settings_alike(config: SwapConfig | None) -> dict[str, Any]:
    """What of a config must be the same on all ranks, by name: all but each one's own disk."""
    if config is None:
        return {"config": None}
    settings = {n: value for n, value in settings_of(config).items() if n not in OWN_DISK}
    return settings | {"model": config.model, "solutions": config.solutions}


def _fingerprint(tokens: torch.Tensor | None) -> tuple[int, int, int]:
    """New tokens, the last one, and a checksum of all."""
    if tokens is None:
        return 0, 0, 0
    ids = tokens.detach().to("cpu", copy=False).contiguous()
    if ids.is_floating_point():
        return ids.shape[1], 0, 0  # embeddings may differ by rounding
    return ids.shape[1], int(ids.flatten()[-1]), zlib.crc32(ids.numpy().tobytes())


def _said(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _is_lost_connection(error: BaseException) -> bool:
    return not isinstance(error, KVSwapError) and (
        isinstance(error, dist.DistError) or "gloo" in str(error)
    )
