"""What one client may take of a server: of its memory, its descriptors, its time."""

from __future__ import annotations

import http.client
import json
import resource
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvswap_torch.hf.serving import limits
from kvswap_torch.hf.serving.limits import Limits
from tests.python.serving_process import Served, ended_well, served_model
from tests.python.test_serving import send
from tests.python.tiny_models import EOS, has_native

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
MIB = 1 << 20
CONTEXT = 2048
BODY_MAX = Limits(CONTEXT, 1.0).body_bytes
KIND = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


parent = pytest.fixture(served_model, scope="module", name="parent")
served = pytest.fixture(ended_well, name="served")


def peak(served: Served) -> int:
    """Bytes that the process has held at most."""
    status = Path(f"/proc/{served._pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def ask(served: Served, prompt: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0} | fields
    status, told = send(served, "POST", "/v1/completions", body)
    return status, json.loads(told)


def connect(served: Served) -> socket.socket:
    host, port = served.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def reply(client: socket.socket) -> bytes:
    """A whole reply: its head and its body may come in pieces."""
    told = b""
    while b"\r\n\r\n" not in told:
        told += client.recv(65536)
    head, _, body = told.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split()[0])
    while len(body) < length:
        body += client.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def busy(served: Served) -> Iterator[None]:
    """While a long answer is given."""
    host, port = served.address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    body = {"prompt": "busy" * 10, "max_tokens": 2000, "temperature": 0, "stream": True}
    body["logit_bias"] = {str(EOS): -100}
    kind = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), kind)
    while served.metrics()["kvswap_running"] == 0:
        time.sleep(0.02)
    try:
        yield
    finally:
        connection.sock.close()
        connection.close()


def test_bodies_take_memory_by_the_longest_context(served: Served, tmp_path: Path) -> None:
    """Words, brackets, numbers: as large as may be, or larger; none is read beyond."""
    served.start(store=str(tmp_path))
    base = ask(served, "hello")
    before = peak(served)
    most = BODY_MAX - 100
    for body in (
        b'{"prompt": "' + b"ab" * (most // 2) + b'"}',
        b'{"prompt": "a", "user": [' + b"[]," * (most // 3) + b"[]]}",
        b'{"prompt": "a", "user": [' + b"{}," * (most // 3) + b"{}]}",
        b'{"prompt": "a", "user": [' + b"1e5," * (most // 4) + b"1]}",
        b'{"prompt": "a", "model": "' + b"\\u0001" * (most // 6) + b'"}',
        b'{"prompt": "a", "stop": [1, "' + b"\\u0001" * (most // 6) + b'"]}',
        b'{"prompt": "' + b'\\"' * (most // 2) + b'"}',
    ):
        assert len(body) <= BODY_MAX
        status, told = send(served, "POST", "/v1/completions", body)
        assert status in (400, 404), (body[:40], status)
        assert len(told) < 1000
    assert peak(served) - before < 40 * MIB
    status, told = send(served, "POST", "/v1/completions", b" " * (BODY_MAX + 1))
    assert status == 413 and str(BODY_MAX) in told
    assert ask(served, "hello")[1]["choices"] == base[1]["choices"]
    refused = served.metrics()
    assert refused['kvswap_refusals_total{reason="values"}'] == 3
    assert refused['kvswap_refusals_total{reason="size"}'] == 1


@pytest.mark.parametrize("declared", [1 << 30, 1 << 62])
def test_a_body_that_says_that_it_is_too_large_is_not_read(
    served: Served, tmp_path: Path, declared: int
) -> None:
    served.start(store=str(tmp_path))
    client = connect(served)
    client.sendall(f"{KIND}Content-Length: {declared}\r\n\r\n".encode())
    assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
    before = peak(served)
    with pytest.raises(OSError):
        for _ in range(1 << 10):  # 1 GiB, if it were taken
            client.sendall(bytes(MIB))
    assert peak(served) - before < 8 * MIB
    client.close()


def test_bodies_that_wait_have_one_place_together(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path), limits={"BODIES_BYTES": BODY_MAX})
    whole = json.dumps({"prompt": "ab", "max_tokens": 1, "user": "u" * (BODY_MAX * 2 // 3)})
    with busy(served):
        first = connect(served)
        first.sendall(f"{KIND}Content-Length: {len(whole)}\r\n\r\n{whole}".encode())
        while served.metrics()["kvswap_waiting"] == 0:
            time.sleep(0.02)
        status, told = send(served, "POST", "/v1/completions", whole.encode())
        assert status == 503 and "memory there is for bodies" in told
    assert first.recv(65536).startswith(b"HTTP/1.1 200 ")
    first.close()
    status, _ = send(served, "POST", "/v1/completions", whole.encode())
    assert status == 200


def test_who_would_be_sent_away_is_not_read(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path), queue=0)
    with busy(served):
        client = connect(served)
        client.sendall(f"{KIND}Content-Length: 1000\r\n\r\n".encode())
        told = reply(client)  # before there is a body
        assert told.startswith(b"HTTP/1.1 503 ") and b"--queue" in told
        client.close()
        reasons = json.loads(send(served, "GET", "/ready", None)[1])["reasons"]
        assert reasons == ["as many requests wait as may (--queue)"]
    ready = send(served, "GET", "/ready", None)
    while ready[0] == 503:
        ready = send(served, "GET", "/ready", None)
    assert json.loads(ready[1]) == {"status": "ready", "model": "tiny", "reasons": []}


def test_clients_that_say_nothing_make_room(served: Served, tmp_path: Path) -> None:
    pid = served.start(store=str(tmp_path), limits={"HEAD_SECONDS": 600.0}, files=256)["pid"]
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == 256
    base = ask(served, "hello")
    silent = []
    for _ in range(300):
        client = connect(served)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-a: ")
        silent.append(client)
    assert send(served, "GET", "/health", None)[0] == 200
    told = served.metrics()
    assert told["kvswap_connections"] <= 128 and told["kvswap_open_files"] < 256
    assert ask(served, "hello")[1]["choices"] == base[1]["choices"]
    assert told["kvswap_save_failures_total"] == 0
    for client in silent:
        client.close()


def test_where_all_have_a_request_one_more_is_sent_away(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path), files=limits.FILES + limits.BACKLOG + 8)
    with busy(served):
        waiting = []
        body = b'{"prompt": "ab", "max_tokens": 1}'
        for _ in range(7):
            client = connect(served)
            client.sendall(
                f"{KIND}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            )
            assert client.recv(65536).startswith(b"HTTP/1.1 100 "), "it is a request now"
            client.sendall(body)
            waiting.append(client)
        client = connect(served)
        told = client.recv(65536)
        client.close()
        assert b"as many clients are connected" in told
        assert told.startswith(b"HTTP/1.1 503 ")
    for client in waiting:
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        client.close()


def test_a_head_and_a_body_must_come_in_time(served: Served, tmp_path: Path) -> None:
    given = {"HEAD_SECONDS": 0.5, "BODY_SECONDS": 1.0}
    served.start(store=str(tmp_path), limits=given)
    half, dripping = connect(served), connect(served)
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
    dripping.sendall(f"{KIND}Content-Length: 1000\r\n\r\n".encode())
    assert half.recv(65536) == b"", "closed"
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            try:
                dripping.sendall(b" ")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    told = reply(dripping)
    stop.set()
    thread.join()
    assert told.startswith(b"HTTP/1.1 408 ") and b"within 1 s" in told
    half.close()
    dripping.close()


def test_requests_that_come_at_once_on_one_connection_are_all_answered(
    served: Served, tmp_path: Path
) -> None:
    """The time for a head is not that of an answer."""
    served.start(store=str(tmp_path), limits={"HEAD_SECONDS": 0.2})
    given = {"prompt": "xyz" * 9, "max_tokens": 150, "temperature": 0}
    body = json.dumps(given | {"logit_bias": {str(EOS): -100}})
    client = connect(served)
    client.sendall(f"{KIND}Content-Length: {len(body)}\r\n\r\n{body}".encode() * 2)
    told = b""
    while told.count(b'"finish_reason":"length"') < 2:
        more = client.recv(65536)
        assert more, told
        told += more
    assert client.recv(65536) == b"", "closed when it says nothing more"
    client.close()


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_answer_has_a_longest_time(served: Served, tmp_path: Path, is_streamed: bool) -> None:
    served.start(store=str(tmp_path), answer_seconds=1.5)
    body = {"prompt": "xyz" * 10, "max_tokens": 2000, "temperature": 0, "stream": is_streamed}
    body["logit_bias"] = {str(EOS): -100}
    status, told = send(served, "POST", "/v1/completions", body)
    assert status == 200 and '"finish_reason": "length"' in told.replace('":"', '": "')
    assert served.metrics()["kvswap_generated_tokens_total"] < 2000


def test_a_prompt_that_takes_longer_is_kept_and_goes_on(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path), answer_seconds=1e-9, prefill_chunk=64)
    status, told = ask(served, "xyz" * 100)
    assert status == 503 and "ask again" in told["error"]["message"]
    assert served.metrics()['kvswap_refusals_total{reason="late"}'] == 1


def test_a_client_that_leaves_ends_its_work(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path))
    with busy(served):
        pass
    while served.metrics()["kvswap_running"]:
        time.sleep(0.02)
    assert served.metrics()["kvswap_generated_tokens_total"] < 1900
    assert served.metrics()["kvswap_gone_total"] == 1


def test_a_store_that_takes_no_file_is_not_ready(served: Served, tmp_path: Path) -> None:
    store = tmp_path / "store"
    served.start(store=str(store))
    assert send(served, "GET", "/ready", None)[0] == 200
    shutil.rmtree(store)
    status, told = 200, ""
    while status == 200:  # one look a second
        status, told = send(served, "GET", "/ready", None)
    reasons = json.loads(told)["reasons"]
    assert status == 503 and "the store: No such file or directory" in reasons
    assert str(tmp_path) not in told
    assert send(served, "GET", "/health", None)[0] == 200, "alive"
    store.mkdir()
    while status == 503:
        status, _ = send(served, "GET", "/ready", None)


def test_a_signal_ends_a_long_answer(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path))
    with busy(served):
        served.signal(signal.SIGTERM)
        assert served.wait() == 0


# Seeds, usage, penalties: what clients use.


def test_what_clients_use(served: Served, tmp_path: Path) -> None:
    served.start(store=str(tmp_path))

    def text(**fields: Any) -> str:
        status, told = ask(served, "xyz" * 20, max_tokens=20, **fields)
        assert status == 200, told
        return told["choices"][0]["text"]

    hot = {"temperature": 2.0}
    seeded = text(seed=7, **hot)
    unseeded = {text(**hot) for _ in range(4)}
    assert len(unseeded) == 4, "a seed ends with its request"
    assert text(seed=7, **hot) == seeded
    plain = text()
    penalized = text(frequency_penalty=2.0)
    assert max(map(penalized.count, penalized)) <= max(map(plain.count, plain))
    assert penalized != plain
    banned = plain[0]
    assert banned not in text(logit_bias={str(ord(banned) - ord("!")): -100})
    assert text(top_k=1, seed=3, **hot) == plain
    ids = [ord(each) - ord("!") for each in "xyz" * 20]
    status, told = ask(served, ids, max_tokens=20)
    assert told["choices"][0]["text"] == plain

    body = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "stream": True, "user": "me"}
    _, told = send(served, "POST", "/v1/completions", body)
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    assert events[-1]["choices"] and events[-1]["usage"]["completion_tokens"] == 2
    body["stream_options"] = {"include_usage": True}
    _, told = send(served, "POST", "/v1/completions", body)
    events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 2
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert all(each.get("usage") is None for each in events[:-1])

    body = {"input": "hello", "max_output_tokens": 2, "temperature": 0}
    _, told = send(served, "POST", "/v1/responses", body)
    assert json.loads(told)["status"] == "incomplete"
    assert json.loads(told)["incomplete_details"] == {"reason": "max_output_tokens"}
    _, told = send(served, "POST", "/v1/responses", body | {"stream": True})
    last = json.loads(told.strip().splitlines()[-1].removeprefix("data: "))
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")

    status, told = send(served, "GET", "/v1/models/tiny", None)
    assert status == 200 and json.loads(told)["id"] == "tiny"
    assert send(served, "GET", "/v1/models/other", None)[0] == 404
    assert send(served, "GET", "/v1/models/%1b]0;x", None)[0] == 404


def test_keys_share_no_caches_unless_they_are_to(served: Served, tmp_path: Path) -> None:
    book = "abcdefgh" * 10

    def cached(key: str) -> int:
        headers = {"Authorization": f"bearer {key}"}
        body = {"prompt": book + key, "max_tokens": 1, "temperature": 0}
        _, told = send(served, "POST", "/v1/completions", body, headers)
        return json.loads(told)["usage"]["prompt_tokens_details"]["cached_tokens"]

    served.start(store=str(tmp_path / "own"), keys=["one", "two"])
    assert [cached("one"), cached("two"), cached("one")] == [0, 0, 82]
    assert served.end() == 0
    served.start(store=str(tmp_path / "shared"), keys=["one", "two"], shares_store=True)
    assert [cached("one"), cached("two")] == [0, 80]
