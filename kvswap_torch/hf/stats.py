"""What `KVSwapCache.stats()` reports."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvswap_torch.memory_size import format_bytes
from kvswap_torch.process_memory import ProcessMemory
from kvswap_torch.timeline import SPANS, Timeline

if TYPE_CHECKING:
    from kvswap_torch.hf.driver import SessionDriver


@dataclass(frozen=True)
class CacheStats:
    """Counts since the cache was opened; prints as a table, as plain lines where rich is missing.

    With a budget and no `max_context` they begin with the settings of a text: anew after `reset`.
    Where the budget was divided anew they go on, except what audits and the timeline have seen.

    Parameters
    ----------
    preset
        That the cache was opened with; else empty.
    tokens, batch
        Tokens of each sequence, padding included, and sequences in the cache now.
    decoded
        Decoding steps: short forward passes, counted once for each sequence.
    bytes_read, bytes_written
        From and to the disk.
    bytes_read_per_token, bytes_written_per_token
        Selected groups read per decoding step of a sequence, those that were prefetched too;
        written per token stored.
    missed_mass, missed_mass_error
        With `SwapConfig.audit_every`: the estimated share of attention that went to groups that
        were not selected, mean over heads and layers, and half of its 95 % interval; both by layer
        in `counters`. None before anything was looked at.
    missed_mass_excess
        With `SwapConfig.missed_mass_max`: by how much the worst layer that has all its pages misses
        more than it may; 0 where none does. Groups that layers select now are in `counters`.
    tokens_kept
        With `SwapConfig.keeper`: tokens that stay in a layer for what they were paid, on average
        over layers and sequences (and KV heads, with ``heads="each"``); how often they were chosen
        anew, how long that took and what was read for it, in `counters` (`turns`, `turn_seconds`,
        `turn_bytes_read`); beside them `groups_recalled`, selected groups that hold tokens which
        are not kept, where not everything fits; `tokens_kept_fp8`, how many of those that stay are
        in e4m3; and, where layers differ in how many they keep, each layer's as `tokens_kept_0` and
        so on. None without.
    tokens_dropped
        With ``rows="none"`` and a keeper: tokens that a layer does not attend any more, on average
        as `tokens_kept`; with a path they stay on disk, else they are gone. None without.
    hit_rate
        Share of selected groups found in memory; None before anything was selected.
    groups_per_step
        Groups selected per layer, sequence and step; with ``heads="each"`` those of all KV heads.
    prefetch_hits, prefetch_wasted
        With ``look_ahead="verify"``: groups that a prediction read before their layer chose them,
        and groups read so that it did not choose; in `counters` those of each layer
        (`prefetch_hits_1`), prefetches that failed (`prefetch_dropped`), and whether a layer
        predicts now (`predicts_1`). None where nothing is prefetched so.
    wait_seconds, hidden_seconds
        Read time that layers waited for, and read time overlapped with computing.
    hidden_share
        Of both together, the share that was overlapped; None before anything was read.
    write_wait_seconds
        Time that prefill waited for a free write buffer: the disk writes more slowly than the model
        reads.
    resident_bytes, resident_bytes_peak, ledger
        Memory in use, the most so far, and what it is used for. `kv_memory_bytes` bounds it, with
        `shared_bytes`, and the most is of both together.
    divided_for, divided_anew
        With a budget: tokens of a text that it is divided for now, `max_context` or what was
        guessed, None where that is not known; and how often it was divided anew since the text
        began, because it had outgrown that.
    shared_bytes
        Summaries in use here that another cache counts: one that this is a fork of, or a fork of
        it. When that one is closed, the next that shares them counts them.
    process
        Memory of the whole process, model included: `kvswap_torch.ProcessMemory`.
    device, device_bytes, pinned_bytes
        Where pages and summaries are; what is allocated there, and host memory locked for copies
        to and from it. Both are 0 on the CPU, and part of `resident_bytes`.
    copied_bytes, copy_bytes_per_second
        Records copied to the device, and how fast, scatter to their pages included.
    device_wait_seconds, choice_wait_seconds
        Time that the device's attention waited for records, and the host for its selection.
    kv_bytes_full, kv_bytes_on_disk
        What a cache in memory would take for the same tokens, and what is on disk: 0 without a
        path.
    ranks
        Which part of the model this process has, where several run one model; else empty. All
        numbers are this process's own.
    reader, io_mode, fallbacks
        How the disk is read, and what was fallen back from, with the reason.
    projection, predictor
        Where the projections come from, and how the next layer's query is predicted.
    probe
        Of an opened saved cache: how its first keys and the model's compared, or why not.
    estimate_seconds
        Time spent on estimating projections.
    weights_bytes_read, weights_wait_seconds
        Of a model whose layers are on disk (``--weights-memory``, `load_on_disk`): bytes of weights
        read since it was loaded, and seconds that its passes waited for them. None where all
        weights are in memory.
    counters
        The session's own counters, by name. `read_calls` is how often the operating system was
        called for `reads`: io_uring takes several with one call, and waits with others.
    timeline
        Of ``stats(timeline=True)`` alone: what each step's time was spent on.
    """

    preset: str
    tokens: int
    batch: int
    decoded: int
    bytes_read: int
    bytes_written: int
    bytes_read_per_token: float
    bytes_written_per_token: float
    missed_mass: float | None
    missed_mass_error: float | None
    missed_mass_excess: float | None
    tokens_kept: float | None
    tokens_dropped: float | None
    hit_rate: float | None
    groups_per_step: float
    prefetch_hits: int | None
    prefetch_wasted: int | None
    wait_seconds: float
    hidden_seconds: float
    hidden_share: float | None
    write_wait_seconds: float
    resident_bytes: int
    resident_bytes_peak: int
    divided_for: int | None
    divided_anew: int
    shared_bytes: int
    ledger: Mapping[str, int]
    process: ProcessMemory
    device: str
    device_bytes: int
    pinned_bytes: int
    copied_bytes: int
    copy_bytes_per_second: float
    device_wait_seconds: float
    choice_wait_seconds: float
    kv_bytes_full: int
    kv_bytes_on_disk: int
    ranks: str
    reader: str
    io_mode: str
    fallbacks: str
    projection: str
    predictor: str
    probe: str
    estimate_seconds: float
    weights_bytes_read: int | None
    weights_wait_seconds: float | None
    counters: Mapping[str, float]
    timeline: Timeline | None = None

    def __getitem__(self, name: str) -> Any:
        return self.as_dict()[name]

    def as_dict(self) -> dict[str, Any]:
        """All but the timeline as plain numbers, strings and dictionaries, fit for JSON."""
        plain = asdict(replace(self, timeline=None))
        del plain["timeline"]
        return plain

    def __str__(self) -> str:
        rows = _rows(self)
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            width = max(len(name) for name, _ in rows)
            return "\n".join(["KVSwapCache", *(f"{name:{width}}  {value}" for name, value in rows)])
        table = Table(title="KVSwapCache", show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        text = io.StringIO()
        Console(file=text, width=100).print(table)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """The same table, for notebooks."""
        return _html(_rows(self))


def _html(rows: list[tuple[str, str]]) -> str:
    cells = (
        f"<tr><th style='text-align:left'>{html.escape(name.strip())}</th>"
        f"<td>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table><caption>KVSwapCache</caption>{''.join(cells)}</table>"


def collect(driver: SessionDriver, process: ProcessMemory, timeline: bool = False) -> CacheStats:
    """Reads the session's counters, and its timeline where that is asked for."""
    if timeline and not driver.timeline_spans:
        raise ValueError(
            "stats: timeline=True must be asked of a cache that records one, got timeline_spans=0; "
            f"open it with KVSwapCache(..., timeline_spans={SPANS})"
        )
    session, shape = driver.session, driver.parts.shape
    counters, facts = driver.redivision.counters(), session.facts()
    ledger = driver.redivision.ledger()
    beside = driver.bytes_beside()
    resident, peak = (ledger.pop(name) + sum(beside.values()) for name in ("total", "peak"))
    shared = ledger.pop("shared", 0)
    ledger.pop("limit", None)
    ledger |= beside
    tokens, batch = driver.positions(), session.batch()
    attended, loaded = counters["groups_attended"], counters["groups_loaded"]
    again = counters.get("groups_read_again", 0) + counters.get("groups_prefetched", 0)
    decoded = counters["sequences"] / shape.layers
    each = 1 / max(1.0, decoded)
    written = counters["bytes_written"]
    return CacheStats(
        preset=driver.preset,
        tokens=tokens,
        batch=batch,
        decoded=int(decoded),
        bytes_read=int(counters["bytes_read"]),
        bytes_written=int(written),
        bytes_read_per_token=(loaded + again) * counters["record_bytes"] * each,
        bytes_written_per_token=written / max(1, tokens * batch),
        missed_mass=counters.get("missed_mass"),
        missed_mass_error=counters.get("missed_mass_error"),
        missed_mass_excess=counters.get("missed_mass_excess"),
        tokens_kept=counters.get("tokens_kept"),
        tokens_dropped=counters.get("tokens_dropped"),
        hit_rate=1 - loaded / attended if attended else None,
        groups_per_step=attended * each / shape.layers,
        **_read_numbers(counters),
        write_wait_seconds=counters["write_blocked_seconds"],
        resident_bytes=resident,
        resident_bytes_peak=peak,
        divided_for=_divided_for(driver),
        divided_anew=driver.redivision.count,
        shared_bytes=shared,
        ledger=ledger,
        process=process,
        device=facts["device"],
        **_device_numbers(counters),
        kv_bytes_full=driver.parts.cached_bytes(batch, tokens),
        kv_bytes_on_disk=int(counters["bytes_on_disk"]),
        ranks=str(driver.parts.placement) if driver.parts.placement.is_shared else "",
        reader=facts["reader"],
        io_mode=facts["io_mode"],
        fallbacks=facts["fallbacks"],
        projection=driver.projection_source,
        predictor=driver.predictor_source,
        probe=driver.probe,
        estimate_seconds=driver.estimates.seconds,
        **_weights_numbers(driver.parts.outermost),
        counters=counters,
        timeline=Timeline(json.loads(session.timeline())) if timeline else None,
    )


def _divided_for(driver: SessionDriver) -> int | None:
    if driver.budget.kv_memory_bytes is None:
        return None
    return driver.budget.max_context or driver.redivision.context


def _weights_numbers(model: Any) -> dict[str, Any]:
    reader = getattr(model, "weights_reader", None)
    return {
        "weights_bytes_read": None if reader is None else reader.bytes_read,
        "weights_wait_seconds": None if reader is None else reader.wait_seconds,
    }


def _read_numbers(counters: Mapping[str, float]) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        name: int(counters[name]) if name in counters else None
        for name in ("prefetch_hits", "prefetch_wasted")
    }
    waited, hidden = counters["wait_seconds"], counters["hidden_seconds"]
    share = hidden / (waited + hidden) if waited + hidden else None
    return numbers | {"wait_seconds": waited, "hidden_seconds": hidden, "hidden_share": share}


def _device_numbers(counters: Mapping[str, float]) -> dict[str, Any]:
    names = ("device_bytes", "pinned_bytes", "copied_bytes")
    seconds = counters["copy_seconds"]
    return {name: int(counters[name]) for name in names} | {
        "copy_bytes_per_second": counters["copied_bytes"] / seconds if seconds else 0.0,
        "device_wait_seconds": counters["device_wait_seconds"],
        "choice_wait_seconds": counters["choice_wait_seconds"],
    }


def _rows(stats: CacheStats) -> list[tuple[str, str]]:
    hit_rate = "-" if stats.hit_rate is None else f"{stats.hit_rate:.1%}"
    rows = [
        ("tokens", f"{stats.tokens} x {stats.batch}, {stats.decoded} decoding steps"),
        *_memory_rows(stats),
        (
            "read",
            f"{format_bytes(stats.bytes_read)}, "
            f"{format_bytes(stats.bytes_read_per_token)} per token",
        ),
        (
            "written",
            f"{format_bytes(stats.bytes_written)}, "
            f"{format_bytes(stats.bytes_written_per_token)} per token",
        ),
        ("groups per step", f"{stats.groups_per_step:.1f}"),
        ("hit rate", hit_rate),
        ("waited / hidden", f"{stats.wait_seconds:.2f} s / {stats.hidden_seconds:.2f} s"),
        ("waited for writes", f"{stats.write_wait_seconds:.2f} s"),
        ("reader", f"{stats.reader}, {stats.io_mode}"),
        ("projection", stats.projection),
        ("predictor", stats.predictor),
    ]
    if stats.prefetch_hits is not None:
        rows.append(("prefetched", _prefetched(stats)))
    if stats.tokens_kept is not None:
        read = format_bytes(stats.counters["turn_bytes_read"])
        turns = f"{stats.counters['turns']:,.0f} turns that read {read}"
        kept = f"{stats.tokens_kept:,.0f} a layer{_least_most(stats)}"
        rows.append(("tokens kept", f"{kept}, {turns}"))
        rows.append(("groups recalled", f"{stats.counters['groups_recalled']:,.0f}"))
    if "clusters" in stats.counters:
        rows.append(("clusters", _clusters(stats.counters)))
    if stats.tokens_dropped is not None:
        where = "gone" if stats.io_mode == "none" else "kept on disk"
        rows.append(("tokens dropped", f"{stats.tokens_dropped:,.0f} a layer, {where}"))
    if stats.missed_mass is not None:
        rows.append(
            ("attention missed", f"{stats.missed_mass:.1%} ± {stats.missed_mass_error:.1%}")
        )
    if stats.missed_mass_excess:
        rows.append(("above audit.max_missed_mass", f"{stats.missed_mass_excess:.1%}"))
    if stats.divided_anew:
        times = f"{stats.divided_anew} time" + ("s" if stats.divided_anew > 1 else "")
        rows.append(("memory divided anew", f"{times}, now for {stats.divided_for:,} tokens"))
    if stats.preset:
        rows.insert(0, ("preset", stats.preset))
    if stats.probe:
        rows.append(("probe", stats.probe))
    if stats.ranks:
        rows.insert(0, ("this process", stats.ranks))
    if stats.weights_bytes_read is not None:
        read = format_bytes(stats.weights_bytes_read)
        rows.append(("weights read", f"{read}, waited {stats.weights_wait_seconds:.2f} s"))
    if stats.device != "cpu":
        rows += _device_rows(stats)
    if stats.fallbacks:
        rows.append(("fell back", stats.fallbacks))
    return rows


def _prefetched(stats: CacheStats) -> str:
    """What came of it, and the layers that do without."""
    counters = stats.counters
    layers = [is_on for name, is_on in counters.items() if name.startswith("predicts_")]
    off, failed = layers.count(0), counters["prefetch_dropped"]
    without = f", {off} layers without" if off else ""
    dropped = f", {failed:,.0f} failed" if failed else ""
    return f"{stats.prefetch_hits:,} groups, {stats.prefetch_wasted:,} in vain{dropped}{without}"


def _clusters(counters: Mapping[str, float]) -> str:
    return (
        f"{counters['clusters']:,.0f} a layer of {counters['tokens_a_cluster']:.1f} tokens on "
        f"{counters['pages_a_cluster']:.1f} pages, "
        f"{format_bytes(counters['bytes_a_read'])} a read, "
        f"{counters['cluster_splits']:,.0f} splits, {counters['cluster_splits_refused']:,.0f} "
        f"refused, {counters['cluster_records_read']:,.0f} pages read for those who wait, "
        f"{counters['tokens_waiting']:.1f} tokens wait"
    )


def _least_most(stats: CacheStats) -> str:
    """Where layers differ in how many tokens they keep."""
    kept = [n for name, n in stats.counters.items() if re.fullmatch(r"tokens_kept_\d+", name)]
    return f" ({min(kept):,.0f} to {max(kept):,.0f})" if kept else ""


def _memory_rows(stats: CacheStats) -> list[tuple[str, str]]:
    share = stats.resident_bytes / stats.kv_bytes_full if stats.kv_bytes_full else 0.0
    process = stats.process
    rows = [
        ("KV in a full cache", format_bytes(stats.kv_bytes_full)),
        ("KV on disk", format_bytes(stats.kv_bytes_on_disk)),
        ("KV memory", f"{format_bytes(stats.resident_bytes)} ({share:.1%} of full)"),
        *((f"  {name}", format_bytes(size)) for name, size in stats.ledger.items() if size),
    ]
    if stats.shared_bytes:
        rows.append(("  shared", format_bytes(stats.shared_bytes)))
    whole = (
        f"{format_bytes(process.rss)}, {format_bytes(process.anonymous)} of it anonymous, "
        f"{format_bytes(process.peak)} at most"
    )
    return [*rows, ("whole process", whole)]


def _device_rows(stats: CacheStats) -> list[tuple[str, str]]:
    held = f"{format_bytes(stats.device_bytes)}, {format_bytes(stats.pinned_bytes)} pinned on host"
    speed = format_bytes(stats.copy_bytes_per_second)
    waits = f"{stats.device_wait_seconds:.2f} s / {stats.choice_wait_seconds:.2f} s"
    return [
        (stats.device, held),
        ("copied to it", f"{format_bytes(stats.copied_bytes)}, {speed}/s"),
        ("device / host waited", waits),
    ]
