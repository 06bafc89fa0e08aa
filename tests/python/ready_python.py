"""Processes of their own for tests, with torch, transformers and the package imported already.

The imports take longer than most of what such a process is wanted for. So they are done once, in a
process that computes nothing and has no threads, and each new process is a fork of that one: for
the operating system another process, with its own memory, file descriptors and end. Not for tests
of the imports, of environment variables that are read by them, or of how an interpreter ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLONE_NEWNS = 0x00020000
MS_PRIVATE = 1 << 14 | 1 << 18  # MS_REC | MS_PRIVATE
NOT_MOUNTED = 77  # the exit status where `mount` failed

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.python.tiny_models"])


class Running:
    """`python arguments...`, begun: ``-m module ...``, ``-c code ...`` or ``script.py ...``.

    `mount` is a shell script that runs first, in `folder` and in a name space of mounts of its own,
    which needs root.
    """

    def __init__(
        self,
        *arguments: object,
        cwd: Path = ROOT,
        env: dict[str, str] | None = None,
        mount: str = "",
        folder: Path = ROOT,
    ):
        self._written = tempfile.TemporaryDirectory(prefix="kvswap-child-")
        self._arguments = tuple(map(str, arguments))
        self._process = _FORKS.Process(
            target=_run,
            args=(self._arguments, self._written.name, str(cwd), env or {}, mount, str(folder)),
            daemon=True,
        )
        self._process.start()

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """How it ended, and what it wrote; after `timeout` seconds it is killed."""
        self._process.join(timeout)
        self.kill()
        self._process.join()
        status = self._process.exitcode
        assert status is not None
        said = [Path(self._written.name, name).read_text() for name in ("stdout", "stderr")]
        self._written.cleanup()
        return subprocess.CompletedProcess(self._arguments, status, *said)

    def kill(self) -> None:
        self._process.kill()


def run(*arguments: object, **options: object) -> str:
    """What it wrote to standard output; its end was to be a good one."""
    ended = Running(*arguments, **options).wait()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _run(
    arguments: tuple[str, ...],
    written: str,
    cwd: str,
    environment: dict[str, str],
    mount: str,
    folder: str,
) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(f"{written}/{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(environment)
    if mount:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_PRIVATE, None) != 0:
            print(os.strerror(ctypes.get_errno()), file=sys.stderr)
            sys.exit(NOT_MOUNTED)
        if subprocess.run(["sh", "-c", mount], cwd=folder, check=False).returncode:
            sys.exit(NOT_MOUNTED)
    os.chdir(cwd)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
