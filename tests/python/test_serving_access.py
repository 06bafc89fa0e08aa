"""Who may ask a server, and what it may be called; limits that follow from model and process."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvswap_torch.cli.serve import read_keys, readers_of
from kvswap_torch.errors import ConfigError
from kvswap_torch.hf.serving.access import Access
from kvswap_torch.hf.serving.limits import Limits, connections_of_process
from kvswap_torch.hf.serving.refusal import RefusedError, shown


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost", True), ("localhost:8000", True), ("LOCALHOST", True), ("[::1]:80", True),
        ("127.0.0.1", True), ("", False), ("evil.example", False), ("[::1].evil", False),
        ("localhost:80@evil", False), ("localhost.evil", False), ("localhost:", False),
        ("[::1]:80:80", False), ("evil localhost", False), ("localhost\t", False), ("::1", False),
    ],
)  # fmt: skip
def test_a_host_is_exact(host: str, is_ours: bool) -> None:
    access = Access((), ("localhost", "127.0.0.1", "[::1]"), False)
    headers = {b"host": host.encode()}
    if is_ours:
        access.check_host(headers)
    else:
        with pytest.raises(RefusedError) as caught:
            access.check_host(headers)
        assert caught.value.status == 403 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("given", "is_one"),
    [
        ("Bearer one", True), ("bearer one", True), ("BEARER  two", True), ("one", False),
        ("Basic one", False), ("Bearer", False), ("Bearer ", False), ("Bearer one two", False),
        ("Bearer ONE", False), ("Bearer on", False), ("", False),
    ],
)  # fmt: skip
def test_a_key_is_exact(given: str, is_one: bool) -> None:
    access = Access(("one", "two"), (), False)
    headers = {b"authorization": given.encode()}
    if is_one:
        assert access.owner(headers).startswith("key-")
        assert Access(("one", "two"), (), True).owner(headers) == ""
    else:
        with pytest.raises(RefusedError) as caught:
            access.owner(headers)
        assert caught.value.status == 401
    assert access.owner({b"authorization": b"Bearer one"}) != access.owner(
        {b"authorization": b"Bearer two"}
    )


def test_too_few_descriptors_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, right in ((1024, 512), (256, 128), (resource.RLIM_INFINITY, 512)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connections_of_process() == right
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    with pytest.raises(ConfigError, match=r"136 open files \(ulimit -n\), got 100"):
        connections_of_process()


def test_the_largest_body_follows_from_the_context() -> None:
    sizes = [Limits(context, 1.0).body_bytes for context in (16, 2048, 131_072, 1 << 30)]
    assert sizes == sorted(sizes) and sizes[0] >= 256 << 10 and sizes[-1] == 64 << 20
    assert sizes[2] > 131_072 * 6 * 4, "of tokens of four bytes, all escaped"


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbf# of the team\r\n\none\r\n  two # of Ann\n#three\nf#ur\none\n")
    assert read_keys(path) == ("one", "two", "f#ur")
    path.chmod(0o644)
    assert "chmod go= it" in readers_of(path)
    path.chmod(0o600)
    assert readers_of(path) == ""
    for text, told in (
        (b"# none\n\n", "must have a key"),
        (b"one\ntwo three\n", "line 2 of .* must be one key of printable ASCII"),
        ("schl\u00fcssel\n".encode(), "line 1"),
        (b"a\x07b\n", "line 1"),
        (b"\xff\n", "must be a text file"),
        (b"k" * (2 << 20), "must have at most"),
    ):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=told) as caught:
            read_keys(path)
        assert "two three" not in str(caught.value) and str(caught.value).isprintable()


def test_what_came_is_shown_short_and_printable() -> None:
    for value in ("\x1b[31m" * 1000, ["x"] * 1000, {"a": 1}, 1e300, 10**200, None, True, "\ud800"):
        assert len(shown(value)) < 100 and shown(value).isprintable()
    assert shown("gpt") == "'gpt'"
