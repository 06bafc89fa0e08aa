"""Records which groups a model that reads chooses, step by step, for `decode.py --trace`.

    python -m bench.record_trace --context 32000 --group-tokens 8

The reference model reads a document with facts laid in and answers questions about it with the
cache on disk; the groups that each layer chose at each decoding step, of as many tokens together
as the model's config selects, are written to bench/results/trace_<context>_g<G>.json:
``{"group_tokens", "context", "overlap", "right", "steps"}``, steps as ``[step][layer][group]``.
`overlap` is the share of a step's groups that the step before chose, too; `right` how many of the
questions were answered, ``[right, asked]``.
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

from bench.machine import RESULTS
from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.cli.load import load_model, load_tokenizer
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


def with_groups(config: SwapConfig, group_tokens: int) -> SwapConfig:
    """As many tokens selected and kept in pages, in groups of `group_tokens`; 0: as they are."""
    ratio = (group_tokens or config.group_tokens) / config.group_tokens
    return dataclasses.replace(
        config,
        group_tokens=round(config.group_tokens * ratio),
        groups_max=round(config.groups_max / ratio),
        pages_max=round(config.pages_max / ratio),
        select_queries_max=1,
    )


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
    group_tokens: Annotated[int, typer.Option(help="G; 0: as the model's config has it")] = 0,
    path: Annotated[Path, typer.Option(help="folder on the disk to use")] = Path("build"),
) -> None:
    tokenizer = load_tokenizer(str(model))
    network = load_model(str(model), "bfloat16")

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    text, questions = make_document(load_source(source), 3, context, lambda t: len(encode(t)))
    ids = encode(text)
    config = with_groups(SwapConfig.load(model / "kvswap.json"), group_tokens)
    with KVSwapCache(network, path=path, config=config) as cache, torch.inference_mode():
        for begin in range(0, len(ids), CHUNK):
            part = torch.tensor([ids[begin : begin + CHUNK]])
            network(input_ids=part, past_key_values=cache, logits_to_keep=1)
        recorder = Recorder(cache)
        right = 0
        for question in questions:
            asked = encode(question_prompt(question))
            answer = tokenizer.decode(decode(network, cache, asked, answer_tokens, recorder))
            right += answer.strip().startswith(question.answer)
        hit_rate = cache.stats().hit_rate
    trace = {
        "group_tokens": config.group_tokens,
        "context": len(ids),
        "overlap": round(overlap(recorder.steps), 3),
        "right": [right, len(questions)],
        "steps": recorder.steps,
    }
    out = RESULTS / f"trace_{context}_g{config.group_tokens}.json"
    out.write_text(json.dumps(trace, separators=(",", ":")) + "\n")
    print(
        f"{out.name}: {len(recorder.steps)} steps, overlap {trace['overlap']:.0%}, "
        f"hit rate {hit_rate:.0%} with {config.pages_max} pages, {right} of {len(questions)} right"
    )


if __name__ == "__main__":
    typer.run(main)
