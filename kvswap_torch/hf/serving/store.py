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
import stat
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvswap_torch.errors import ConfigError, CorruptionError, KVSwapError, StorageError
from kvswap_torch.failures import failure_of
from kvswap_torch.hf.families import ModelParts
from kvswap_torch.hf.saved_checks import check_model
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.troubles import AGAIN_SECONDS, printable
from kvswap_torch.memory_size import format_bytes
from kvswap_torch.saved_path import is_in_use, text_of
from kvswap_torch.saved_scrub import DAMAGED

if TYPE_CHECKING:
    from kvswap_torch.hf.cache import KVSwapCache
    from kvswap_torch.hf.stats import CacheStats

logger = logging.getLogger(__name__)

# What a killed save, or a killed removal, has left; see StagedFolder in C++.
_LEFT = re.compile(r"\..+\.[a-z0-9]{16}")
_OWNED = re.compile(r"key-[0-9a-f]{16}")
_GONE = (errno.ENOENT, errno.ENOTDIR)
_FILES = ("manifest.json", "state.safetensors", "records.bin")


@dataclass
class Entry:
    """A saved cache in the store.

    Parameters
    ----------
    owner
        Whose requests may use it; empty: all that are nobody's own.
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
    document
        The file's name that ``kvswap ingest`` read, without its folder; empty: not known.
    """

    path: Path
    owner: str
    identity: tuple[int, ...]
    bytes: int
    used_ns: int
    tokens: torch.Tensor | None = None
    is_kept: bool = False
    is_probed: bool = False
    document: str = ""


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
        text_of(folder, "serve: --store")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for place in (folder, *_owned_folders(folder)):
                _remove_left(place)
        except OSError as error:
            raise StorageError(
                f"serve: --store must be a folder, got {folder}: {error.strerror}"
            ) from error
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._parts = parts
        self._counts = counts
        self._entries: dict[Path, Entry] = {}
        self._said: dict[Hashable, float] = {}
        self._left_out: Counter[str] = Counter()
        counts.set("store_limit_bytes", limit_bytes)
        self.refresh()

    def entries(self, owner: str = "") -> list[Entry]:
        """Those that can be used here for an owner's requests. Any thread."""
        return [
            entry
            for entry in list(self._entries.values())
            if entry.tokens is not None and entry.owner == owner
        ]

    @property
    def usable(self) -> int:
        """How many can be used here, by whomever."""
        return sum(entry.tokens is not None for entry in self._entries.values())

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self._entries.values())

    @property
    def is_within_limit(self) -> bool:
        return self.bytes <= self._limit_bytes

    def refresh(self) -> None:
        """Takes in what others have added, and forgets what is gone. Raises nothing.

        A folder that cannot be looked at is left out and reported once; lack of descriptors or
        memory, or a busy disk, passes: such a folder is looked at again with every refresh.
        """
        found: dict[Path, Entry] = {}
        self._left_out = Counter()
        place = self._folder
        try:
            for place in (self._folder, *_owned_folders(self._folder)):
                for name in sorted(os.listdir(place)):
                    if name.startswith(".") or DAMAGED in name:
                        continue  # left over, or moved aside by `kvswap verify`
                    if not _is_owned(place, name):
                        self._look_at(place / name, found)
        except OSError as error:  # a store that is away for a while: what is known stays
            self._leave_out(place, error)
            found = self._entries | found
        self._entries = found
        self._count()

    def _look_at(self, path: Path, found: dict[Path, Entry]) -> None:
        known = self._entries.get(path)
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                return
            text_of(path, "saved cache's path")
            is_same = known is not None and known.identity == _identity(path)
            found[path] = known if is_same else self._load(path)
        except Exception as error:  # one folder is never every request's
            if getattr(error, "errno", None) in _GONE:
                return  # none of ours, or gone meanwhile
            if known is not None and is_passing(error):
                found[path] = known  # opening it says whether it is still the same
            self._leave_out(path, error)

    def _leave_out(self, path: Path, error: Exception) -> None:
        self._left_out[reason_of(error)] += 1
        if getattr(error, "errno", None) == errno.EBUSY:
            return  # somebody has it for a moment
        self._say(f"{path} is left out: {error}", about=(str(path), reason_of(error)))

    def paths(self) -> list[Path]:
        """Of those that can be used here, by whomever."""
        return sorted(path for path, entry in self._entries.items() if entry.tokens is not None)

    def leave_out(self, path: Path, error: Exception) -> None:
        """As `set_aside`, of what stands at `path`, if it is still known."""
        self.refresh()  # it may have been moved
        if path in self._entries:
            self.set_aside(self._entries[path], error)

    def covered(self, tokens: torch.Tensor, owner: str = "") -> int:
        """How many of a prompt's tokens, at most, a saved cache of that owner has read."""
        found = (common_tokens(entry.tokens, tokens) for entry in self.entries(owner))
        return max(found, default=0)

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
        """It is not used again, or after another look where it is no damage; reported once."""
        entry.tokens, entry.is_kept = None, not isinstance(error, ConfigError)
        if not is_damage(error):
            entry.identity = ()
        self._leave_out(entry.path, error)
        self._count()

    def save(self, cache: KVSwapCache, prompt: torch.Tensor, owner: str = "") -> None:
        """Saves a cache by the first prompt that it has read; what cannot be is reported.

        Where the disk is full before the limit is, the oldest leave, and it is tried once more.
        """
        stats = cache.stats()
        needed = _saved_bytes(stats)
        if not self.make_room(needed):
            self._not_saved(
                f"{stats.tokens} tokens need {format_bytes(needed)}, and --store-limit "
                f"{format_bytes(self._limit_bytes)} has no room that is not in use",
                "limit",
            )
            return
        try:
            path = self._save(cache, prompt, owner)
        except (KVSwapError, OSError) as error:
            is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            if not is_full or not self._evict(needed):
                self._not_saved(str(error), reason_of(error))
                return
            try:
                path = self._save(cache, prompt, owner)
            except (KVSwapError, OSError) as again:
                self._not_saved(str(again), reason_of(again))
                return
        self._counts.add("saves")
        self._look_at(path, self._entries)
        if path in self._entries:
            self._entries[path].is_probed = True
        self.make_room(0)
        self._count()

    def make_room(self, needed: int) -> bool:
        """Removes the oldest that nobody uses until there is; False: there is none."""
        if needed > self._limit_bytes:
            return False
        self._evict(self.bytes + needed - self._limit_bytes)
        return self.bytes + needed <= self._limit_bytes

    def _evict(self, wanted: int) -> bool:
        """Removes the oldest that nobody uses, so many bytes in all; whether any has left."""
        before = self.bytes
        for entry in sorted(self._entries.values(), key=lambda entry: entry.used_ns):
            if before - self.bytes >= wanted:
                break
            if not entry.is_kept and not is_in_use(entry.path):
                self._remove(entry)
        self._count()
        return self.bytes < before

    def _save(self, cache: KVSwapCache, prompt: torch.Tensor, owner: str) -> Path:
        if owner:
            (self._folder / owner).mkdir(mode=0o700, exist_ok=True)
        path = _named(self._folder / owner, prompt)
        cache.document = ""  # of what it was opened with: this text may go on otherwise
        cache.save(path)
        return path

    def _not_saved(self, text: str, reason: str) -> None:
        self._counts.add("save_failures")
        self._say(f"not saved: {text}", about=("not saved", reason), again=AGAIN_SECONDS)

    def _remove(self, entry: Entry) -> None:
        from kvswap_torch import _C

        try:
            _C.SavedCache.remove(str(entry.path))
        except StorageError as error:
            if error.errno != errno.ENOENT:
                return  # in use, or the store is read-only
        except KVSwapError:
            return
        del self._entries[entry.path]
        self._counts.add("evictions")

    def _load(self, path: Path) -> Entry:
        from kvswap_torch import _C

        identity, facts = _identity(path), path.stat()
        files = (file.stat() for file in path.iterdir())
        entry = Entry(
            path=path,
            owner="" if path.parent == self._folder else path.parent.name,
            identity=identity,
            bytes=sum(512 * file.st_blocks for file in files),
            used_ns=facts.st_mtime_ns,
        )
        try:
            saved = _C.SavedCache(str(path))
        except Exception as error:
            if is_damage(error):
                entry.is_kept = True  # damaged, or newer
                self._say(f"{path} is left out: {error}")
            else:
                entry.identity = ()  # looked at again
                self._leave_out(path, error)
            return entry
        try:
            made = json.loads(saved.facts)
            check_model(made, self._parts, str(path))
            entry.document = _file_name(made.get("document", ""))
            entry.tokens = _tokens_of(saved.tensors())
        except Exception as error:
            entry.is_kept = not isinstance(error, ConfigError)  # another model's may leave
            self._say(f"{path} is left out: {error}")
        return entry

    def _say(self, text: str, about: Hashable = None, again: float = float("inf")) -> None:
        """Once for each text, or for what it is about, or `again` after so many seconds."""
        now = time.monotonic()
        if now - self._said.get(about or text, float("-inf")) >= again:
            self._said[about or text] = now
            logger.warning("serve: %s", printable(text))

    def _count(self) -> None:
        self._counts.set("store_caches", len(self._entries))
        self._counts.set("store_unusable", len(self._entries) - self.usable)
        self._counts.set("store_bytes", self.bytes)
        self._counts.set_each("store_left_out", self._left_out)


def _named(folder: Path, prompt: torch.Tensor) -> Path:
    digest = hashlib.blake2b(prompt.numpy().tobytes(), digest_size=8).hexdigest()
    path, number = folder / f"{digest}.kvswap", 1
    while os.path.lexists(path):
        number += 1
        path = folder / f"{digest}-{number}.kvswap"
    return path


def _is_owned(folder: Path, name: str) -> bool:
    """Whether it is the folder of a key's caches, as `access.owner_of` names them."""
    return _OWNED.fullmatch(name) is not None and (folder / name).is_dir()


def _owned_folders(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(os.listdir(folder)) if _is_owned(folder, name)]


def _remove_left(folder: Path) -> None:
    """Folders of saves that were killed; one that somebody fills is locked."""
    for place in os.scandir(folder):
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
    """A failure that says nothing about the cache: lack, or another process that has it."""
    return failure_of(error) == "passing"


def is_damage(error: Exception) -> bool:
    """Whether the cache itself is at fault, and not the way to it."""
    is_way = isinstance(error, OSError) and error.errno is not None
    return isinstance(error, CorruptionError) or not (is_way or is_passing(error))


def reason_of(error: Exception) -> str:
    """For a metric's label: the name of its errno, or what kind of failure it is."""
    number = error.errno if isinstance(error, OSError) else None
    if number is not None:
        return errno.errorcode.get(number, str(number))
    return "damaged" if isinstance(error, CorruptionError) else type(error).__name__


def _file_name(document: str) -> str:
    """Without its folder, which is no matter of the server's clients; ``-`` was a pipe."""
    return "" if document == "-" else Path(document).name


def _tokens_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Of one sequence without padding; else None."""
    ids, valid = tensors.get("token_ids"), tensors.get("valid")
    if ids is None or len(ids) != 1 or (valid is not None and not bool(valid.all())):
        return None
    return ids[0].to(torch.int32)
