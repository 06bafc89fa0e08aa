"""One bad folder of a store, or a lack that passes, is never every request's."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvswap_torch import KVSwapCache
from kvswap_torch.errors import CorruptionError, StorageError
from kvswap_torch.hf.families import model_parts
from kvswap_torch.hf.serving import store as store_module
from kvswap_torch.hf.serving.access import owner_of
from kvswap_torch.hf.serving.counts import Counts
from kvswap_torch.hf.serving.line import Turn
from kvswap_torch.hf.serving.store import CacheStore
from kvswap_torch.hf.serving.troubles import OnceAMinute, printable
from tests.python.test_serving_reuse import Desk, asked, in_memory, text
from tests.python.tiny_models import has_native, tiny_model

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
BOOK = 1


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Any, Path]:
    """A model, and a store that has read one book."""
    model = tiny_model("llama")
    with Desk(model, tmp_path) as desk:
        desk.ask(text(60, BOOK))
    return model, tmp_path


def check_all_is_well(model: Any, desk: Desk, seed: int) -> None:
    ids = asked(text(60, BOOK), seed)
    assert desk.ask(ids) == in_memory(model, ids)
    assert desk.cached == 60


@pytest.mark.parametrize("is_running", [True, False])
def test_a_name_that_is_not_utf8_is_left_out_and_named_once(
    filled: tuple[Any, Path], is_running: bool, caplog: Any
) -> None:
    model, folder = filled
    (good,) = folder.iterdir()
    name = os.fsencode(folder) + b"/b\xfccher\x1b[31m.kvswap"
    if not is_running:
        shutil.copytree(os.fsencode(good), name)
    with caplog.at_level(logging.WARNING, "kvswap_torch"), Desk(model, folder) as desk:
        if is_running:
            shutil.copytree(os.fsencode(good), name)
        for seed in range(3):
            check_all_is_well(model, desk, seed)
            desk.reuse.close()
        assert desk.counts["store_left_out"] == 1
    (said,) = [each.getMessage() for each in caplog.records if "cher" in each.getMessage()]
    assert r"b\xfccher\x1b[31m.kvswap is left out" in said and said.isprintable()


def test_a_lack_passes_and_a_cache_is_used_again(
    filled: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = filled
    real = store_module._identity
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO, errno.EACCES):
        with Desk(model, folder) as desk:
            desk.store._entries.clear()

            def failing(path: Path, number: int = number) -> Any:
                raise OSError(number, os.strerror(number), str(path))

            monkeypatch.setattr(store_module, "_identity", failing)
            desk.store.refresh()
            assert desk.store.entries() == []
            assert f'reason="{errno.errorcode[number]}"' in desk.counts.text()
            monkeypatch.setattr(store_module, "_identity", real)
            check_all_is_well(model, desk, number)
            assert desk.counts["store_left_out"] == 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_an_opening_that_fails_is_tried_with_the_next_request(
    filled: tuple[Any, Path], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = filled
    real, fails = KVSwapCache.open, [True]

    def failing(*arguments: Any, **named: Any) -> Any:
        if fails.pop() if fails else False:
            raise StorageError(number, os.strerror(number), "x")
        return real(*arguments, **named)

    with Desk(model, folder, save_from=10_000) as desk:
        monkeypatch.setattr(KVSwapCache, "open", failing)
        ids = asked(text(60, BOOK), 1)
        assert desk.ask(ids) == in_memory(model, ids)
        assert desk.cached == 0
        desk.reuse.close()
        check_all_is_well(model, desk, 2)


@pytest.mark.parametrize(
    "error", [KeyError, AttributeError, TypeError, IndexError, CorruptionError]
)
def test_whatever_opening_raises_sets_that_cache_aside_alone(
    filled: tuple[Any, Path], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = filled

    def failing(*arguments: Any, **named: Any) -> Any:
        raise error("projection")

    with Desk(model, folder, save_from=10_000) as desk:
        monkeypatch.setattr(KVSwapCache, "open", failing)
        for seed in (1, 2):
            ids = asked(text(60, BOOK), seed)
            assert desk.ask(ids) == in_memory(model, ids)
            desk.reuse.close()
        assert desk.counts["store_unusable"] == 1


def test_a_manifest_that_says_nothing_of_its_model_is_left_out(
    filled: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = filled
    for facts in ("[]", "{}", '{"model": 5}', '{"model": {"nothing": 1}}', "null", "{"):
        monkeypatch.setattr(store_module.json, "loads", lambda _, facts=facts: _loads(facts))
        store = CacheStore(folder, 1 << 30, model_parts(model), Counts())
        assert store.entries() == [], facts


_loads = json.loads


def test_a_store_that_is_away_keeps_what_is_known(
    filled: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = filled
    with Desk(model, folder) as desk:
        away = folder.with_name("away")
        folder.rename(away)
        desk.store.refresh()
        assert desk.counts["store_left_out"] == 1
        away.rename(folder)
        check_all_is_well(model, desk, 1)


@pytest.mark.parametrize(("number", "is_saved"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_a_full_disk_makes_the_oldest_leave(
    filled: tuple[Any, Path], number: int, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = filled
    (oldest,) = folder.iterdir()
    real = KVSwapCache.save

    def failing(cache: KVSwapCache, path: Path) -> Any:
        if oldest.exists():
            raise StorageError(number, os.strerror(number), str(path))
        return real(cache, path)

    with Desk(model, folder) as desk:
        monkeypatch.setattr(KVSwapCache, "save", failing)
        desk.ask(text(60, 2))
        assert desk.counts["saves"] == desk.counts["evictions"] == is_saved
        assert desk.counts["save_failures"] == (not is_saved)
        assert oldest.exists() == (not is_saved)
        assert len(desk.store.entries()) == 1


# Each key has caches of its own.


class Client:
    def __init__(self, desk: Desk, key: str):
        self.desk, self.owner = desk, owner_of(key) if key else ""

    def ask(self, ids: torch.Tensor) -> int:
        """How many tokens were in a cache."""
        turn = Turn(self.owner)
        mask = torch.ones_like(ids)
        given = {"do_sample": False, "max_new_tokens": 3}
        self.desk.reuse.generate(turn, input_ids=ids, attention_mask=mask, **given)
        self.desk.reuse.settle()
        return turn.cached_tokens


def test_no_key_goes_on_from_anothers_cache(tmp_path: Path) -> None:
    model = tiny_model("llama")
    book = text(60, 1)
    with Desk(model, tmp_path) as desk:
        one, other, nobody = Client(desk, "one"), Client(desk, "other"), Client(desk, "")
        assert one.ask(book) == 0
        assert other.ask(book) == 0, "not from the open cache"
        assert one.ask(asked(book, 1)) == 60
        assert nobody.ask(book) == 0
        desk.reuse.close()
        assert other.ask(asked(book, 2)) == 60
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[1:] == sorted([one.owner, other.owner]) and names[0].endswith(".kvswap")
    assert oct((tmp_path / one.owner).stat().st_mode)[-3:] == "700"
    shutil.rmtree(tmp_path / other.owner)
    with Desk(model, tmp_path) as desk:  # the same server again
        assert Client(desk, "other").ask(book) == 0
        assert Client(desk, "one").ask(asked(book, 3)) == 60
        assert desk.counts["store_caches"] == 3


def test_one_limit_holds_for_all_keys(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with Desk(model, tmp_path) as desk:
        Client(desk, "one").ask(text(60, 0))
        limit = 8 * desk.store.bytes
    with Desk(model, tmp_path, limit) as desk:
        for seed in range(1, 11):
            Client(desk, f"key{seed}").ask(text(60, seed))
            taken = sum(512 * f.stat().st_blocks for f in tmp_path.glob("*/*/*"))
            assert taken == desk.store.bytes <= limit
        assert desk.counts["evictions"] >= 2


# What is reported.


def test_what_is_shown_has_no_control_characters() -> None:
    assert printable("a\x1b]0;x\x07\n\x85\u202e\udcff\u4e2d") == (
        "a\\x1b]0;x\\x07\\n\\x85\\u202e\\xff\u4e2d"
    )
    assert len(printable("x" * 10_000)) < 3000


def test_each_trouble_is_logged_once_a_minute(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvswap_torch.hf.serving import troubles

    now = [0.0]
    monkeypatch.setattr(troubles.time, "monotonic", lambda: now[0])
    logger = logging.getLogger("kvswap_torch.test")
    once = OnceAMinute()
    logger.addFilter(once)
    try:
        for second in range(0, 130, 10):
            now[0] = float(second)
            logger.warning("again %s\x1b", second)
            logger.warning("other %s", second)
    finally:
        logger.removeFilter(once)
    told = [each.getMessage() for each in caplog.records]
    assert [each for each in told if "again" in each] == [
        r"again 0\x1b",
        r"again 60\x1b (and 5 more like it)",
        r"again 120\x1b (and 5 more like it)",
    ]
    assert len(told) == 6
