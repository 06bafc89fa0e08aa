"""Another process, which opens saved caches and goes on from them: `OtherProcess`.

``python -m tests.python.saved_child`` takes a job a line, as JSON, and answers each with a line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


class OtherProcess:
    """Imports once; `send` and `receive` are apart, so that several may be busy at once."""

    def __enter__(self) -> OtherProcess:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.python.saved_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._child.stdin.close()
        ended = self._child.wait()
        self._child.stdout.close()
        assert ended == 0 or kind is not None, "what it said is on stderr"

    def send(
        self,
        family: str,
        saved: Path,
        path: Path,
        out: torch.Tensor,
        padding: tuple = (),
        **more: Any,
    ) -> None:
        """To open `saved` and go on from the ids `out`, ``[batch, tokens]``.

        `builder`: ``tiny_model``, or ``every_model`` for those of every_model.py. `waits`: it says
        "open" first, and goes on after `go`.
        """
        job = {"family": family, "saved": str(saved), "path": str(path), "out": out.tolist(),
               "padding": list(padding)}  # fmt: skip
        print(json.dumps(job | more), file=self._child.stdin, flush=True)

    def receive(self) -> Any:
        line = self._child.stdout.readline()
        assert line, "the process has ended; what it said is on stderr"
        return json.loads(line)

    def go(self) -> None:
        print("{}", file=self._child.stdin, flush=True)


def _go_on(job: dict[str, Any]) -> dict[str, Any]:
    from kvswap_torch import KVSwapCache
    from tests.python import every_model
    from tests.python.saved_conversation import goes_on
    from tests.python.tiny_models import tiny_model

    build = every_model.build if job.get("builder") == "every_model" else tiny_model
    model = build(job["family"])
    with KVSwapCache.open(model, job["saved"], path=job["path"]) as cache:
        if job.get("waits"):
            print(json.dumps("open"), flush=True)
            sys.stdin.readline()
        ids = cache.token_ids
        options = job.get("options", {})
        tokens = goes_on(model, cache, torch.tensor(job["out"]), job["padding"], **options)
        return {
            "tokens": tokens,
            "ids": None if ids is None else ids.tolist(),
            "probe": cache.stats().probe,
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for text in sys.stdin:
        print(json.dumps(_go_on(json.loads(text))), flush=True)
