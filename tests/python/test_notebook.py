"""The notebook's cells run from its folder, in order: read, ask, save, open, ask, compare."""

import json
import re
from pathlib import Path

from kvswap_torch import parse_bytes
from tests.python import ready_python

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
SHOWN = '\nassert "<table" in stats._repr_html_()\nprint("document:", document.shape[1])\n'


def test_the_notebook_runs_and_is_kept_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    before = sorted(NOTEBOOK.parent.iterdir())
    program = "\n\n".join("".join(cell["source"]) for cell in cells) + SHOWN
    output = ready_python.run("-c", program, cwd=NOTEBOOK.parent)
    assert "first cache: copper lantern" in output
    assert "opened cache: copper lantern\nopened cache: velvet harbor" in output
    assert "in memory: velvet harbor" in output
    (tokens,) = re.findall(r"^document: (\d+)$", output, re.MULTILINE)
    assert f"opened with {tokens} tokens" in output, "it has the document, without questions"
    everything, memory, disk = (
        parse_bytes(re.findall(rf"^{name}: ([\d.]+ \wiB)", output, re.MULTILINE)[0])
        for name in ("all in memory", "kvswap", "on disk")
    )
    assert memory <= parse_bytes("8MiB") < disk <= 1.1 * everything
    left = {path.name for path in NOTEBOOK.parent.iterdir()} - {path.name for path in before}
    assert left <= {"__pycache__"}
