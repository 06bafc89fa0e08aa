"""What stands in examples/serving is what the server has, and is read by who it is for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvswap_torch.cli.app import app
from kvswap_torch.hf.serving.counts import COUNTERS, GAUGES, HISTOGRAMS
from tests.python.serving_process import ROOT

FOLDER = ROOT / "examples" / "serving"
METRICS = {
    *(f"kvswap_{name}_total" for name in COUNTERS),
    *(f"kvswap_{name}" for name in GAUGES),
    *(f"kvswap_{name}_{end}" for name in HISTOGRAMS for end in ("bucket", "sum", "count")),
}


def run(command: str, *words: str | Path, cwd: Path = FOLDER) -> None:
    """What the program says of the file; skipped where it is not."""
    if shutil.which(command) is None:
        pytest.skip(f"there is no {command}")
    done = subprocess.run([command, *words], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


def options() -> set[str]:
    from typer.main import get_command

    command = get_command(app).commands["serve"]
    return {option for each in command.params for option in each.opts}


@pytest.mark.parametrize("name", ["kvswap-serve.service", "Dockerfile"])
def test_commands_have_options_that_there_are(name: str) -> None:
    text = (FOLDER / name).read_text()
    begin = text.index("ExecStart") if name.endswith(".service") else text.index("ENTRYPOINT")
    used = set(re.findall(r"--[a-z-]+", text[begin : text.index("\n\n", begin) if "\n\n" in
               text[begin:] else len(text)]))  # fmt: skip
    assert used and used <= options()


def test_a_dashboard_and_alerts_are_of_metrics_that_there_are() -> None:
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += re.findall(r"expr: (.*)", (FOLDER / "alerts.yml").read_text())
    assert len(asked) > 15
    for expression in asked:
        names = set(re.findall(r"kvswap_\w+", expression))
        assert names <= METRICS, expression
        assert names or "up{" in expression
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_systemd_reads_the_unit() -> None:
    run("systemd-analyze", "verify", FOLDER / "kvswap-serve.service")


def test_prometheus_reads_its_files(tmp_path: Path) -> None:
    (tmp_path / "kvswap.key").write_text("key")
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    text = (FOLDER / "prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus", str(tmp_path)))
    run("promtool", "check", "config", "prometheus.yml", cwd=tmp_path)


def test_caddy_reads_its_file() -> None:
    run("caddy", "validate", "--adapter", "caddyfile", "--config", "Caddyfile")
