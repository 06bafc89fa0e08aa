"""A disk that fails, lacks and races below saved caches: our errors, each of its own kind.

Lack is no damage, and no fault ends the process: nothing of a saved cache is mapped.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvswap_torch import CorruptionError, KVSwapCache, KVSwapError
from kvswap_torch.errors import StorageError
from kvswap_torch.failures import failure_of
from kvswap_torch.saved_path import is_in_use
from tests.how_long import lives
from tests.python.faulty_kernel import FaultyKernel, faulty_kernel, striking
from tests.python.saved_child import ROOT, OtherProcess
from tests.python.saved_conversation import filled, goes_on
from tests.python.tiny_models import TIGHT, forward, has_native, prompt, tiny_model

if has_native():
    from kvswap_torch import _C
pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
FILES = ("manifest.json", "state.safetensors", "records.bin")
CALLS = [(file, call) for file in FILES for call in ("open", "read", "facts")]
CALLS.remove(("records.bin", "read"))
LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EIO)
SECONDS = lives(3, 8)  # of a race
SYNC = dataclasses.replace(TIGHT, reader="sync")


@pytest.fixture
def kernel() -> Iterator[FaultyKernel]:
    with faulty_kernel() as faults:
        yield faults


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cache, _ = filled(tiny_model("llama"), tmp_path, SYNC)
    with cache:
        cache.save(tmp_path / "a")
    return tmp_path / "a"


# What fails, and how it is called.


@pytest.mark.parametrize("error", LACKS, ids=errno.errorcode.get)
@pytest.mark.parametrize("file, call", CALLS)  # records are read by a session: see below
@pytest.mark.pairs(once=["file", "call", "error"])
def test_what_fails_is_no_damage(
    file: str, call: str, error: int, saved: Path, kernel: FaultyKernel
) -> None:
    model = tiny_model("llama")
    kernel.arm(call, lasts=True, error=error, name=file)
    with pytest.raises(StorageError) as raised:
        KVSwapCache.open(model, saved, path=saved.parent, probe=False)
    assert kernel.injected > 0
    assert not isinstance(raised.value, CorruptionError) and raised.value.errno == error
    assert file in str(raised.value) and "save" not in str(raised.value)
    assert failure_of(raised.value) == ("permanent" if error == errno.EACCES else "passing")
    kernel.heal()
    KVSwapCache.open(model, saved, path=saved.parent).close()


@pytest.mark.parametrize("nth", range(1, 40, 3))
def test_any_read_may_fail_while_it_is_opened(nth: int, saved: Path, kernel: FaultyKernel) -> None:
    """Once is tried again; for ever is an error, and the process goes on."""
    model = tiny_model("llama")
    kernel.arm("read", nth=nth, error=errno.EIO)
    KVSwapCache.open(model, saved, path=saved.parent).close()
    kernel.arm("read", nth=nth, lasts=True, error=errno.EIO)
    try:
        KVSwapCache.open(model, saved, path=saved.parent).close()
    except StorageError as raised:
        assert raised.errno == errno.EIO and not isinstance(raised, CorruptionError)
        assert kernel.injected > 0
    else:
        assert kernel.injected == 0


def test_short_reads_are_gone_on_with(saved: Path, kernel: FaultyKernel) -> None:
    model = tiny_model("llama")
    kernel.arm("read", lasts=True, error=0, is_short=True)
    KVSwapCache.open(model, saved, path=saved.parent).close()
    _C.SavedCache(str(saved)).verify()


def test_a_record_s_failure_names_its_own_disk(saved: Path, kernel: FaultyKernel) -> None:
    """Not that of the session that goes on from it."""
    model = tiny_model("llama")
    (elsewhere := saved.parent / "elsewhere").mkdir()
    ids = prompt(1, 9)["input_ids"]
    with KVSwapCache.open(model, saved, path=elsewhere) as cache:
        kernel.arm("read", lasts=True, error=errno.EIO, name="records.bin")
        for use in (lambda: forward(model, ids, cache), lambda: cache.save(elsewhere / "b")):
            with pytest.raises(StorageError) as raised:
                use()
            assert kernel.injected > 0
            assert raised.value.filename == str(saved) and "elsewhere" not in str(raised.value)
        assert list(elsewhere.iterdir()) == []
        kernel.heal()
        forward(model, ids, cache)


@pytest.mark.parametrize("bytes_left", [0, 4, 100, 4096])
@pytest.mark.parametrize("file", FILES)
@pytest.mark.pairs(once=["file", "bytes_left"])
def test_a_file_that_is_cut_while_it_is_open(file: str, bytes_left: int, saved: Path) -> None:
    """By another thread, again and again; in a process of its own, which must live."""
    program = f"""
        import os, threading
        from pathlib import Path
        from kvswap_torch import _C
        from kvswap_torch.errors import CorruptionError, StorageError
        file = Path({str(saved / file)!r})
        whole, ends = file.read_bytes(), False
        left = min({bytes_left}, len(whole) // 2)
        def cut():
            while not ends:
                os.truncate(file, left)
                with file.open("r+b") as target:
                    target.write(whole)
        thread = threading.Thread(target=cut)
        thread.start()
        damaged = 0
        for _ in range(300):
            try:
                _C.SavedCache({str(saved)!r}).tensors()
            except CorruptionError:
                damaged += 1
        ends = True
        thread.join()
        _C.SavedCache({str(saved)!r}).verify()
        print(damaged)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_too_few_descriptors_are_no_damage(saved: Path) -> None:
    """With none left, one, two ... until it opens."""
    _C.SavedCache(str(saved))
    free, before = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, before[1]))
    outcomes = []
    try:
        while True:
            try:
                free.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for _ in range(8):
            try:
                _C.SavedCache(str(saved))
                outcomes.append(None)
            except StorageError as error:
                outcomes.append(error)
            os.close(free.pop())
    finally:
        for each in free:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    errors = [each for each in outcomes if each is not None]
    assert len(errors) >= 3 and outcomes[-1] is None
    for error in errors:
        assert error.errno == errno.EMFILE and failure_of(error) == "passing"
        assert not isinstance(error, CorruptionError)


def test_what_is_missing_or_no_file_is_damage(saved: Path) -> None:
    for file in FILES:
        kept = (saved / file).read_bytes()
        for put in (lambda at: None, os.mkfifo, os.mkdir, lambda at: os.symlink("/etc/hosts", at)):
            (saved / file).unlink()
            put(saved / file)
            with pytest.raises(CorruptionError, match=file) as raised:
                _C.SavedCache(str(saved))
            assert failure_of(raised.value) == "damage"
            if (saved / file).is_dir():
                (saved / file).rmdir()
            (saved / file).unlink(missing_ok=True)
            (saved / file).write_bytes(kept)
    _C.SavedCache(str(saved))


def test_the_table_of_failures() -> None:
    passing = "EAGAIN EINTR EMFILE ENFILE ENOMEM ENOSPC EDQUOT EBUSY EIO ETIMEDOUT ESTALE ENODEV"
    permanent = "EACCES EPERM EROFS ENOENT ENOTDIR EINVAL EFBIG ELOOP ENAMETOOLONG EEXIST"
    for kind, names in (("passing", passing), ("permanent", permanent)):
        for name in names.split():
            number = getattr(errno, name)
            assert _C.failure_name(number) == kind, name
            assert failure_of(StorageError(number, "a")) == failure_of(OSError(number, "a")) == kind
    assert failure_of(CorruptionError(errno.EIO, "a")) == "damage"
    assert failure_of(MemoryError()) == "passing"
    assert failure_of(KVSwapError("a")) == failure_of(ValueError("a")) == "permanent"


# A save under its own name, again and again.


@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_an_autosave_works_every_turn(place: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    (folder := tmp_path / "disk").mkdir()
    if place == "elsewhere":
        if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == folder.stat().st_dev:
            pytest.skip("there is no other file system")
        folder = Path("/dev/shm") / f"kvswap-{os.getpid()}"
        folder.mkdir()
    saved = folder / "chat.kvswap"
    try:
        with KVSwapCache(model, path=tmp_path, config=TIGHT) as cache:
            for turn in range(5):
                forward(model, prompt(1, 30, seed=turn)["input_ids"], cache)
                cache.save(saved, overwrite=True)
                _C.SavedCache(str(saved)).verify()
                with KVSwapCache.open(model, saved, path=tmp_path) as opened:
                    assert torch.equal(opened.token_ids, cache.token_ids)
                    with pytest.raises(StorageError, match="is open"):
                        cache.save(saved, overwrite=True)
        for turn in range(3):  # and goes on where it was left
            with KVSwapCache.open(model, saved, path=tmp_path) as cache:
                forward(model, prompt(1, 9, seed=turn)["input_ids"], cache)
                cache.save(saved, overwrite=True)
                cache.save(saved, overwrite=True)
                tokens = cache.get_seq_length()
            assert _C.SavedCache(str(saved)).tokens == tokens
        assert [each.name for each in folder.iterdir()] == ["chat.kvswap"]
    finally:
        _C.SavedCache.remove(str(saved))
        folder.rmdir()


def test_what_another_process_has_open_is_not_replaced(tmp_path: Path) -> None:
    """Also where the saver's own file stands there."""
    model, ids = tiny_model("llama"), prompt(1, 30)["input_ids"]
    saved, out = tmp_path / "a", torch.cat([ids, ids[:, :1]], 1)
    with KVSwapCache(model, path=tmp_path, config=TIGHT) as cache, OtherProcess() as other:
        forward(model, ids, cache)
        cache.save(saved)
        with pytest.raises(StorageError, match="is open"):
            _C.SavedCache.remove(str(saved))
        expected = goes_on(model, cache, out)
        other.send("llama", saved, tmp_path, out, waits=True)
        assert other.receive() == "open"
        with pytest.raises(StorageError, match="is open"):
            cache.save(saved, overwrite=True)
        other.go()
        assert other.receive()["tokens"] == expected
        # The saver's own lock is back: others may not take away what it stands on.
        with pytest.raises(StorageError, match="is open"):
            _C.SavedCache.remove(str(saved))
        cache.save(saved, overwrite=True)
        _C.SavedCache.remove(str(saved))


# Places that are no saved cache, any more or yet.


def test_a_pipe_in_the_place_of_records_stops_nobody(saved: Path) -> None:
    """In the main thread's place: a call that waited for a writer would never come back."""

    def with_pipe() -> None:
        (saved / "records.bin").unlink()
        os.mkfifo(saved / "records.bin")

    outcomes = []

    def use() -> None:
        model = tiny_model("llama")
        outcomes.append(is_in_use(saved))
        cache, _ = filled(model, saved.parent, SYNC)
        with cache:
            cache.save(saved, overwrite=True)
        outcomes.append(_C.SavedCache(str(saved)).tokens)
        with_pipe()
        _C.SavedCache.remove(str(saved))
        outcomes.append(saved.exists())

    with_pipe()
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert outcomes == [False, 51, False]


def test_records_that_cannot_be_looked_at_are_not_replaced(
    saved: Path, kernel: FaultyKernel
) -> None:
    """Whether somebody uses them is not known then."""
    cache, _ = filled(tiny_model("llama"), saved.parent, SYNC)
    with cache:
        kernel.arm("open", lasts=True, error=errno.EMFILE, name="records.bin")
        for use in (lambda: cache.save(saved, overwrite=True),
                    lambda: _C.SavedCache.remove(str(saved))):  # fmt: skip
            with pytest.raises(StorageError) as raised:
                use()
            assert raised.value.errno == errno.EMFILE
        kernel.heal()
        _C.SavedCache(str(saved)).verify()


def test_a_removal_beside_a_replacement(tmp_path: Path) -> None:
    """Two that save under one name, one that removes: whole, or not there; and no other error."""
    saved, ends, wrong = tmp_path / "a", time.monotonic() + SECONDS, []

    def removes() -> None:
        while time.monotonic() < ends:
            try:
                _C.SavedCache.remove(str(saved))
            except StorageError as error:
                if error.errno not in (errno.ENOENT, errno.EBUSY):
                    wrong.append(error)
            time.sleep(random.uniform(0, 0.002))

    program = f"""
        import sys, time
        from kvswap_torch.errors import StorageError
        from tests.python.saved_conversation import filled
        from tests.python.tiny_models import tiny_model
        cache, _ = filled(tiny_model("llama"), {str(tmp_path)!r})
        saves, end = 0, time.monotonic() + {SECONDS - 1}
        while time.monotonic() < end or saves == 0:
            try:
                cache.save({str(saved)!r}, overwrite=True)
                saves += 1
            except StorageError as error:
                assert error.errno == 16, error
        print(saves)
    """
    savers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for _ in range(2)
    ]  # fmt: skip
    removing = threading.Thread(target=removes)
    while not saved.exists() and all(each.poll() is None for each in savers):
        time.sleep(0.01)
    ends = time.monotonic() + SECONDS
    removing.start()
    for each in savers:
        out, err = each.communicate()
        assert each.returncode == 0, err
        assert int(out) > 0
    removing.join()
    assert wrong == []
    if saved.exists():
        _C.SavedCache(str(saved)).verify()
    assert {path.name for path in tmp_path.iterdir()} <= {"a"}


def test_a_full_disk_says_which(saved: Path) -> None:
    cache, _ = filled(tiny_model("llama"), saved.parent, SYNC)
    before = sorted(saved.parent.iterdir())
    failures = 0
    with cache:
        for step in range(0, 60, 3):
            try:
                with striking(step, errno.ENOSPC) as has_struck:
                    cache.save(saved.parent / "b")
            except StorageError as raised:
                failures += 1
                assert raised.errno == errno.ENOSPC and failure_of(raised) == "passing"
                assert raised.filename == str(saved.parent / "b")
                assert "free space" in str(raised)
                assert sorted(saved.parent.iterdir()) == before
            else:
                _C.SavedCache.remove(str(saved.parent / "b"))
                if not has_struck():
                    break
    assert failures > 1
