"""The notebook's cells run from its folder, in order, and find the fact."""

import json
from pathlib import Path

from tests.python import ready_python

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def test_the_notebook_runs_and_is_kept_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    program = "\n\n".join("".join(cell["source"]) for cell in cells) + "._repr_html_()\n"
    output = ready_python.run("-c", program, cwd=NOTEBOOK.parent)
    assert "on disk: copper lantern" in output
    assert "in memory: copper lantern" in output
