"""Records which groups a model that reads chooses, step by step, for `decode.py --trace`.

    python -m bench.record_trace --context 32000

The reference model reads a document with facts laid in and answers questions about it with the
cache on disk; the groups that each layer chose at each decoding step are written to
bench/results/trace_<context>.json: ``{"group_tokens", "context", "overlap", "steps"}``,
steps as ``[step][layer][group]``. `overlap` is the share of a step's groups that the step before
chose, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.machine import RESULTS
from kvswap_torch import KVSwapCache, SwapConfig
from tools.reference_model.documents import SOURCES, load_source, make_document
from tools.reference_model.tasks import question_prompt

MODEL = Path("examples/reference_model")
CHUNK = 4096


class Recorder:
    """Takes a session's choices after each decoding step of a model."""

    def __init__(self, cache: KVSwapCache):
        self.session = cache.driver.session
        self.layers = cache.driver.parts.shape.layers
        self.steps: list[list[list[int]]] = []

    def take(self) -> None:
        choices = [self.session.last_selection(layer) for layer in range(self.layers)]
        if all(chosen and chosen[0] for chosen in choices):
            self.steps.append([list(chosen[0]) for chosen in choices])


@torch.inference_mode()
def decode(model: Any, cache: Any, ids: list[int], steps: int, recorder: Recorder) -> list[int]:
    """Reads `ids` one token at a time, then generates greedily; every step is recorded."""
    generated: list[int] = []
    for step in range(len(ids) + steps):
        token = ids[step] if step < len(ids) else generated[-1]
        logits = model(input_ids=torch.tensor([[token]]), past_key_values=cache).logits
        generated.append(int(logits[0, -1].argmax()))
        recorder.take()
    return generated[len(ids) - 1 :]


def overlap(steps: list[list[list[int]]]) -> float:
    """Mean share of a step's groups that the step before had chosen, over layers."""
    shares = [
        len(set(now) & set(before)) / len(now)
        for previous, current in itertools.pairwise(steps)
        for before, now in zip(previous, current, strict=True)
    ]
    return statistics.mean(shares)


def main(
    context: Annotated[int, typer.Option(help="tokens of document")] = 32_000,
    model: Annotated[Path, typer.Option(help="folder of the model")] = MODEL,
    source: Annotated[str, typer.Option(help=f"one of {', '.join(SOURCES)}")] = SOURCES[0],
    answer_tokens: Annotated[int, typer.Option(help="generated after each question")] = 12,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    text, questions = make_document(load_source(source), 3, context, lambda t: len(encode(t)))
    ids = encode(text)
    config = dataclasses.replace(SwapConfig.load(model / "kvswap.json"), select_queries_max=1)
    with KVSwapCache(network, path=path, config=config) as cache, torch.inference_mode():
        for begin in range(0, len(ids), CHUNK):
            part = torch.tensor([ids[begin : begin + CHUNK]])
            network(input_ids=part, past_key_values=cache, logits_to_keep=1)
        recorder = Recorder(cache)
        for question in questions:
            decode(network, cache, encode(question_prompt(question)), answer_tokens, recorder)
        hit_rate = cache.stats().hit_rate
    trace = {
        "group_tokens": config.group_tokens,
        "context": len(ids),
        "overlap": round(overlap(recorder.steps), 3),
        "steps": recorder.steps,
    }
    out = RESULTS / f"trace_{context}.json"
    out.write_text(json.dumps(trace, separators=(",", ":")) + "\n")
    print(
        f"{out.name}: {len(recorder.steps)} steps, overlap {trace['overlap']:.0%}, "
        f"hit rate {hit_rate:.0%} with {config.pages_max} pages"
    )


if __name__ == "__main__":
    typer.run(main)
