"""What is measured side by side: cells, who is in them, and what they need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from bench.contenders import MODELLED_BYTES_PER_SECOND, ROOM_TOKENS, SELECTED_TOKENS
from bench.shapes import SHAPES, Shape
from bench.side_by_side import memory_cap
from kvswap_torch import format_bytes

LAYERS = {"1b": 4}  # cut, since every layer costs the same
CONTEXTS = (8192, 32768, 131072)
BATCHES = (1, 8)
MEMORY_PART = 13  # of a full cache, one part in this many is what kvswap may hold
PRESET_PART = 2  # of a full cache, what a preset holds at most where a layer may stay in memory
GROUP_TOKENS = {None: 4, "emmc": 8, "ufs": 4}
MODELLED_CONTEXTS = (32768,)  # of the modelled devices, unless more is asked for
RECORD_ALIGNMENT = 512
PROCESS_BYTES = 500 << 20  # of a child, beside its cache
MEMORY_SHARE_MAX = 0.88  # of what is available; the rest keeps the weights in the page cache
DISK_SHARE_MAX = 0.95

LABELS = {
    "kvswap": "kvswap",
    "default": "kvswap by default",
    "no_prefetch": "the same without prefetch",
    "floor": f"floor ({SELECTED_TOKENS} tokens)",
    "static": "StaticCache",
    "dynamic": "DynamicCache",
    "restore": "full restore",
    "mmap": "mmap",
    "tokens": "tokens per head",
    "tokens_no_reuse": "tokens per head, no reuse",
}
# What is selected: random groups, or those that a model selected (bench/recorded.py), in words.
CHOICES = {
    "random": "random choices",
    "smollm2": "SmolLM2's choices",
    "reference_model": "the reference model's choices",
}
DEFAULT = tuple(LABELS)  # who runs unless others are asked for
LABELS |= {"fp8": "the default with records of e4m3", "int4": "the default with records of int4"}
# The default, with the model's linear layers in this format.
WEIGHTS = {"weights_int8": "int8", "weights_int4": "int4"}
LABELS |= {key: f"the default with weights of {each}" for key, each in WEIGHTS.items()}
# llama.cpp's, by the type of its KV cache; llama_floor attends as many tokens as floor does.
LLAMA = {"llama_f16": "f16", "llama_q8": "q8_0", "llama_floor": "f16"}
LABELS |= {
    "llama_f16": "llama.cpp, f16",
    "llama_q8": "llama.cpp, q8_0",
    "llama_floor": f"llama.cpp ({SELECTED_TOKENS} tokens)",
    "ollm": "oLLM",
}
FLOORS = ("floor", "llama_floor")
PRESET = "preset:"  # before a preset's name: a contender with its own settings and memory
ALWAYS = ("kvswap", "floor")  # in every wave, so that all are paired with them
ON_FILE = ("restore", "mmap")
# Nothing is configured but this.
OWN_SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "no_prefetch": {"prefetch.mode": "off"},
    "fp8": {"storage.kv_dtype": "fp8_e4m3"},
    "int4": {"storage.kv_dtype": "int4"},
} | {key: {} for key in WEIGHTS}
ON_SESSION = ("kvswap", *OWN_SETTINGS, "tokens", "tokens_no_reuse")
UNMODELLED = "not on a modelled device: the kernel's own reads cannot be slowed to it"
NO_DISK = "reads no disk: its time is that of the cell without a modelled device"
NO_LLAMA = "no llama.cpp: `make peers` builds it for this processor"
NO_OLLM = "no oLLM: `make peers` installs it"
# Who needs a module that is not installed with the project, and what is said without it.
OPTIONAL = dict.fromkeys(LLAMA, ("llama_cpp", NO_LLAMA)) | {"ollm": ("ollm", NO_OLLM)}

# To fill and to run, for an estimate; measured on two cores and a disk of some 2 GB/s.
FILL_SECONDS_PER_GIB = {
    "kvswap": 3.0, "tokens": 12.0, "tokens_no_reuse": 12.0, "dynamic": 2.0, "static": 2.0,
    "restore": 2.0, "mmap": 0.0, "floor": 0.0,
    "llama_f16": 8.0, "llama_q8": 16.0, "llama_floor": 0.0, "ollm": 3.0,
}  # fmt: skip
START_SECONDS = 2.5  # of a child; they start together
STEP_SECONDS_PER_GIB = {
    "dynamic": 1.2, "static": 0.15, "restore": 0.9, "mmap": 5.0, "llama_f16": 0.5, "llama_q8": 0.9,
    "ollm": 4.0,
}  # fmt: skip


def label(key: str) -> str:
    """What tables call a contender."""
    return LABELS.get(key, key)


def is_on_session(key: str) -> bool:
    return key in ON_SESSION or key.startswith(PRESET)


def in_order(keys: Iterable[str]) -> list[str]:
    """kvswap first, since mmap is given as much memory as it holds; presets last."""
    given = set(keys)
    return [key for key in LABELS if key in given] + sorted(given - set(LABELS))


@dataclass(frozen=True)
class Cell:
    """One setting in which all are measured; `device` is a modelled one, None the disk itself.

    `linear` says whose linear layers the model has: torch's, or ours (`kvswap_torch.half_linear`).
    `choices` says which groups are selected: random ones, or those of a recorded model, scaled.
    """

    shape_name: str
    context: int
    batch: int
    device: str | None = None
    linear: str = "ours"
    choices: str = "random"

    @property
    def shape(self) -> Shape:
        shape = SHAPES[self.shape_name]
        return replace(shape, layers=LAYERS.get(self.shape_name, shape.layers))

    @property
    def name(self) -> str:
        tokens = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        name = f"{self.shape_name}_{tokens}_b{self.batch}_{self.device or 'local'}"
        return name if self.choices == "random" else f"{name}_{self.choices}"

    @property
    def kv_bytes(self) -> int:
        return self.shape.kv_bytes(self.batch, self.context)

    @property
    def selected_bytes(self) -> int:
        return self.shape.kv_bytes(self.batch, SELECTED_TOKENS)

    @property
    def group_tokens(self) -> int:
        return GROUP_TOKENS[self.device]

    @property
    def budget_bytes(self) -> int:
        return self.kv_bytes // MEMORY_PART


def cells(
    shapes: Iterable[str],
    contexts: Iterable[int],
    batches: Iterable[int],
    devices: Iterable[str],
    linear: str = "ours",
    choices: Iterable[str] = ("random",),
) -> list[Cell]:
    """The small ones first; of a modelled device only `MODELLED_CONTEXTS` where any is asked for.

    Raises
    ------
    ValueError
        Naming what of these is not known, or a size that is not positive.
    """
    shapes, contexts, batches, devices, choices = map(
        list, (shapes, contexts, batches, devices, choices)
    )
    known = {
        "shapes": (shapes, list(SHAPES)),
        "devices": (devices, ["local", "emmc", "ufs"]),
        "linear": ([linear], ["torch", "ours"]),
        "choices": (choices, list(CHOICES)),
    }
    for what, (given, allowed) in known.items():
        for name in given:
            if name not in allowed:
                raise ValueError(f"{what}: must be among {', '.join(allowed)}, got {name!r}")
    for what, numbers in (("contexts", contexts), ("batches", batches)):
        if any(number < 1 for number in numbers):
            raise ValueError(f"{what}: must be positive, got {numbers}")
    modelled = [context for context in contexts if context in MODELLED_CONTEXTS] or contexts
    found = [
        Cell(shape, context, batch, None if device == "local" else device, linear, chosen)
        for shape, context, batch, device, chosen in product(
            shapes, contexts, batches, devices, choices
        )
        if device == "local" or context in modelled
    ]
    return sorted(found, key=lambda cell: (cell.kv_bytes, cell.device or "", cell.choices))


def memory_need(cell: Cell, key: str) -> int:
    """Bytes in memory that a contender's child takes at most, its page cache included."""
    whole = cell.kv_bytes
    layer = whole // cell.shape.layers
    cache = {
        "floor": cell.selected_bytes,
        "dynamic": whole + layer,  # a layer grows by being copied
        "static": whole * (cell.context + ROOM_TOKENS) // cell.context,
        "restore": 2 * layer,
        # While it is filled, a sequence's state twice.
        "llama_f16": whole + 2 * whole // cell.batch,
        "llama_q8": (whole + 2 * whole // cell.batch) * 9 // 16,
        "llama_floor": 2 * cell.selected_bytes,
        # As it was read, with what was decoded, and with the step's token: each a copy.
        "ollm": 3 * layer,
    }
    chosen = cell.budget_bytes + 3 * cell.selected_bytes
    if key.startswith(PRESET):
        chosen = whole // PRESET_PART + 3 * cell.selected_bytes
    return PROCESS_BYTES + cache.get(key, chosen)


def disk_need(cell: Cell, key: str) -> int:
    """Bytes on disk that a contender takes; the peers on a file share one."""
    row = 2 * sum(cell.shape.cached_widths)
    padded = -(-row // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    if key.startswith("tokens"):
        return int(1.05 * cell.kv_bytes * padded / row)
    is_whole = key in (*ON_FILE, "ollm") or is_on_session(key)
    return int(1.05 * cell.kv_bytes) if is_whole else 0


@dataclass(frozen=True)
class Room:
    """What there is for a cell, bytes."""

    memory: int
    disk: int
    has_cap: bool
    modules: frozenset[str]  # of the optional ones, those that are installed

    def problem(self, cell: Cell, key: str) -> str | None:
        """Why a contender cannot be measured; None: it can."""
        if key in ("mmap", "ollm") and cell.device:
            return UNMODELLED
        if key == "mmap" and not self.has_cap:
            return memory_cap.NONE
        if key in LLAMA and cell.device:
            return NO_DISK
        module, without = OPTIONAL.get(key, (None, None))
        if module is not None and module not in self.modules:
            return without
        for what, need, there in (
            ("memory", self._memory_with_always(cell, key), MEMORY_SHARE_MAX * self.memory),
            ("disk", self._disk_with_always(cell, key), DISK_SHARE_MAX * self.disk),
        ):
            if need > there:
                return f"{what}: needs {format_bytes(need)}, there is {format_bytes(int(there))}"
        return None

    def _memory_with_always(self, cell: Cell, key: str) -> int:
        return sum(memory_need(cell, each) for each in {key, *ALWAYS})

    def _disk_with_always(self, cell: Cell, key: str) -> int:
        return sum(disk_need(cell, each) for each in {key, *ALWAYS})

    def waves(self, cell: Cell, keys: Iterable[str]) -> list[list[str]]:
        """Who runs at a time, as many as there is room for; `ALWAYS` (of `keys`) in each wave.

        Peers on a file are in one wave, which the file lives for: the last, since they read so much
        that the disk is slower for who comes after them.
        """
        keys = list(keys)
        always = [key for key in ALWAYS if key in keys]
        on_file = [key for key in keys if key in ON_FILE]
        rest = [[key] for key in keys if key not in ALWAYS and key not in ON_FILE]
        waves = [list(always)]
        for together in rest:
            wave = waves[-1] + together
            if len(waves[-1]) > len(always) and not self._holds(cell, wave):
                waves.append(list(always))
            waves[-1] += together
        if on_file:
            last = always + on_file
            waves = [*waves, last] if waves[-1] != always else [*waves[:-1], last]
        return waves

    def _holds(self, cell: Cell, wave: list[str]) -> bool:
        disk = sum(disk_need(cell, key) for key in wave if key not in ON_FILE)
        disk += max((disk_need(cell, key) for key in wave if key in ON_FILE), default=0)
        memory = sum(memory_need(cell, key) for key in wave)
        return memory <= MEMORY_SHARE_MAX * self.memory and disk <= DISK_SHARE_MAX * self.disk


def estimate_seconds(cell: Cell, keys: Iterable[str], seconds: float) -> float:
    """Of a cell, roughly: starting and filling its children, then at most `seconds` of each."""
    gib = cell.kv_bytes / 2**30
    total = 0.0
    for key in keys:
        step = 0.1 + STEP_SECONDS_PER_GIB.get(key, 0.05) * gib
        fill = FILL_SECONDS_PER_GIB.get(key, FILL_SECONDS_PER_GIB["kvswap"]) * gib
        if cell.device and key == "restore":
            step = max(step, cell.kv_bytes / MODELLED_BYTES_PER_SECOND[cell.device])
        total += START_SECONDS + fill + max(5 * step, min(seconds, 40 * step))
    return total
