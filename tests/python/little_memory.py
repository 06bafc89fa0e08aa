"""A text of 192 MiB on disk, told by a process that may have 60 MiB more. For test_little_memory.

python -m tests.python.little_memory FOLDER CGROUP|none IO_MODE READER

prints what the attention gave, the bytes on disk and those read, and the cgroups it ended in.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

from kvswap_torch import _C
from tests.python.test_session import native, options, projection

LAYERS, CHUNKS, CHUNK_TOKENS, STEPS = 2, 96, 1024, 12


def tell(session: _C.TensorCache, chunks: int, steps: int) -> str:
    """A digest of every output; the last chunk and the steps choose among all groups."""
    generator = torch.Generator().manual_seed(1)
    digest = hashlib.sha256()
    for turn in range(chunks + steps):
        tokens = CHUNK_TOKENS if turn < chunks else 1
        session.begin_pass("prefill" if turn < chunks else "decode")
        for layer in range(LAYERS):
            keys, values = torch.randn((2, 1, 2, tokens, 64), generator=generator)
            session.append(layer, keys, values)
            if turn >= chunks:
                query = torch.randn((1, 4, 1, 64), generator=generator)
                digest.update(session.attend(layer, query, 0.125).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    folder, cgroup, io_mode, reader = sys.argv[1:]
    torch.set_num_threads(1)
    made = options(folder, layers=LAYERS, group_tokens=16, io_mode=io_mode, reader=reader)

    def opened() -> _C.TensorCache:
        session = native(made)
        for layer in range(LAYERS):
            session.set_projection(layer, *projection(layer))
        return session

    # What a process has before it comes in is not counted: code, and what torch keeps.
    warm = opened()
    tell(warm, 1, 2)
    warm.close()
    if cgroup != "none":
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    session = opened()
    digest = tell(session, CHUNKS, STEPS)
    counters = session.counters()
    session.close()
    counted = {name: counters[name] for name in ("bytes_on_disk", "bytes_read")}
    cgroups = Path("/proc/self/cgroup").read_text()
    print(json.dumps({"digest": digest, "cgroups": cgroups, **counted}))


if __name__ == "__main__":
    main()
