"""What an operator sees of a server: its log, its metrics, and what it finds while it is idle."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kvswap_torch.cli.serve_log import JsonLines
from kvswap_torch.hf.serving.counts import COUNTERS, GAUGES, HISTOGRAMS, Counts
from tests.python.serving_process import Served, ended_well, served_model
from tests.python.test_serving import document, send
from tests.python.test_serving_front import Desk
from tests.python.tiny_models import has_native

pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
]
parent = pytest.fixture(served_model, scope="module", name="parent")
served = pytest.fixture(ended_well, name="served")


def ask(served: Served, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0} | fields
    status, told = send(served, "POST", "/v1/completions", body)
    assert status == 200, told
    return json.loads(told)


# The log.


def test_a_line_for_each_request_and_one_a_minute_for_the_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    with caplog.at_level(logging.INFO, "kvswap_torch.hf.serving.request_log"):
        for _ in range(3):
            assert desk.ask("POST", "/v1/completions", b'{"prompt": "ab"}')[0] == 200
        for _ in range(5):
            assert desk.ask("POST", "/v1/completions", b"{")[0] == 400
        assert desk.ask("GET", "/x\x1b[2J", b"")[0] == 404
    requests = [record.request for record in caplog.records]
    assert [each["status"] for each in requests] == [200, 200, 200, 400, 404]
    assert set(requests[0]) >= {"id", "seconds", "waited_seconds", "prompt_tokens", "cached_tokens"}
    assert requests[3]["reason"] == "request" and "\x1b" not in caplog.text


def test_a_log_of_json_is_a_line_each() -> None:
    record = logging.LogRecord("a.b", logging.INFO, "x.py", 1, "said %s", ('"\n',), None)
    record.request = {"status": 200}
    line = JsonLines().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"]) == ("info", "a.b", 'said "\n')
    assert told["request"] == {"status": 200}
    assert time.strptime(told["time"][:19], "%Y-%m-%dT%H:%M:%S")


def test_the_end_is_said(served: Served, tmp_path: Path) -> None:
    log = tmp_path / "log"
    served.start(store=str(tmp_path / "store"), log=str(log))
    ask(served, document(1))
    assert served.end(signal.SIGTERM) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["request"]["generated_tokens"] for line in lines if "request" in line] == [3]
    assert lines[-1]["message"].startswith("serve: ended after 0 h 0 min")
    assert "1 requests, 0 refused, 3 tokens of answers, 1 caches saved" in lines[-1]["message"]


# Metrics.


def test_metrics_are_as_prometheus_reads_them(served: Served, tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    served.start(store=str(tmp_path))
    ask(served, document(1), max_tokens=5)
    send(served, "POST", "/v1/completions", {"prompt": "x", "n": 99})
    found = {each.name: each for each in text_string_to_metric_families(served.get("/metrics"))}
    assert {name.removeprefix("kvswap_") for name in found} == {*COUNTERS, *GAUGES, *HISTOGRAMS}
    samples = {s.name: s.value for each in found.values() for s in each.samples if not s.labels}
    assert samples["kvswap_first_token_seconds_count"] == 1
    assert samples["kvswap_token_seconds_count"] == 4
    assert samples["kvswap_request_seconds_count"] == 1
    assert 0 < samples["kvswap_first_token_seconds_sum"] <= samples["kvswap_request_seconds_sum"]
    assert samples["kvswap_resident_bytes"] > 1 << 20
    reasons = {s.labels["reason"]: s.value for s in found["kvswap_refusals"].samples}
    assert reasons == {"request": 1}


def test_a_gauge_with_a_label_has_no_value_that_is_past() -> None:
    counts = Counts()
    counts.set_each("store_left_out", {"EIO": 2, "damaged": 1})
    counts.set_each("store_left_out", {"EIO": 1})
    assert 'kvswap_store_left_out{reason="EIO"} 1.0' in counts.text()
    assert 'reason="damaged"' not in counts.text() and counts["store_left_out"] == 1


# At idle.


def test_saved_caches_are_read_again_at_idle_and_a_damaged_one_is_moved(
    served: Served, tmp_path: Path
) -> None:
    """The second of two, each in its turn; its document is read anew."""
    served.start(store=str(tmp_path))
    for seed in (1, 2):
        ask(served, document(seed))
    assert served.end() == 0
    first, second = sorted(tmp_path.glob("*.kvswap"))
    data = bytearray((second / "records.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (second / "records.bin").write_bytes(data)
    served.start(store=str(tmp_path), limits={"CHECK_SECONDS": 0.05})
    moved = second.with_name(second.name + ".damaged")
    while not moved.exists() or 'found="damaged"' not in served.get("/metrics"):
        time.sleep(0.05)
    assert first.exists() and not second.exists()
    assert served.metrics()["kvswap_store_unusable"] == 0
    cached = [
        ask(served, document(seed) + "x")["usage"]["prompt_tokens_details"]["cached_tokens"]
        for seed in (1, 2)
    ]
    assert sorted(cached) == [0, 80]
    shutil.rmtree(moved)


def test_who_hears_all_of_a_reply_has_not_hung_up(served: Served, tmp_path: Path) -> None:
    log = tmp_path / "log"
    served.start(store=str(tmp_path / "store"), log=str(log))
    ask(served, document(1))
    ask(served, document(1), stream=False, n=2)
    assert served.end() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["request"]["hung_up"] for each in lines if "request" in each] == [False, False]
