"""What a failure says of what was asked for: passing, permanent or damage.

One table, in C++ (``csrc/io/failure.h``), for errno wherever it comes from.
"""

from __future__ import annotations

from typing import Literal, cast

from kvswap_torch.errors import CorruptionError

Failure = Literal["passing", "permanent", "damage"]


def failure_of(error: BaseException) -> Failure:
    """Of an exception.

    Returns
    -------
    str
        ``passing``: a lack, a limit or a disk that may answer again; the same may succeed later.
        ``permanent``: it stays until somebody changes rights, a path or a setting. ``damage``:
        bytes are not the ones that were written.
    """
    from kvswap_torch import _C

    if isinstance(error, CorruptionError):
        return "damage"
    if isinstance(error, MemoryError):
        return "passing"
    if isinstance(error, OSError) and error.errno is not None:
        return cast(Failure, _C.failure_name(error.errno))
    return "permanent"
