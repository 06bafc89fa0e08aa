"""One runner for all benchmarks: ``python -m bench NAME [ARGS]``; without a name it lists them."""

from __future__ import annotations

import runpy
import sys
from typing import NamedTuple


class Benchmark(NamedTuple):
    """What it measures, and what a run with the arguments of docs/benchmarks costs on two cores."""

    about: str
    cost: str


BENCHMARKS = {
    "side_by_side": Benchmark("ms per step beside other caches and engines", "2 to 4 min a cell"),
    "prefill": Benchmark("seconds to read a prompt", "5 to 10 min"),
    "turns": Benchmark("seconds to a second question's first token", "3 min"),
    "opening": Benchmark("seconds to open a saved cache in a new process", "1 min"),
    "serving": Benchmark("seconds to the first token from kvswap serve", "1 min"),
    "real_speed": Benchmark("ms per token of a real model, by settings", "30 s each; a model"),
    "long_decode": Benchmark("ms per token and drift over 16K decoded tokens", "5 min a method"),
    "reads": Benchmark("bytes, requests and a modelled disk's ms a token", "15 s a method"),
    "cluster_steps": Benchmark("clusters that are read and changed, step by step", "1 min"),
    "quality": Benchmark("right answers beside the full cache's", "minutes to hours"),
    "compare": Benchmark("methods on tasks, beside the full cache", "says so first; a model"),
    "recorded": Benchmark("records what a model selects, for side_by_side", "1 min; a model"),
    "weights": Benchmark("ms of a linear layer, in bf16, int8 and int4", "3 min"),
    "offload": Benchmark("ms of a token with layers on disk, beside accelerate's", "2 min a model"),
    "tuner": Benchmark("the tuner's predictions and its choice, measured", "20 min"),
    "reader": Benchmark("random reads beside fio", "3 min; fio"),
    "gpu": Benchmark("each op on a GPU against its bandwidth", "1 min; a GPU"),
    "gpu_decode": Benchmark("ms per step on a GPU", "2 min; a GPU"),
    "table": Benchmark("writes tables and plots of the docs from results", "5 s"),
}


def listing() -> str:
    names, costs = (max(map(len, each)) for each in zip(*_columns(), strict=True))
    lines = [__doc__.strip(), ""]
    for name, (about, cost) in BENCHMARKS.items():
        lines.append(f"  {name:{names}}  {cost:{costs}}  {about}")
    return "\n".join([*lines, "", "python -m bench NAME --help explains its arguments."])


def _columns() -> list[tuple[str, str]]:
    return [(name, each.cost) for name, each in BENCHMARKS.items()]


def main(arguments: list[str]) -> int:
    """Runs one; 0 as well for a list that was asked for, 2 for a name that there is not."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *rest = arguments
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        print(f"bench: must be one of {known}, got {name!r}", file=sys.stderr)
        return 2
    sys.argv = [f"bench {name}", *rest]
    runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
