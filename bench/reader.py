"""Our reader against fio: the same file, block size and depth, both with O_DIRECT and io_uring.

    python -m bench reader --path /fast/disk

Runs are paired and alternate who goes first, so that a slower minute of the machine hits both;
the figure is the ratio of the medians. Many short pairs beat few long ones where the disk has a
rate limit with bursts, as virtual disks do. Needs fio, g++ and liburing's headers.
"""

import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench import machine

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results/reader.json"
BLOCKS = (4096, 16384, 65536)
TARGET_RATIO = 0.95


class ReaderBench:
    """The C++ program beside this script, driven by one line a command."""

    def __init__(self, folder: pathlib.Path) -> None:
        program = folder / "reader_bench"
        sources = [ROOT / "bench/reader_bench.cpp", *sorted((ROOT / "csrc/io").glob("*.cpp"))]
        flags = ["-std=c++20", "-O2", "-DKVSWAP_HAS_URING=1", f"-I{ROOT / 'csrc'}"]
        subprocess.run(
            ["g++", *flags, *map(str, sources), "-luring", "-lpthread", "-o", str(program)],
            check=True,
        )
        self._process = subprocess.Popen(
            [str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *words: object) -> dict:
        print(*words, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"reader_bench ended with status {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def run_fio(path: str, block: int, depth: int, seconds: float, file_bytes: int) -> dict:
    """Random reads by fio; MB/s and CPU seconds per GB."""
    command = [
        "fio", "--name=reader", f"--filename={path}", "--readonly", "--rw=randread", "--direct=1",
        "--ioengine=io_uring", f"--iodepth={depth}", f"--bs={block}", f"--size={file_bytes}",
        "--norandommap", "--time_based", f"--runtime={seconds}", "--output-format=json",
    ]  # fmt: skip
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    job = json.loads(report[report.index("{") :])["jobs"][0]
    gigabytes = job["read"]["io_bytes"] / 1e9
    cpu_share = (job["usr_cpu"] + job["sys_cpu"]) / 100
    return {
        "mb_per_second": job["read"]["bw_bytes"] / 1e6,
        "cpu_seconds_per_gb": cpu_share * job["job_runtime"] / 1000 / gigabytes,
    }


def measure_pairs(bench: ReaderBench, path: str, block: int, options: dict) -> dict:
    """Alternating runs of both on one block size."""
    depth, seconds = options["depth"], options["seconds"]

    def ours() -> dict:
        return bench.ask("stream", "uring", block, depth, seconds)

    def fio() -> dict:
        return run_fio(path, block, depth, seconds, options["file_bytes"])

    runs = {"ours": [], "fio": []}
    for repeat in range(options["repeats"]):
        order = [("ours", ours), ("fio", fio)]
        for name, run in order if repeat % 2 == 0 else reversed(order):
            runs[name].append(run())

    def median(name: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[name])

    pairs = zip(runs["ours"], runs["fio"], strict=True)
    return {
        "block_bytes": block,
        "ours_mb_per_second": median("ours", "mb_per_second"),
        "fio_mb_per_second": median("fio", "mb_per_second"),
        "ratio": median("ours", "mb_per_second") / median("fio", "mb_per_second"),
        "ratio_of_pairs": statistics.median(
            one["mb_per_second"] / other["mb_per_second"] for one, other in pairs
        ),
        "ours_cpu_seconds_per_gb": median("ours", "cpu_seconds_per_gb"),
        "fio_cpu_seconds_per_gb": median("fio", "cpu_seconds_per_gb"),
        "runs": runs,
    }


def print_table(console: Console, streams: list[dict]) -> None:
    table = Table("bytes", "ours MB/s", "fio MB/s", "of pairs", "ours CPU s/GB", "fio CPU s/GB")
    for row in streams:
        table.add_row(
            str(row["block_bytes"]),
            f"{row['ours_mb_per_second']:.0f}",
            f"{row['fio_mb_per_second']:.0f}",
            f"{row['ratio_of_pairs']:.3f}",
            f"{row['ours_cpu_seconds_per_gb']:.3f}",
            f"{row['fio_cpu_seconds_per_gb']:.3f}",
        )
    console.print(table)


def main(
    path: Annotated[pathlib.Path, typer.Option(help="directory on the disk to measure")],
    file_mib: Annotated[int, typer.Option(help="size of the file, in MiB")] = 2048,
    depth: Annotated[int, typer.Option(help="reads in flight")] = 64,
    seconds: Annotated[float, typer.Option(help="length of one run")] = 0.8,
    repeats: Annotated[int, typer.Option(help="pairs of runs a block size")] = 15,
    output: Annotated[pathlib.Path, typer.Option(help="where the JSON goes")] = RESULTS,
) -> None:
    """Measure the io_uring reader against fio and write the ratios of the medians."""
    for program in ("fio", "g++"):
        if shutil.which(program) is None:
            raise SystemExit(f"reader: {program} must be installed, it is not in PATH")
    console = Console()
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()
    described = machine.describe(path) | {"fio": version}
    options = {
        "depth": depth, "seconds": seconds, "repeats": repeats, "file_bytes": file_mib << 20,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        bench = ReaderBench(pathlib.Path(folder))
        file = bench.ask("create", path, options["file_bytes"])
        if not file["direct"]:
            raise SystemExit(f"reader: '{path}' must take O_DIRECT, it does not; choose another")
        streams = [measure_pairs(bench, file["path"], block, options) for block in BLOCKS]
        bench.close()
    print_table(console, streams)
    report = {"machine": described, "target_ratio": TARGET_RATIO, "streams": streams}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    missed = [row["block_bytes"] for row in streams if row["ratio"] < TARGET_RATIO]
    if missed:
        console.print(f"below {TARGET_RATIO} of fio at blocks of {missed} bytes")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
