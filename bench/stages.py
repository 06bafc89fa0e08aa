"""Scoring in two stages (`SwapConfig.score_columns`): what of a choice stays, and what it costs.

    python -m bench.stages --model build/models/smollm2 --lengths 4096,8192 --out stages

What stays is told by the true queries of questions over documents with facts laid in; rows are
int8, scored by sum, projections from the document. Beside the share of the groups that scoring by
all columns chooses stand the attention held and the look-ups found, in parts of what that choice
has (see `kvswap_torch.tuning.recall`).

The cost is that of a step's choices alone, of a shape's layers, in one stage and in two by turns:
`bench/stages_bench.cpp`, built here. With one thread it is the processor's time. Needs g++ with
OpenMP, and what the library is built with.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from bench import machine
from bench.reading import REFERENCE, open_reading
from bench.score_stages import Kept, summarised
from bench.shapes import SHAPES
from kvswap_torch.methods.kvswap import kept_rows
from kvswap_torch.methods.two_stages import in_two_stages
from kvswap_torch.projection import flat_tokens, from_chunk, sum_over_heads
from kvswap_torch.tuning.look_ups import sources
from kvswap_torch.tuning.observe import Observed
from kvswap_torch.tuning.recall import Choice, Steps, decoded_positions
from kvswap_torch.tuning.samples import Sample

ROOT = Path(__file__).resolve().parents[1]
RANK = 32
CHOSEN = 100  # groups
STEPS = 64
SETTINGS = ((12, 0.05), (12, 0.1), (12, 0.2), (12, 0.4), (16, 0.1), (16, 0.2))
TIMED = ((12, 0.05), (12, 0.2))  # columns, share
CONTEXTS = (1 << 15, 1 << 17, 1 << 20)
Setting = tuple[int, float]


def measure_layer(seen: Observed, sample: Sample) -> dict[Setting, Kept]:
    """What each setting makes of one layer's choices."""
    positions = decoded_positions(len(sample.ids), sample.focus, STEPS)
    wanted = sources(sample.ids, positions)
    steps = Steps(seen, positions, Choice(groups_max=CHOSEN), wanted=wanted)
    keys, query = seen.keys[:, :, : sample.focus], seen.query[:, :, : sample.focus]
    key_side, query_side = from_chunk("query_aware", keys, query, RANK)
    rows = kept_rows(flat_tokens(seen.keys).float() @ key_side, "int8")
    low = sum_over_heads(seen.query[:, :, positions], seen.keys.shape[1]) @ query_side

    def by(columns: int) -> Any:
        scores = steps.largest(low[:, :columns] @ rows[:, :columns].T)
        return scores.masked_fill(~steps.choosable, float("-inf"))

    whole = by(RANK)
    by_all = steps.select(whole)
    is_chosen = steps.choosable.new_zeros(steps.choosable.shape).scatter_(1, by_all, True)

    def kept(setting: Setting) -> Kept:
        columns, share = setting
        group_tokens = steps.choice.group_tokens
        chosen = steps.select(in_two_stages(by(columns), whole, group_tokens, share, CHOSEN))
        return Kept(
            is_chosen.gather(1, chosen).float().mean().item(),
            steps.mass.gather(1, chosen).sum(1).mean().item(),
            steps.mass.gather(1, by_all).sum(1).mean().item(),
            steps.found(chosen).mean().item(),
            steps.found(by_all).mean().item(),
        )

    return {setting: kept(setting) for setting in SETTINGS}


def measure_choices(model: Path, length: int, documents: int, console: Console) -> Any:
    """A line for each setting."""
    calibrator, samples = open_reading(model, length, documents)
    layers: list[dict[Setting, Kept]] = []
    for sample in track(samples, f"reading {length:,}", console=console):
        calibrator.read(sample, lambda seen, of=sample: layers.append(measure_layer(seen, of)))
    return [
        {"model": model.resolve().name, "length": length, "columns": columns, "share": share}
        | summarised([layer[columns, share] for layer in layers])
        for columns, share in SETTINGS
    ]


def build(folder: Path) -> Path:
    """The C++ program beside this script."""
    program = folder / "stages_bench"
    rooms = ("kernels/cpu", "methods")
    sources = [path for room in rooms for path in sorted((ROOT / "csrc" / room).glob("*.cpp"))]
    sources += [ROOT / "csrc" / "device" / f"{name}.cpp" for name in ("device", "table_ring")]
    sources += sorted((ROOT / "csrc" / "device").glob("host_*.cpp"))
    names = ("kept_memory", "error_text", "io_thread")
    sources += [ROOT / "csrc" / "io" / f"{name}.cpp" for name in names]
    flags = ["-std=c++20", "-O3", "-fopenmp", "-DKVSWAP_HAS_HIGHWAY=1", f"-I{ROOT / 'csrc'}"]
    files = [str(path) for path in (ROOT / "bench" / "stages_bench.cpp", *sources)]
    subprocess.run(["g++", *flags, *files, "-o", str(program)], check=True)
    return program


def measure_times(program: Path, shape_name: str, threads: int) -> list[dict[str, Any]]:
    """A line for each setting and context; milliseconds: median and quartiles."""
    shape = SHAPES[shape_name]
    lines = []
    for columns, share in TIMED:
        words = (shape.layers, shape.kv_heads, shape.head_dim, columns, share, threads, *CONTEXTS)
        answer = subprocess.run(
            [str(program), *map(str, words)], check=True, capture_output=True, text=True
        ).stdout
        setting = {"shape": shape_name, "columns": columns, "share": share, "threads": threads}
        lines += [setting | json.loads(line) for line in answer.splitlines()]
    return lines


def main(
    model: Annotated[list[Path], typer.Option(help="folder of a model")] = [REFERENCE],  # noqa: B006
    lengths: Annotated[str, typer.Option(help="tokens of a document")] = "4096,16384",
    documents: Annotated[int, typer.Option(help="how many")] = 2,
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "small",
    threads: Annotated[int, typer.Option(help="that score")] = 1,
    program: Annotated[Path | None, typer.Option(help="built already; none: it is built")] = None,
    out: Annotated[str, typer.Option(help="name under bench/results; empty: none")] = "",
) -> None:
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as folder:
        times = measure_times(program or build(Path(folder)), shape, threads)
    choices = [
        line
        for each in model
        for length in map(int, lengths.split(","))
        for line in measure_choices(each, length, documents, console)
    ]
    results = {
        "machine": machine.describe("."),
        "rank": RANK,
        "documents": documents,
        "groups_chosen": CHOSEN,
        "choices": choices,
        "times": times,
    }
    console.print_json(data={"choices": choices, "times": times})
    if out:
        console.print(f"wrote {machine.write(out, results).name}")


if __name__ == "__main__":
    typer.run(main)
