"""What a cache records of its steps, over every way of reading, and what can be asked of it."""

from __future__ import annotations

import json
import sys

import pytest

from kvswap_torch import BudgetError, ConfigError, KVSwapCache
from kvswap_torch.hf import session as session_module
from kvswap_torch.timeline import CALLER, READS, SPANS, WRITES, Timeline
from tests.python.tiny_models import TIGHT, greedy, has_native, host_device_options, prompt

pytestmark = pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")

BACK_ENDS = {
    "sync": {"reader": "sync"},
    "threads": {"reader": "threads"},
    "uring": {"reader": "uring"},
    "modelled device": {"device_model": "nvme"},
    "host device": {"device": "host"},
}
TOKENS = 12


@pytest.fixture(scope="module", params=BACK_ENDS)
def recorded(request, llama, tmp_path_factory) -> KVSwapCache:
    """A cache that has decoded, with its timeline."""
    changes = dict(BACK_ENDS[request.param])
    with pytest.MonkeyPatch.context() as patch:
        if changes.pop("device", None):
            patch.setattr(session_module, "cache_options", host_device_options)
        config = TIGHT.__class__(**{**vars(TIGHT), **changes})
        folder = tmp_path_factory.mktemp("timeline")
        with KVSwapCache(llama, folder, config, timeline_spans=SPANS) as cache:
            greedy(llama, prompt(1, 40), cache, tokens=TOKENS)
            yield cache


@pytest.fixture(scope="module")
def timeline(recorded) -> Timeline:
    return recorded.stats(timeline=True).timeline


def test_trace_has_what_the_format_requires(timeline):
    events = timeline.trace["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert names == {CALLER: "model and engine", READS: "reads", WRITES: "writes"}
    open_events = {}
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= set(event)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0 and event["cat"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "b":
            assert event["id"] not in open_events
            open_events[event["id"]] = event
        else:
            assert event["ph"] == "e"
            begun = open_events.pop(event["id"])
            assert (begun["cat"], begun["name"]) == (event["cat"], event["name"])
            assert begun["ts"] <= event["ts"]
    assert not open_events


def test_spans_of_the_caller_nest_and_leave_no_gap(timeline):
    ends = []
    covered = None
    for span in timeline.spans:
        if span.track != CALLER:
            continue
        while ends and ends[-1] <= span.begin_ns:
            ends.pop()
        if ends:
            assert span.end_ns <= ends[-1], span
        else:
            assert covered in (None, span.begin_ns), span
        covered = max(covered or 0, span.end_ns)
        ends.append(span.end_ns)


def test_every_step_has_all_kinds(timeline):
    steps = timeline.steps()
    assert len(steps) == TOKENS - 2  # the first token is the prefill's, the last has no successor
    for step in steps:
        names = [span.name for span in step]
        assert names.count("append") == names.count("attend") == 3
        assert {"predict", "select", "plan", "model"} <= set(names)
    names = {span.name for span in timeline.spans}
    assert {"submit", "wait", "land", "seal", "read", "fetch", "write", "attend exactly"} <= names


def test_totals_are_the_counters(recorded):
    stats = recorded.stats(timeline=True)
    totals = {}
    for span in stats.timeline.spans:
        totals[span.name] = totals.get(span.name, 0) + 1e-9 * (span.end_ns - span.begin_ns)
    for name in ("select", "plan", "attend", "append"):
        assert totals[name] == pytest.approx(stats.counters[f"{name}_seconds"], abs=1e-8)
    assert totals["wait"] == pytest.approx(stats.wait_seconds, abs=1e-8)
    reads = sum(span.bytes for span in stats.timeline.spans if span.name == "read")
    assert reads == stats.bytes_read > 0


def test_own_times_add_up(timeline):
    caller = [span for span in timeline.spans if span.track == CALLER]
    wall = 1e-9 * (max(span.end_ns for span in caller) - caller[0].begin_ns)
    of_caller = {span.name for span in caller}
    own = timeline.seconds()
    assert sum(own[name] for name in of_caller) == pytest.approx(wall)
    assert timeline.per_step()["total"] > 0
    assert "reads hidden" in str(timeline)


def test_fetches_hold_their_reads(timeline):
    fetches = [span for span in timeline.spans if span.name == "fetch"]
    for read in (span for span in timeline.spans if span.name == "read"):
        assert read.layer in (0, 1, 2)
        assert any(
            fetch.begin_ns <= read.begin_ns and read.end_ns <= fetch.end_ns
            and fetch.layer == read.layer
            for fetch in fetches
        )  # fmt: skip


def test_overlap_of_a_known_timeline():
    def event(name, begin, end, tid=CALLER):
        return {"ph": "X", "name": name, "tid": tid, "pid": 1, "ts": begin, "dur": end - begin,
                "args": {"layer": 0}}  # fmt: skip

    def overlap(*events):
        return Timeline({"traceEvents": list(events)}).overlap()

    assert overlap(event("attend", 0, 10)) is None
    reads = (event("read", 0, 6, READS), event("read", 4, 10, READS))
    assert overlap(*reads, event("attend", 0, 10)) == 1
    assert overlap(*reads, event("wait", 5, 12)) == 0.5
    assert overlap(*reads, event("submit", 0, 1), event("wait", 9, 12)) == pytest.approx(0.8)


def test_synchronous_reads_hide_nothing(llama, tmp_path):
    config = TIGHT.__class__(**{**vars(TIGHT), "reader": "sync"})
    with KVSwapCache(llama, tmp_path, config, timeline_spans=SPANS) as cache:
        greedy(llama, prompt(1, 40), cache)
        assert cache.stats(timeline=True).timeline.overlap() == 0


def test_saved_and_loaded(timeline, tmp_path):
    path = timeline.save(tmp_path / "trace.json")
    assert json.loads(path.read_text())["otherData"]["spans_kept"] > 0
    assert Timeline.load(path).spans == timeline.spans


def test_figure_of_the_last_step(timeline, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    png = timeline.figure(tmp_path / "step.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="whole decoding step"):
        Timeline({"traceEvents": []}).figure(tmp_path / "none.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        timeline.figure(tmp_path / "step.png")


def test_only_the_newest_are_kept(llama, tmp_path):
    with KVSwapCache(llama, tmp_path, TIGHT, timeline_spans=50) as cache:
        greedy(llama, prompt(1, 40), cache)
        trace = cache.stats(timeline=True).timeline.trace
    assert trace["otherData"]["spans_kept"] == 50 < trace["otherData"]["spans_recorded"]


def test_nothing_is_recorded_unless_asked_for(llama, tmp_path):
    with KVSwapCache(llama, tmp_path, TIGHT) as cache:
        greedy(llama, prompt(1, 40), cache, tokens=3)
        assert cache.stats().timeline is None and cache.stats().ledger["timeline"] == 0
        with pytest.raises(ValueError, match=r"open it with KVSwapCache\(..., timeline_spans="):
            cache.stats(timeline=True)
        with pytest.raises(ValueError, match="timeline_spans 0"):
            cache.driver.session.timeline()


def test_its_memory_is_part_of_the_budget(llama, tmp_path):
    promised = {"kv_memory_bytes": 3 << 20, "max_context": 4096, "max_batch": 1}
    with KVSwapCache(llama, tmp_path, timeline_spans=4000, **promised) as cache:
        greedy(llama, prompt(1, 40), cache, tokens=3)
        stats = cache.stats(timeline=True)
        assert stats.ledger["timeline"] == 4000 * 40
        assert stats.resident_bytes_peak <= 3 << 20
        json.dumps(stats.as_dict())
    with pytest.raises(BudgetError):
        KVSwapCache(llama, tmp_path, timeline_spans=100_000, **promised)
    with pytest.raises(
        ConfigError, match="timeline_spans: must be an integer of at least 0, got -1"
    ):
        KVSwapCache(llama, tmp_path, timeline_spans=-1)
