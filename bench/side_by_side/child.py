"""A contender's own process: does what the parent says, one line of JSON for each.

The first line on its standard input is an `Order` as JSON; then words come, each answered by one
line: ``load`` and ``warm`` (the model), ``fill``, ``advise`` (mmap only), ``step``, ``begin``
(forget the steps so far), ``memory`` and ``report``. The end of its input ends it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.side_by_side.plan import Cell


@dataclass(frozen=True)
class Order:
    """Who to be, in which cell."""

    key: str
    cell: dict[str, Any]  # fields of plan.Cell
    weights: str
    folder: str  # on the disk to measure
    kv_file: str

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def disk_bytes() -> dict[str, int]:
    """Read from and written to disks by this process so far, page faults included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(fields[name]) for name in ("read_bytes", "write_bytes")}


def cpu_seconds() -> float:
    """Of all threads, in and outside the kernel."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Runner:
    """One contender. Heavy imports come here, when the parent has put us where we belong."""

    def __init__(self, order: Order):
        import torch

        from bench.side_by_side.plan import LLAMA, OPTIONAL, Cell

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.order, self.cell = order, Cell(**order.cell)
        self.is_llama = order.key in LLAMA
        self.is_optional = order.key in OPTIONAL  # it says itself what it holds, and of what it is
        self.model: Any = None
        self.contender: Any = None
        self.clock: Any = None
        self.fitted: Any = None
        self.update_seconds = 0.0
        self.disk = disk_bytes()  # when the last step ended

    def load(self) -> dict[str, Any]:
        if self.is_llama:
            from bench.side_by_side.llama import gguf_file, open_model

            self.model = open_model(gguf_file(Path(self.order.weights), self.cell.shape))
            return {}
        from bench.side_by_side.plan import WEIGHTS
        from bench.side_by_side.weights import load_model, put_in_few_bits

        self.model = load_model(self.cell.shape, self.cell.context, Path(self.order.weights))
        if self.order.key in WEIGHTS:
            put_in_few_bits(self.model, WEIGHTS[self.order.key])
        elif self.cell.linear == "ours":
            from kvswap_torch.half_linear import replace_linear

            replace_linear(self.model)
        return {}

    def warm(self) -> dict[str, Any]:
        """A step of the model with few tokens."""
        warm = open_floor_of(self)
        warm.step()
        warm.close()
        _trim()
        return {}

    def fill(self) -> dict[str, Any]:
        from bench.contenders import TokenClock

        before, began = disk_bytes(), time.perf_counter()
        self.contender = open_contender(self)
        _trim()
        seconds = time.perf_counter() - began
        if self.order.key in ("dynamic", "static", "restore", "mmap", "floor", "ollm"):
            self._time_updates()
        elif not self.is_llama:
            self.clock = TokenClock(self.contender.cache)
        self.disk = disk_bytes()
        written = self.disk["write_bytes"] - before["write_bytes"]
        return {"seconds": round(seconds, 2), "bytes_written": written}

    def _time_updates(self) -> None:
        """Handing out K and V is all that these caches do; the rest is the model's time."""
        update = self.contender.cache.update

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = update(*args, **kwargs)
            self.update_seconds += time.perf_counter() - began
            return result

        self.contender.cache.update = timed

    def begin(self) -> dict[str, Any]:
        """What was before was warming up."""
        self.contender.seconds.clear()
        self.update_seconds = 0.0
        self.disk = disk_bytes()  # when the last step ended
        if self.clock is not None:
            self.clock.restart()
        return {}

    def advise(self) -> dict[str, Any]:
        """A step of a mapped file with each advice; keeps the faster."""
        from bench.side_by_side.mapped import ADVICE

        seconds = {}
        for advice in ADVICE:
            self.contender.cache.advise(advice)
            seconds[advice] = self.step()["seconds"]
        best = min(seconds, key=seconds.__getitem__)
        self.contender.cache.advise(best)
        return {"advice": best, "seconds": _rounded(seconds)}

    def step(self) -> dict[str, Any]:
        before, cpu = self.disk, cpu_seconds()
        self.contender.step()
        cpu = cpu_seconds() - cpu
        # Since the last step, not since this one began: who reads ahead does so in between, too.
        self.disk = disk_bytes()
        moved = {name: value - before[name] for name, value in self.disk.items()}
        return {"seconds": self.contender.seconds[-1], "cpu_seconds": cpu} | moved

    def report(self) -> dict[str, Any]:
        """What the cache says of itself, over all steps."""
        if self.clock is not None:
            return session_report(self)
        seconds = self.contender.seconds
        update = 1e3 * self.update_seconds / len(seconds)
        rest = "model, attention, page faults" if self.order.key == "mmap" else "model, attention"
        parts = {"update": update, rest: 1e3 * statistics.mean(seconds) - update}
        about = self.contender.about() if self.is_optional else {}
        return self.memory() | {"parts_ms": _rounded(parts)} | about

    def memory(self) -> dict[str, Any]:
        """What the cache says that it holds."""
        if self.clock is not None:
            return {"kv_memory_bytes": self.contender.cache.stats().resident_bytes}
        return {"kv_memory_bytes": held_bytes(self)}

    def close(self) -> None:
        if self.contender is not None:
            self.contender.close()


def open_floor_of(runner: Runner) -> Any:
    """The order's model over few tokens."""
    model, cell = runner.model, runner.cell
    if runner.is_llama:
        from bench.side_by_side.llama import LlamaContender

        return LlamaContender("llama_floor", model, cell)
    from bench.contenders import open_floor

    return open_floor(model, cell.shape, cell.batch)


def open_contender(runner: Runner) -> Any:
    """Opens and fills the order's cache."""
    from bench import contenders as known
    from bench.side_by_side.mapped import MappedCache
    from bench.side_by_side.plan import FLOORS, PRESET

    model, cell, key = runner.model, runner.cell, runner.order.key
    shape, batch, context = cell.shape, cell.batch, cell.context
    if key in FLOORS:
        return open_floor_of(runner)
    if runner.is_llama:
        from bench.side_by_side.llama import LlamaContender

        return LlamaContender(key, model, cell)
    if key == "ollm":
        from bench.side_by_side.ollm import OllmContender

        return OllmContender(model, cell, Path(runner.order.folder))
    if key == "dynamic":
        return known.open_dynamic(model, shape, batch, context)
    if key == "static":
        return known.open_static(model, shape, batch, context)
    if key == "restore":
        file = open_file(runner.order.kv_file, cell)
        return known.open_restore(model, shape, batch, context, file, cell.device)
    if key == "mmap":
        cache = MappedCache(open_file(runner.order.kv_file, cell))
        return known.Contender(model, cache, batch, context)
    if key.startswith(PRESET):
        folder, name = Path(runner.order.folder), key.removeprefix(PRESET)
        return known.open_preset(name, model, shape, batch, context, folder, cell.device)
    return open_session_contender(runner)


def open_session_contender(runner: Runner) -> Any:
    from bench import contenders as known
    from bench.side_by_side.plan import OWN_SETTINGS
    from bench.side_by_side.settings import Fitted, fit_kvswap, fit_per_head

    model, cell, key = runner.model, runner.cell, runner.order.key
    folder = Path(runner.order.folder)
    if key in OWN_SETTINGS:
        device = {"storage.simulated_device": cell.device} if cell.device else {}
        changes = OWN_SETTINGS[key] | device
        config = own_settings(model, cell, folder).with_settings(changes) if changes else None
        runner.fitted = Fitted(config, cell.budget_bytes)
    else:
        runner.fitted = fit_kvswap(model, cell, folder)
    budget_bytes = runner.fitted.budget_bytes
    if key.startswith("tokens"):
        runner.fitted = fit_per_head(model, cell, folder, budget_bytes, reuse=key == "tokens")
        budget_bytes = None  # fitted already, with its predictor beside it
    contender = known.open_kvswap(
        model, cell.shape, cell.batch, cell.context, folder, runner.fitted.config, budget_bytes
    )
    if cell.choices != "random":
        follow(contender, cell)
    return contender


def follow(contender: Any, cell: Cell) -> None:
    """Has it select the cell's recorded groups, outside of the time that is measured."""
    from bench.recorded import Recorded

    config, session = contender.cache.driver.config, contender.cache.driver.session
    groups = cell.context // config.selection.group_tokens
    recorded = Recorded.load(cell.choices).scaled(
        cell.shape.layers, groups, config.selection.top_k_groups
    )
    contender.before_step = recorded.follow(session, cell.batch)


def own_settings(model: Any, cell: Cell, folder: Path) -> Any:
    """Those that a cache without a config has in the cell."""
    from bench.contenders import ROOM_TOKENS
    from kvswap_torch import KVSwapCache

    most = {"max_context": cell.context + ROOM_TOKENS, "max_batch": cell.batch}
    with KVSwapCache(model, path=folder, kv_memory_bytes=cell.budget_bytes, **most) as cache:
        return cache.driver.config


def open_file(name: str, cell: Cell) -> Any:
    import torch

    from bench.contenders import kv_file_size
    from bench.kv_file import KvFile

    size = kv_file_size(cell.shape, cell.batch, cell.context)
    return KvFile(Path(name), cell.shape.layers, size, torch.bfloat16)


def session_report(runner: Runner) -> dict[str, Any]:
    from kvswap_torch.config.engine import engine_value

    cache, config = runner.contender.cache, runner.contender.cache.driver.config
    stats, grown = cache.stats(), runner.clock.grown()
    attended = grown["groups_attended"]
    return {
        "kv_memory_bytes": stats.resident_bytes,
        "budget_bytes": None if runner.fitted is None else runner.fitted.budget_bytes,
        "ledger": dict(stats.ledger),
        "config": {
            "group_tokens": config.selection.group_tokens,
            "rank": max(cache.driver.ranks, default=0),
            "summary_dtype": engine_value(config, "summary_dtype"),
            "groups_max": config.selection.top_k_groups,
            "pages_max": config.memory.pages_per_layer,
            "replacement": engine_value(config, "replacement"),
            "prefetch": config.prefetch.mode,
        },
        "hit_rate": round(1 - grown["groups_loaded"] / attended, 4) if attended else None,
        "read_calls_per_layer": round(grown["read_calls"] / grown["steps"], 1),
        "bytes_per_read": round(grown["bytes_read"] / max(1.0, grown["reads"])),
        "summary_bytes": stats.ledger.get("summary", 0),
        "reader": f"{stats.reader}, {stats.io_mode}",
        "parts_ms": _rounded(runner.clock.milliseconds(runner.contender.seconds)),
    }


def held_bytes(runner: Runner) -> int:
    """Memory that a cache of tensors or buffers takes; a mapped file's pages are the kernel's."""
    key = runner.order.key
    if key == "mmap":
        return 0
    if runner.is_optional:
        return runner.contender.nbytes
    cache = runner.contender.cache
    layers = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    total = sum(tensor.nbytes for tensor in layers if tensor is not None)
    return total + sum(map(len, cache.reader.buffers)) if key == "restore" else total


def _rounded(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in parts.items()}


def _trim() -> None:
    """Gives freed memory back, so that it does not count as the cache's."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def serve(requests: IO[str], answers: IO[str]) -> None:
    runner = Runner(Order(**json.loads(requests.readline())))
    for line in requests:
        try:
            answer = getattr(runner, line.strip())()
        except Exception as error:
            # The parent decides what becomes of the cell, and has no other way to learn why.
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    runner.close()


if __name__ == "__main__":
    # Whatever else prints, prints to where errors go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
