"""One cell: its contenders in children of their own, a step of each in turn."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.contenders import SELECTED_TOKENS, fill_file, kv_file_size
from bench.kv_file import KvFile
from bench.side_by_side.child import Order
from bench.side_by_side.memory_cap import MemoryCap
from bench.side_by_side.plan import ALWAYS, MEMORY_PART, ON_FILE, Cell, Room
from bench.side_by_side.roofline import DiskBandwidth, describe, floor_of
from bench.side_by_side.steering import Child, ChildError

STEPS_MAX = 40
STEPS_MIN = 3  # that count, however long they take
WARM_UP = 4
SLOW_SECONDS = 1.0  # a first step that takes longer is warm-up enough

Say = Callable[[str], None]


@dataclass
class Run:
    """A child and what its steps were; `begun` is the steps of earlier waves."""

    child: Child
    rounds: list[int] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    begun: int = 0
    memory_before: int = 0
    filled: dict[str, Any] = field(default_factory=dict)
    cap_bytes: int | None = None
    advice: dict[str, Any] = field(default_factory=dict)

    def warm_up(self) -> None:
        """A few steps that do not count; of a slow contender one."""
        for _ in range(0 if self.advice else WARM_UP):
            if self.child.ask("step")["seconds"] > SLOW_SECONDS:
                break
        self.child.ask("begin")

    def is_done(self, seconds: float) -> bool:
        """Of this wave: enough steps, or enough time and the fewest steps."""
        taken = self.steps[self.begun :]
        spent = sum(step["seconds"] for step in taken)
        return len(taken) >= STEPS_MAX or (len(taken) >= STEPS_MIN and spent >= seconds)

    def take(self, number: int) -> None:
        self.steps.append(self.child.ask("step"))
        self.rounds.append(number)

    def seconds_by_round(self) -> dict[int, float]:
        seconds = (step["seconds"] for step in self.steps)
        return dict(zip(self.rounds, seconds, strict=True))


class Measurement:
    """Runs a cell's waves; `rows` and `empty` are by contender's key.

    Children are started, filled and asked one at a time. When one fails, its cell is empty with its
    words, and the others go on.
    """

    def __init__(self, cell: Cell, folder: Path, weights: Path, seconds: float, say: Say):
        self.cell, self.folder, self.weights = cell, folder, weights
        self.seconds, self.say = seconds, say
        self.kv_file = folder / f"side_by_side_{cell.name}.kv"
        self.runs: dict[str, Run] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.empty: dict[str, str] = {}
        self.file_bytes_written = 0
        self._round = 0

    def run(self, keys: Iterable[str], room: Room) -> None:
        keys = list(keys)
        problems = {key: room.problem(self.cell, key) for key in keys}
        self.empty = {key: why for key, why in problems.items() if why}
        able = [key for key in keys if key not in self.empty]
        waves = room.waves(self.cell, able)
        with contextlib.ExitStack() as undo:
            undo.callback(self.kv_file.unlink, missing_ok=True)
            undo.callback(self._end)
            for wave in waves:
                if any(key in ON_FILE for key in wave):
                    self._measure([key for key in ALWAYS if key in self.runs])
                self._open_wave(wave)
                self._decode([key for key in wave if key in self.runs])
                last = wave is waves[-1]
                self._finish([key for key in wave if last or key not in waves[-1]])

    def _end(self) -> None:
        for run in self.runs.values():
            run.child.close()

    def _open_wave(self, wave: list[str]) -> None:
        if any(key in ON_FILE for key in wave):
            self._write_file()
        new = [key for key in wave if key not in self.runs and key not in self.empty]
        for key in new:
            order = Order(
                key, asdict(self.cell), str(self.weights), str(self.folder), str(self.kv_file)
            )
            # There was one a moment ago, or the contender would not be here.
            self.runs[key] = Run(Child(order, MemoryCap.open() if key == "mmap" else None))
        for key in new:
            try:
                self._prepare(key, self.runs[key])
            except ChildError as error:
                self._fail(key, error)
        # They have it open; its blocks are free again when they are gone.
        self.kv_file.unlink(missing_ok=True)

    def _write_file(self) -> None:
        self.say("writing K and V to a file")
        cell = self.cell
        size = kv_file_size(cell.shape, cell.batch, cell.context)
        # A path that is no folder: the file is made there, and children open it.
        file = KvFile(self.kv_file, cell.shape.layers, size, torch.bfloat16)
        fill_file(file, cell.shape, cell.batch)
        self.file_bytes_written = file.layers * file.payload_bytes
        file.close()

    def _prepare(self, key: str, run: Run) -> None:
        """Loads, fills and warms up; limits the memory of who has a cap."""
        self.say(f"filling {key}")
        child, cap = run.child, run.child.cap
        child.ask("load")
        if cap is not None:
            cap.forget_peak()
        child.ask("warm")
        run.memory_before = child.memory_bytes()
        run.filled = child.ask("fill")
        if cap is not None:
            # Beside what a step of the model takes at most.
            run.cap_bytes = self._cap_bytes()
            cap.limit(cap.peak_bytes() + run.cap_bytes)
            run.advice = child.ask("advise")
        run.warm_up()

    def _cap_bytes(self) -> int:
        """What kvswap holds in memory; its 13th where it is not measured."""
        if "kvswap" not in self.runs:
            return self.cell.kv_bytes // MEMORY_PART
        return self.runs["kvswap"].child.ask("memory")["kv_memory_bytes"]

    def _decode(self, keys: list[str]) -> None:
        self.say(f"decoding with {', '.join(keys)}")
        for key in keys:
            self.runs[key].begun = len(self.runs[key].steps)
        while True:
            active = [
                key for key in keys if key in self.runs and not self.runs[key].is_done(self.seconds)
            ]
            if not active:
                return
            self._round += 1
            for key in active:
                try:
                    self.runs[key].take(self._round)
                except ChildError as error:
                    self._fail(key, error)

    def _measure(self, keys: list[str]) -> None:
        """Their rows, of the steps so far; none is measured twice."""
        for key in [key for key in keys if key in self.runs and key not in self.rows]:
            try:
                self.rows[key] = self._row(key, self.runs[key])
            except ChildError as error:
                self.empty[key] = str(error)

    def _finish(self, keys: list[str]) -> None:
        """Their last wave is over."""
        self._measure(keys)
        for key in [key for key in keys if key in self.runs]:
            self.runs[key].child.close()

    def _fail(self, key: str, error: ChildError) -> None:
        self.empty[key] = str(error)
        self.runs.pop(key).child.close()

    def _row(self, key: str, run: Run) -> dict[str, Any]:
        """One contender's numbers. Bytes and seconds are of a step: a token of every sequence.

        `memory_outside_bytes` is the child's anonymous and shared memory after its steps, less that
        before its cache was opened, when it had the model and had run it; for mmap the limit of its
        page cache is added. Bytes read and written are what the kernel counts for the process.
        """
        report = run.child.ask("report")
        outside = run.child.memory_bytes() - run.memory_before
        times = [step["seconds"] for step in run.steps]
        low, middle, high = statistics.quantiles(times, n=4)
        written = self.file_bytes_written if key in ON_FILE else run.filled["bytes_written"]
        if run.cap_bytes is not None:
            report |= {"kv_memory_bytes": run.cap_bytes, "advice": run.advice}
        return report | {
            "ms": _ms(middle),
            "ms_quartiles": [_ms(low), _ms(high)],
            "steps": len(times),
            "memory_outside_bytes": outside + (run.cap_bytes or 0),
            "bytes_read": round(_mean(run, "read_bytes")),
            "bytes_written": round(_mean(run, "write_bytes")),
            "bytes_written_per_token_stored": round(
                written / (self.cell.context * self.cell.batch)
            ),
            "cpu_seconds": round(_mean(run, "cpu_seconds"), 5),
            "fill_seconds": run.filled["seconds"],
            "against_kvswap": self._against_kvswap(key, run, middle),
        }

    def _against_kvswap(self, key: str, run: Run, seconds: float) -> float | None:
        """Time over kvswap's, the median of rounds in which both took a step.

        Of who reads a file, over kvswap's median without them: in their rounds it waits for the
        disk that they use.
        """
        if key == "kvswap" or "kvswap" not in self.runs:
            return None
        if key in ON_FILE and "kvswap" in self.rows:
            return round(_ms(seconds) / self.rows["kvswap"]["ms"], 3)
        ours, theirs = self.runs["kvswap"].seconds_by_round(), run.seconds_by_round()
        ratios = [theirs[number] / ours[number] for number in ours.keys() & theirs.keys()]
        return round(statistics.median(ratios), 3) if ratios else None

    def results(self, memory_bandwidth: float, disk: DiskBandwidth) -> dict[str, Any]:
        """Of the cell, for its JSON file."""
        cell = self.cell
        for key, row in self.rows.items():
            row["roofline"] = describe(key, floor_of(cell, key, row, memory_bandwidth, disk), row)
        return {
            "shape": cell.shape_name,
            "layers": cell.shape.layers,
            "context": cell.context,
            "batch": cell.batch,
            "linear": cell.linear,
            "device": cell.device or "local disk",
            "choices": cell.choices,
            "selected_tokens": SELECTED_TOKENS,
            "kv_bytes_full": cell.kv_bytes,
            "memory_bytes_per_second": round(memory_bandwidth),
            "disk_bytes_per_second_by_read": disk.measured(),
            "read_ahead_kib": read_ahead_kib(self.folder),
            "contenders": self.rows,
            "empty": self.empty,
        }


def read_ahead_kib(folder: Path) -> int | None:
    """What the kernel reads ahead of a fault on this disk at most; mmap's reads depend on it."""
    device = folder.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return int(setting.read_text()) if setting.exists() else None


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _mean(run: Run, name: str) -> float:
    return statistics.mean(step[name] for step in run.steps)
