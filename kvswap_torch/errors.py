"""What kvswap_torch raises.

Every class is a :class:`KVSwapError` and also the built-in exception that a caller would expect,
so that both ``except KVSwapError`` and ``except OSError`` work. Messages are worded
"where: what must hold, what came" and end with what to do where that is known.
"""

from __future__ import annotations


class KVSwapError(RuntimeError):
    """Base of all errors raised by kvswap_torch."""


class ConfigError(KVSwapError, ValueError):
    """A setting, a config file or a projection file is not usable, or is another model's."""


class BudgetError(KVSwapError, ValueError):
    """What was asked for does not fit ``kv_memory_bytes``; names the minimum and what to lower.

    A :class:`ValueError` and not a :class:`MemoryError`: the machine has not run out of memory, the
    promised number is too small for the promised work.
    """


class StorageError(OSError, KVSwapError):
    """The disk refused: missing or unwritable path, no space, over quota, a failed read or write.

    ``errno``, ``strerror`` and ``filename`` are set as on any :class:`OSError` when it was raised
    with them.
    """


class CorruptionError(StorageError):
    """Bytes read back differ from the bytes written, and reading again did not help."""


class UnsupportedModelError(KVSwapError, ValueError):
    """The model has something that cannot be kept on disk; the message names it."""


class ClosedError(KVSwapError):
    """A cache was used after ``close()``."""


class RankError(KVSwapError):
    """Several processes run one model, and another one failed, ended or ran other tokens."""
