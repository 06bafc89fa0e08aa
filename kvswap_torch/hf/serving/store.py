"""A folder of saved caches that stays within a limit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvswap_torch.errors import ConfigError, CorruptionError, KVSwapError, StorageError
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.saved_checks import check_model
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.memory_size import format_bytes
from kvswap_torch.saved_path import is_in_use

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache
    from kvswap_torch.hf.stats import CacheStats

logger = logging.getLogger(__name__)

# What a killed save, or a killed removal, has left; see StagedFolder in C++.
_LEFT = re.compile(r"\..+\.[a-z0-9]{16}")
_PASSING = (errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM,
            errno.EAGAIN, errno.EINTR)  # fmt: skip
_FILES = ("manifest.json", "state.safetensors", "records.bin")


@dataclass
class Entry:
    """A saved cache in the store.

    Parameters
    ----------
    identity
        Tells it from one that others put in its place; empty: look again.
    tokens
        ``[tokens]`` int32, what it has read; None where it cannot be used here.
    used_ns
        When it was last used: the folder's time of change, which outlives the server.
    is_kept
        Damaged, or of a newer version: only ``kvswap rm`` removes it.
    is_probed
        Its keys were compared with the model's.
    """

    path: Path
    identity: tuple[int, ...]
    bytes: int
    used_ns: int
    tokens: torch.Tensor | None = None
    is_kept: bool = False
    is_probed: bool = False


def common_tokens(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many tokens both begin with."""
    count = min(len(one), len(other))
    differs = (one[:count] != other[:count]).nonzero()
    return int(differs[0]) if len(differs) else count


class CacheStore:
    """Finds the cache that has read most of a prompt; saves more; removes the oldest.

    Other processes may use the folder too: ``kvswap ingest`` puts documents there. Those that are
    in use stay. Not thread-safe.

    Raises
    ------
    StorageError
        The folder is not there and cannot be made.
    """

    def __init__(self, folder: Path, limit_bytes: int, parts: ModelParts, counts: Counts) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"serve: --store must be a folder, got {folder}: {error.strerror}"
            ) from error
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._parts = parts
        self._counts = counts
        self._entries: dict[str, Entry] = {}
        self._said: set[str] = set()
        counts.set("store_limit_bytes", limit_bytes)
        self._remove_left()
        self.refresh()

    @property
    def entries(self) -> list[Entry]:
        """Those that can be used here."""
        return [entry for entry in self._entries.values() if entry.tokens is not None]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self._entries.values())

    @property
    def is_within_limit(self) -> bool:
        return self.bytes <= self._limit_bytes

    def refresh(self) -> None:
        """Takes in what others have added, and forgets what is gone."""
        found = {}
        for place in os.scandir(self._folder):
            if place.name.startswith(".") or not place.is_dir(follow_symlinks=False):
                continue
            known = self._entries.get(place.name)
            with contextlib.suppress(OSError):  # none of ours, or gone meanwhile
                is_same = known is not None and known.identity == _identity(Path(place))
                found[place.name] = known if is_same else self._load(Path(place))
        self._entries = found
        self._count()

    def covered(self, tokens: torch.Tensor) -> int:
        """How many of a prompt's tokens, at most, a saved cache has read."""
        return max((common_tokens(entry.tokens, tokens) for entry in self.entries), default=0)

    def use(self, entry: Entry) -> None:
        """Makes it the newest."""
        entry.used_ns = time.time_ns()
        with contextlib.suppress(OSError):  # a store that is read-only
            os.utime(entry.path, ns=(entry.used_ns, entry.used_ns))

    def is_as_before(self, entry: Entry) -> bool:
        """Whether nobody has put another in its place since it was looked at."""
        try:
            return _identity(entry.path) == entry.identity
        except OSError:
            return False

    def set_aside(self, entry: Entry, error: Exception) -> None:
        """It is not used again; said once."""
        entry.tokens, entry.is_kept = None, isinstance(error, CorruptionError)
        self._say(f"{entry.path} is left out: {error}")
        self._count()

    def save(self, cache: KVSwapCache, prompt: torch.Tensor) -> None:
        """Saves a cache by the first prompt that it has read; what cannot be is said once."""
        stats = cache.stats()
        needed = _saved_bytes(stats)
        if not self.make_room(needed):
            self._counts.add("save_failures")
            self._say(
                f"not saved: {stats.tokens} tokens need {format_bytes(needed)}, and --store-limit "
                f"{format_bytes(self._limit_bytes)} has no room that is not in use"
            )
            return
        path = self._name(prompt)
        try:
            cache.save(path)
        except KVSwapError as error:
            self._counts.add("save_failures")
            self._say(f"not saved: {error}")
            return
        self._counts.add("saves")
        entry = self._load(path)
        entry.is_probed = True
        self._entries[path.name] = entry
        self.make_room(0)
        self._count()

    def make_room(self, needed: int) -> bool:
        """Removes the oldest that nobody uses until there is; False: there is none."""
        if needed > self._limit_bytes:
            return False
        oldest = sorted(self._entries.values(), key=lambda entry: entry.used_ns)
        for entry in oldest:
            if self.bytes + needed <= self._limit_bytes:
                break
            if not entry.is_kept and not is_in_use(entry.path):
                self._remove(entry)
        self._count()
        return self.bytes + needed <= self._limit_bytes

    def _remove(self, entry: Entry) -> None:
        from kvswap_torch import _C

        try:
            _C.SavedCache.remove(str(entry.path))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                return  # in use, or the store is read-only
        except KVSwapError:
            return
        del self._entries[entry.path.name]
        self._counts.add("evictions")

    def _load(self, path: Path) -> Entry:
        from kvswap_torch import _C

        identity, facts = _identity(path), path.stat()
        files = (file.stat() for file in path.iterdir())
        entry = Entry(
            path=path,
            identity=identity,
            bytes=sum(512 * file.st_blocks for file in files),
            used_ns=facts.st_mtime_ns,
        )
        try:
            saved = _C.SavedCache(str(path))
        except KVSwapError as error:
            if is_passing(error):  # somebody is looking at it, or there is no descriptor left
                entry.identity = ()
                return entry
            entry.is_kept = True  # damaged, or newer
            self._say(f"{path} is left out: {error}")
            return entry
        try:
            check_model(json.loads(saved.facts), self._parts, str(path))
            entry.tokens = _tokens_of(saved.tensors())
        except CorruptionError as error:
            entry.is_kept = True
            self._say(f"{path} is left out: {error}")
        except ConfigError as error:
            self._say(f"{path} is left out: {error}")
        return entry

    def _name(self, prompt: torch.Tensor) -> Path:
        digest = hashlib.blake2b(prompt.numpy().tobytes(), digest_size=8).hexdigest()
        path, number = self._folder / f"{digest}.kvswap", 1
        while os.path.lexists(path):
            number += 1
            path = self._folder / f"{digest}-{number}.kvswap"
        return path

    def _remove_left(self) -> None:
        """Folders of saves that were killed; one that somebody fills is locked."""
        for place in os.scandir(self._folder):
            if not _LEFT.fullmatch(place.name) or not place.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found = os.listdir(place)
                    if not set(found) <= set(_FILES):
                        continue  # no save's
                    for name in found:
                        Path(place, name).unlink()
                    os.rmdir(place)
                finally:
                    os.close(descriptor)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("serve: %s", text)

    def _count(self) -> None:
        self._counts.set("store_caches", len(self._entries))
        self._counts.set("store_unusable", len(self._entries) - len(self.entries))
        self._counts.set("store_bytes", self.bytes)


def _saved_bytes(stats: CacheStats) -> int:
    """About what a cache takes when it is saved: its records, and what is kept of them."""
    beside = sum(stats.ledger.get(name, 0) for name in ("projections", "summary", "tables"))
    beside += stats.shared_bytes
    return stats.kv_bytes_on_disk + beside + 16 * stats.tokens + (16 << 10)


def _identity(path: Path) -> tuple[int, ...]:
    """Of the saved cache there; numbers of folders and files alone are given out again at once."""
    manifest = os.stat(path / "manifest.json")
    return path.stat().st_ino, manifest.st_ino, manifest.st_ctime_ns


def is_passing(error: Exception) -> bool:
    """A failure that says nothing about the cache."""
    return isinstance(error, StorageError) and error.errno in _PASSING


def _tokens_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Of one sequence without padding; else None."""
    ids, valid = tensors.get("token_ids"), tensors.get("valid")
    if ids is None or len(ids) != 1 or (valid is not None and not bool(valid.all())):
        return None
    return ids[0].to(torch.int32)
