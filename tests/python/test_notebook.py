"""The notebook's cells run from its folder, in order, and find the fact."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def test_the_notebook_runs_and_is_kept_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    program = "\n\n".join("".join(cell["source"]) for cell in cells) + "._repr_html_()\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=NOTEBOOK.parent, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "on disk: copper lantern" in done.stdout
    assert "in memory: copper lantern" in done.stdout
