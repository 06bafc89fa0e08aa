"""Why a cache is neither copied nor pickled."""

from __future__ import annotations

from typing import Any, NoReturn


class NotCopied:
    """The part of `KVSwapCache` that refuses to be."""

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "KVSwapCache: cannot be copied, since its tokens are in a file on disk; fork() shares "
            "them, crop() goes back to an earlier length, batch_repeat_interleave() repeats"
        )

    def __deepcopy__(self, memo: dict) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "KVSwapCache: cannot be pickled, since its tokens are in an unnamed file that only "
            "this process can reach; save() and open() take it to another process"
        )
