"""The disk probe on real folders, on a modelled device, and on disks that misbehave."""

import errno
import heapq
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvswap_torch.errors import ConfigError, StorageError
from kvswap_torch.tuning import probe as probe_module
from kvswap_torch.tuning.disk import DiskFigures, DiskModel, ReadCell, cell_seconds, fit_cells
from kvswap_torch.tuning.probe import BLOCKS, DEPTHS, probe_disk

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
# Latency, bytes a second, reads at once: csrc/io/simulated_reader.cpp.
DEVICES = {
    "nvme": (80e-6, 1.8e9, 16),
    "ufs": (270e-6, 2.9e9, 32),
    "ufs3": (270e-6, 1.45e9, 32),
    "emmc": (200e-6, 250e6, 2),
}


def modelled_seconds(device: str, count: int, size: int) -> float:
    """What a batch takes on a modelled device: places of the queue, then one bus."""
    latency, bandwidth, depth = DEVICES[device]
    places, bus = [0.0] * depth, 0.0
    for _ in range(count):
        bus = max(heapq.heappop(places) + latency, bus) + size / bandwidth
        heapq.heappush(places, bus)
    return bus


def modelled_cells(device: str) -> list[ReadCell]:
    return [
        ReadCell(size, count, count * size / modelled_seconds(device, count, size), 1e-4, 2e-4)
        for size in BLOCKS
        for count in DEPTHS
    ]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is written: what is tested is not how fast this disk is."""
    monkeypatch.setattr(probe_module, "SCRATCH_BYTES", 64 * MIB)
    monkeypatch.setattr(probe_module, "SCRATCH_BYTES_FEW", 64 * MIB)


def test_the_disk_as_it_is(tmp_path: Path, small: None) -> None:
    told: list[tuple[str, int, int]] = []
    figures = probe_disk(tmp_path, seconds=8, progress=lambda *what: told.append(what))
    assert list(tmp_path.iterdir()) == []
    assert figures.device == "" and figures.reader in ("uring", "threads", "sync")
    assert figures.scratch_bytes == 64 * MIB and figures.write_bytes_per_s > 0
    assert len(figures.cells) > 30
    assert {cell.block_bytes for cell in figures.cells} >= set(BLOCKS[:4])
    for cell in figures.cells:
        assert cell.bytes_per_s > 0 and 0 < cell.latency_s <= cell.latency_p99_s
    assert any("only 64.00 MiB" in warning for warning in figures.warnings)
    assert told[-1][0] == "reading" and told[-1][1] == told[-1][2]
    assert {what for what, *_ in told} == {"writing the scratch file", "reading"}
    assert DiskFigures.from_json(json.loads(json.dumps(figures.to_json()))) == figures


def test_a_modelled_device_is_measured_as_it_is_designed(tmp_path: Path, small: None) -> None:
    figures = probe_disk(tmp_path, device="ufs3", seconds=8)
    assert figures.device == "ufs3" and figures.reader == "ufs3(model)"
    assert any("modelled device ufs3" in warning for warning in figures.warnings)
    # Only what a busy machine cannot break: never faster than the design.
    for cell in figures.cells:
        designed = modelled_seconds("ufs3", cell.depth, cell.block_bytes)
        assert cell_seconds(cell) > 0.999 * designed
        assert cell.latency_s > 270e-6
    assert len(figures.cells) > 30


def test_memory_is_told_from_a_disk(small: None) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    figures = probe_disk("/dev/shm", seconds=1)
    assert any("lies in memory: every figure" in warning for warning in figures.warnings)


def await_free(folder: Path, size: int) -> None:
    """The kernel gives a ring's file back a little after the ring is closed."""
    deadline = time.monotonic() + 120
    while shutil.disk_usage(folder).free < size:
        assert time.monotonic() < deadline, "the scratch file must be gone, and is not"
        time.sleep(0.01)


def test_a_small_disk_gets_a_small_file_and_a_full_one_a_clear_error(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=140m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        figures = probe_disk(tmp_path, seconds=5)
        assert figures.scratch_bytes == 64 * MIB
        await_free(tmp_path, 139 * MIB)
        (tmp_path / "hog").write_bytes(bytes(20 * MIB))
        with pytest.raises(StorageError, match=r"must have 128\.0 MiB free .* got 120") as caught:
            probe_disk(tmp_path, seconds=1)
        assert caught.value.errno == errno.ENOSPC
        assert [path.name for path in tmp_path.iterdir()] == ["hog"]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_wrong_paths_and_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="must be an existing folder") as caught:
        probe_disk(tmp_path / "none")
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="must be an existing folder") as caught:
        probe_disk(tmp_path / "file")
    assert caught.value.errno == errno.ENOTDIR
    with pytest.raises(ConfigError, match="device must be empty or one of"):
        probe_disk(tmp_path, device="floppy")
    with pytest.raises(ConfigError, match="seconds must be positive"):
        probe_disk(tmp_path, seconds=0)


def test_a_folder_that_takes_no_file_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc is not writable even for root, and says that it has no room: look past that."""
    monkeypatch.setattr(probe_module, "SCRATCH_BYTES_MIN", 0)
    monkeypatch.setattr(probe_module.shutil, "disk_usage", lambda path: _Free(1 << 30))
    with pytest.raises(StorageError, match="/proc"):
        probe_disk("/proc", seconds=1)


class _Free:
    def __init__(self, free: int):
        self.free = free


class SlowDisk:
    """Stands in for the compiled probe: a disk of 20 MB/s that takes no O_DIRECT."""

    direct = in_memory = False
    alignment_bytes = 512
    reader = "threads"
    fallbacks = ("O_DIRECT is refused in '/slow'.",)

    def __init__(self, room: int = 1 << 40, error: int = errno.ENOSPC):
        self.filled_bytes = 0
        self.closed = False
        self.measured: list[tuple[int, int]] = []
        self._room, self._error = room, error

    def fill(self) -> tuple[int, float]:
        if self.filled_bytes >= self._room:
            raise StorageError(self._error, "session file: no")
        self.filled_bytes += 8 * MIB
        return 8 * MIB, 0.4

    def sync(self) -> float:
        return 0.1

    def measure(self, block: int, depth: int, seconds: float) -> tuple[float, float, float]:
        self.measured.append((block, depth))
        return 20e6, 1e-3, 2e-3

    def close(self) -> None:
        self.closed = True


def probe_fake(
    monkeypatch: pytest.MonkeyPatch, path: Path, disk: SlowDisk, seconds: float = 20
) -> DiskFigures:
    monkeypatch.setattr(probe_module, "_open", lambda *args: disk)
    monkeypatch.setattr(probe_module.shutil, "disk_usage", lambda path: _Free(1 << 40))
    return probe_disk(path, seconds=seconds)


def test_a_slow_disk_is_spared_the_longest_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = SlowDisk()
    figures = probe_fake(monkeypatch, tmp_path, disk)
    assert disk.closed
    assert (BLOCKS[-1], 1) in disk.measured and (BLOCKS[-1], 64) not in disk.measured
    assert any("were left out" in warning for warning in figures.warnings)
    assert "All figures are of buffered reads, through the page cache." in figures.warnings
    assert disk.fallbacks[0] in figures.warnings
    assert not figures.direct
    assert figures.write_bytes_per_s == pytest.approx(20.97e6, rel=0.02)


def test_however_little_time_there_is_enough_is_measured_for_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = probe_fake(monkeypatch, tmp_path, SlowDisk(), seconds=1e-9)
    assert figures.scratch_bytes == 8 * MIB
    assert len({cell.block_bytes for cell in figures.cells}) == 2
    assert DiskModel.fit(figures).bytes_per_s > 0
    assert any("only 8.00 MiB" in warning for warning in figures.warnings)
    assert any("69 of 77 sizes and depths were left out" in told for told in figures.warnings)


def test_a_disk_that_fills_up_meanwhile_is_measured_on_what_was_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = probe_fake(monkeypatch, tmp_path, SlowDisk(room=80 * MIB))
    assert figures.scratch_bytes == 80 * MIB
    assert any("became full" in warning for warning in figures.warnings)
    for disk in (SlowDisk(room=16 * MIB), SlowDisk(room=80 * MIB, error=errno.EIO)):
        with pytest.raises(StorageError, match="session file"):
            probe_fake(monkeypatch, tmp_path, disk)
        assert disk.closed


def test_ctrl_c_ends_it_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import signal, sys; from kvswap_torch.tuning.probe import probe_disk\n"
        # A test run in the background hands on that the signal is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n"
        "    probe_disk(sys.argv[1], progress=lambda what, *_: print(what, flush=True))\n"
        "except KeyboardInterrupt:\n"
        "    import os; print('stopped', [f for f in os.listdir('/proc/self/fd')\n"
        "        if sys.argv[1] in os.path.realpath('/proc/self/fd/' + f)], flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        while child.stdout.readline() != "reading\n":
            assert child.poll() is None
        child.send_signal(signal.SIGINT)
        rest = child.stdout.read()
        assert child.wait() == 0
    assert rest.count("reading\n") < 40  # of 78 cells
    assert rest.splitlines()[-1] == "stopped []"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", DEVICES)
def test_the_model_finds_the_design_of_a_device(device: str) -> None:
    latency, bandwidth, _ = DEVICES[device]
    model = fit_cells(modelled_cells(device))
    assert model.latency_s == pytest.approx(latency, rel=0.1)
    assert model.bytes_per_s == pytest.approx(bandwidth, rel=0.02)
    assert model.residual < 0.02
    for count, size in ((1, 4096), (50, 16384), (100, 32768), (13, 262144)):
        designed = modelled_seconds(device, count, size)
        assert model.seconds(count, size) == pytest.approx(designed, rel=0.2)


def test_the_model_finds_a_cost_of_each_read() -> None:
    def seconds(count: int, size: int) -> float:
        return 60e-6 + count * (8e-6 + size / 1e9)

    cells = [ReadCell(s, n, n * s / seconds(n, s), 0, 0) for s in BLOCKS for n in DEPTHS]
    model = fit_cells(cells)
    assert model.residual < 0.03
    assert model.read_s == pytest.approx(8e-6, rel=0.25)
    assert model.bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_more_reads_or_larger_ones_never_take_less() -> None:
    model = fit_cells(modelled_cells("emmc"))
    assert model.seconds(0, 4096) == 0
    times = [[model.seconds(n, s) for s in (0, 4096, 65536)] for n in (1, 2, 5, 64, 500)]
    assert all(row == sorted(row) for row in times)
    assert all(list(column) == sorted(column) for column in zip(*times, strict=True))


def test_models_are_kept_and_refused(tmp_path: Path) -> None:
    model = fit_cells(modelled_cells("nvme"))
    assert DiskModel.from_json(json.loads(json.dumps(model.to_json()))) == model
    with pytest.raises(ConfigError, match="at least 4 cells"):
        fit_cells(modelled_cells("nvme")[:3])
    with pytest.raises(ConfigError, match="bytes_per_s positive"):
        DiskModel(1e-5, 1e-4, 0.0)
    with pytest.raises(ConfigError, match="must be what DiskFigures.to_json"):
        DiskFigures.from_json({"cells": []})


def test_equal_figures_give_equal_bytes() -> None:
    def figures(noise: float) -> Any:
        cells = tuple(ReadCell(4096, 1, 1e8 / 3 + noise, 1e-4 / 3, 1e-3 / 3) for _ in range(2))
        return DiskFigures(cells, 1e9 / 3, True, "uring", "", 1 << 30, 512, 10.01, ("a",))

    assert json.dumps(figures(0).to_json()) == json.dumps(figures(1).to_json())
