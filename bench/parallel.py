"""One model over several processes: tokens per second, and bytes that go between them.

    python -m bench.parallel --tokens 16384 --out parallel

A document is read and then answered from, by one process, by two that share the heads (tensor
parallel), and by two that share the layers (pipeline parallel), in turn for each round. The
processes talk by gloo over the loopback of a network namespace of their own, so that the kernel's
counters hold their bytes and nobody else's; where a namespace cannot be had, bytes are not told.
``--delay-ms`` delays each packet there, as a network does, where the kernel has netem. Both
processes share this machine's cores and each uses one thread, as does the single process: what is
measured is what sharing costs, not what two machines gain. With ``--covering`` the budget covers
the context, and tokens must equal one process's; otherwise each chooses for its own part.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import machine
from kvswap_torch import KVSwapCache, SwapConfig
from tools.reference_model.documents import SOURCES, load_source, make_document

MODEL = Path("examples/reference_model")
LAYOUTS = {"one process": (1, 1), "tensor parallel 2": (2, 1), "pipeline 2": (1, 2)}


def loopback_bytes() -> int:
    """Bytes sent over the loopback of this network namespace so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def work(
    tensor: int, pipeline: int, tokens: int, new_tokens: int, covering: bool, folder: Path
) -> None:
    """One process's part; the first one writes what it measured."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(1)
    split: dict[str, Any] = {}
    if tensor * pipeline > 1:
        split["distributed_config"] = DistributedConfig(tp_size=tensor, pp_size=pipeline)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, **split).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    text, questions = make_document(load_source(SOURCES[0]), 1, tokens, count)
    ids = tokenizer(text + f"\nQuestion: {questions[0].text}\nAnswer:", return_tensors="pt")
    config = SwapConfig.load(MODEL / "kvswap.json")
    if covering:
        groups = tokens // 4 + 100
        config = SwapConfig(group_tokens=4, groups_max=groups, pages_max=groups)
    with KVSwapCache(model, path=folder, config=config) as cache, torch.inference_mode():
        marks = [(time.perf_counter(), loopback_bytes())]
        for piece in ids["input_ids"][:, :-1].split(4096, 1):
            model(input_ids=piece, past_key_values=cache, logits_to_keep=1)
        marks.append((time.perf_counter(), loopback_bytes()))
        out = model.generate(
            **ids,
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
        )
        marks.append((time.perf_counter(), loopback_bytes()))
    if os.environ.get("RANK", "0") != "0":
        return
    (start, sent), (read, sent_reading), (done, sent_all) = marks
    answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    told = {
        "tokens": ids["input_ids"].shape[1],
        "prefill_seconds": read - start,
        "decode_tokens_per_second": new_tokens / (done - read),
        "prefill_bytes_sent": sent_reading - sent,
        "bytes_sent_per_token": (sent_all - sent_reading) / new_tokens,
        "ids": out[0, ids["input_ids"].shape[1] :].tolist(),
        "is_right": questions[0].answer in answer,
    }
    (folder / "told.json").write_text(json.dumps(told))


def run(
    layout: tuple[int, int], tokens: int, new_tokens: int, covering: bool, delay_ms: float
) -> dict[str, Any]:
    tensor, pipeline = layout
    with tempfile.TemporaryDirectory(dir="build") as folder:
        code = (
            "from pathlib import Path; from bench.parallel import work; "
            f"work({tensor}, {pipeline}, {tokens}, {new_tokens}, {covering}, Path({folder!r}))"
        )
        size = tensor * pipeline
        worker = Path(folder) / "worker.py"
        worker.write_text(f"import sys; sys.path.insert(0, '.')\n{code}\n")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(size), str(worker)]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*_namespace(delay_ms), *command], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"bench.parallel: {layout} failed:\n{done.stdout}{done.stderr}")
        return json.loads((Path(folder) / "told.json").read_text())


def _namespace(delay_ms: float) -> list[str]:
    """What starts a command in a network of its own; nothing where that is not allowed."""
    if not can_isolate():
        if delay_ms:
            raise SystemExit("bench.parallel: --delay-ms needs a network namespace (root)")
        return []
    delay = f"tc qdisc add dev lo root netem delay {delay_ms}ms && " if delay_ms else ""
    return ["unshare", "--net", "sh", "-c", f'ip link set lo up && {delay}exec "$0" "$@"']


def can_isolate() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    probe = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    return subprocess.run(probe, capture_output=True).returncode == 0


def main(
    tokens: Annotated[int, typer.Option(help="length of the document")] = 16_384,
    new_tokens: Annotated[int, typer.Option(help="tokens generated")] = 64,
    rounds: Annotated[int, typer.Option(help="runs of each, in turn")] = 3,
    covering: Annotated[bool, typer.Option(help="attend everything: tokens equal")] = False,
    delay_ms: Annotated[float, typer.Option(help="delay of each packet, by netem")] = 0,
    out: Annotated[str, typer.Option(help="name of the result; empty: none")] = "",
) -> None:
    console = Console()
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in LAYOUTS}
    for _ in track(range(rounds), description="rounds", console=console):
        for name, layout in LAYOUTS.items():
            taken[name].append(run(layout, tokens, new_tokens, covering, delay_ms))
    alone = taken["one process"][0]["ids"]
    medians: dict[str, dict[str, Any]] = {}
    for name, runs in taken.items():
        same = [one.pop("ids") == alone for one in runs]
        medians[name] = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
        medians[name] |= {"is_right": all(one["is_right"] for one in runs), "is_same": all(same)}
    if covering and not all(row["is_same"] for row in medians.values()):
        raise SystemExit(f"bench.parallel: tokens must equal one process's, got {medians}")
    table = Table(title=f"{tokens:,} tokens, medians of {rounds}")
    for heading in (
        "",
        "prefill s",
        "tokens/s",
        "MB sent in prefill",
        "KB sent a token",
        "right",
        "same",
    ):
        table.add_column(heading)
    for name, row in medians.items():
        table.add_row(
            name,
            f"{row['prefill_seconds']:.1f}",
            f"{row['decode_tokens_per_second']:.1f}",
            f"{row['prefill_bytes_sent'] / 1e6:.1f}" if can_isolate() else "-",
            f"{row['bytes_sent_per_token'] / 1e3:.1f}" if can_isolate() else "-",
            str(row["is_right"]),
            str(row["is_same"]),
        )
    console.print(table)
    if out:
        console.print(machine.write(out, {"machine": machine.describe("."), "medians": medians}))


if __name__ == "__main__":
    typer.run(main)
