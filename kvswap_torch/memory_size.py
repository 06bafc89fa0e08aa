"""Sizes as people write them: ``512MiB``, ``1.5GB``, ``65536``."""

from __future__ import annotations

import re

from kvswap_torch.errors import ConfigError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[_letter] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power
_PATTERN = re.compile(
    r"(?=\.?\d)(?P<whole>\d*)(?:\.(?P<part>\d*))?\s*(?P<unit>[a-z]*)", re.IGNORECASE | re.ASCII
)
_SPACES = " \t\n\r\f\v"  # as in C++: str.strip() alone takes more
_DIGITS_MAX = 18  # after the point; those after them are dropped
_BYTES_MAX = 2**63 - 1


def parse_bytes(size: int | str, where: str = "size") -> int:
    """Number of bytes in `size`.

    Parameters
    ----------
    size
        A count of bytes, or a number with a unit: B, KiB, MiB, GiB, TiB (powers of 1024; K, M, G,
        T mean the same) or KB, MB, GB, TB (powers of 1000). Case does not matter. A fraction of a
        byte is dropped.
    where
        What the size is for; begins the error message.

    Raises
    ------
    ConfigError
        When it is not such a size, or less than one byte, or 2**63 and more.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ConfigError(f"{where}: must be an int or a string like '512MiB', got {size!r}")
    if isinstance(size, int):
        count = size
    else:
        match = _PATTERN.fullmatch(size.strip(_SPACES))
        if match is None or match["unit"].upper() not in _UNITS:
            raise ConfigError(
                f"{where}: must be a number with a unit such as 512MiB, 1.5GB or 65536, "
                f"got {size!r}"
            )
        unit, whole = _UNITS[match["unit"].upper()], match["whole"].lstrip("0")
        part = (match["part"] or "")[:_DIGITS_MAX].ljust(_DIGITS_MAX, "0")
        # int() refuses numbers of thousands of digits.
        is_long = len(whole) > len(str(_BYTES_MAX))
        count = 0 if is_long else int(whole or 0) * unit + int(part) * unit // 10**_DIGITS_MAX
    if not 1 <= count <= _BYTES_MAX:
        raise ConfigError(f"{where}: must be between 1 byte and 2**63 - 1, got {size!r}")
    return count


def format_bytes(count: int | float) -> str:
    """`count` bytes in three or four digits: ``format_bytes(3 << 19)`` is ``1.50 MiB``."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.2f} {unit}" if abs(value) < 100 else f"{value:.1f} {unit}"
    return f"{value / 1024:.2f} TiB"
