"""One model over several processes: tokens per second, and bytes that go between them.

    python -m bench.parallel --tokens 16384 --out parallel

A document is read and six questions about it are answered, by one process, by two that share the
heads (tensor parallel), and by two that share the layers (pipeline parallel), in turn for each
round; each round has another document. The processes talk by gloo over the loopback of a network
namespace of their own, so that the kernel's counters hold their bytes and nobody else's; where a
namespace cannot be had, bytes are not told. ``--delay-ms`` delays each packet there, as a network
does, where the kernel has netem. Both processes share this machine's cores and each uses one
thread, as does the single process: what is measured is what sharing costs, not what two machines
gain. With ``--covering`` the budget covers the context, and tokens must equal one process's;
otherwise each chooses for its own part.
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
    tensor: int,
    pipeline: int,
    tokens: int,
    new_tokens: int,
    covering: bool,
    document: int,
    folder: Path,
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

    source = load_source(SOURCES[document % len(SOURCES)])
    text, questions = make_document(source, 1 + document, tokens, count)
    read = tokenizer(text, return_tensors="pt")["input_ids"]
    config = SwapConfig.load(MODEL / "kvswap.json")
    if covering:
        groups = tokens // 4 + 100
        config = SwapConfig(group_tokens=4, groups_max=groups, pages_max=groups)
    with KVSwapCache(model, path=folder, config=config) as cache, torch.inference_mode():
        start, sent = time.perf_counter(), loopback_bytes()
        for piece in read.split(4096, 1):
            model(input_ids=piece, past_key_values=cache, logits_to_keep=1)
        prefill_seconds, prefill_bytes = time.perf_counter() - start, loopback_bytes() - sent
        answers, seconds, bytes_sent = [], 0.0, 0
        for question in questions:
            asked = tokenizer(f"\nQuestion: {question.text}\nAnswer:", return_tensors="pt")
            ids = torch.cat([read, asked["input_ids"]], 1)
            start, sent = time.perf_counter(), loopback_bytes()
            out = model.generate(
                ids,
                past_key_values=cache,
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
            )
            seconds += time.perf_counter() - start
            bytes_sent += loopback_bytes() - sent
            answers.append(out[0, ids.shape[1] :].tolist())
            cache.crop(read.shape[1] - cache.get_seq_length())
    if os.environ.get("RANK", "0") != "0":
        return
    texts = [tokenizer.decode(ids) for ids in answers]
    told = {
        "tokens": read.shape[1],
        "prefill_seconds": prefill_seconds,
        "decode_tokens_per_second": new_tokens * len(questions) / seconds,
        "prefill_bytes_sent": prefill_bytes,
        "bytes_sent_per_token": bytes_sent / new_tokens / len(questions),
        "ids": answers,
        "right": sum(q.answer in t for q, t in zip(questions, texts, strict=True)),
        "asked": len(questions),
    }
    (folder / "told.json").write_text(json.dumps(told))


def run(
    layout: tuple[int, int],
    tokens: int,
    new_tokens: int,
    covering: bool,
    delay_ms: float,
    document: int,
) -> dict[str, Any]:
    tensor, pipeline = layout
    with tempfile.TemporaryDirectory(dir="build") as folder:
        code = (
            "from pathlib import Path; from bench.parallel import work; "
            f"work({tensor}, {pipeline}, {tokens}, {new_tokens}, {covering}, {document}, "
            f"Path({folder!r}))"
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
    for document in track(range(rounds), description="rounds", console=console):
        for name, layout in LAYOUTS.items():
            taken[name].append(run(layout, tokens, new_tokens, covering, delay_ms, document))
    alone = [one["ids"] for one in taken["one process"]]
    medians: dict[str, dict[str, Any]] = {}
    for name, runs in taken.items():
        same = sum(
            ours == theirs
            for one, ids in zip(runs, alone, strict=True)
            for ours, theirs in zip(one["ids"], ids, strict=True)
        )
        medians[name] = {
            key: statistics.median(one[key] for one in runs)
            for key in runs[0]
            if key not in ("ids", "right", "asked")
        }
        medians[name] |= {key: sum(one[key] for one in runs) for key in ("right", "asked")}
        medians[name]["same"] = same
    if covering and not all(row["same"] == row["asked"] for row in medians.values()):
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
            f"{row['right']} of {row['asked']}",
            f"{row['same']} of {row['asked']}",
        )
    console.print(table)
    if out:
        console.print(machine.write(out, {"machine": machine.describe("."), "medians": medians}))


if __name__ == "__main__":
    typer.run(main)
