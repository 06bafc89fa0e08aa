"""README's lines with a bare Debian's own Python: ``make wheels-check ARGS="--debian testing"``.

The Debian is made as ``make first-hour`` does: debootstrap's smallest, entered by chroot, which
needs root. It brings its Python, and pip all that the wheel asks for: gigabytes. Nothing of this
machine is there but the clone's folders that the lines read, and there is no compiler.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.first_hour.debian import CACHE, Debian, NotToBeHadError, check_possible, own_wheel
from tests.first_hour.typist import Began
from tests.packaging.run_docs import ROOT

READ = (ROOT / "examples", ROOT / "docs")
# A mirror may be of an earlier day than those for which testing's lists are signed.
INSTALL = """
set -e
apt-get -qq -o Acquire::Check-Valid-Until=false update
apt-get -qq install --no-install-recommends python3-venv
python3 -m venv env
env/bin/python -m pip install -q --only-binary=:all: ./*.whl
if command -v cc gcc g++ c++ clang; then echo 'a compiler is there' >&2; exit 1; fi
"""
USED = "import platform, torch; print(platform.python_version(), torch.__version__)"


def _typed(machine: Debian, folder: Path, script: str) -> str:
    done = subprocess.run(
        machine.command(script, folder), env=machine.environment(), text=True, capture_output=True
    )
    if done.returncode:
        sys.exit(f"wheels-check: {machine.name}: {script.strip()}\n{done.stdout}{done.stderr}")
    return done.stdout


def answer(release: str, program: str, probe: str) -> tuple[tuple[float, float], str]:
    """Seconds of the lines there, and of a processor; and Debian, Python, torch, `probe`'s words.

    The program ends with a sentence where such a Debian or a wheel for its Python cannot be had.
    """
    try:
        check_possible()
        wheel = own_wheel(release)
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kvswap-lines-", dir=CACHE) as name:
            machine = Debian(release, Path(name) / "debian", READ)
            folder = machine.root / "root" / "lines"
            folder.mkdir()
            shutil.copy(wheel, folder)
            for each in READ:
                (folder / each.name).symlink_to(each)
            (folder / "readme.py").write_text(program)
            (folder / "probe.py").write_text(probe)
            _typed(machine, folder, INSTALL)
            python, torch = _typed(machine, folder, f'env/bin/python -c "{USED}"').split()
            built = " ".join(_typed(machine, folder, "env/bin/python probe.py").split())
            began = Began()
            _typed(machine, folder, "env/bin/python readme.py")
            took = began.seconds(), began.processor_seconds()
    except NotToBeHadError as error:
        sys.exit(f"wheels-check: --debian {release}: {error}")
    return took, f"{machine.name}, Python {python}, torch {torch}: {built}"
