"""Prints exact answers by skill and length, with the full cache, on held-out text.

An answer counts when the model's best guess is right at each of its tokens, the newline
included: that is what greedy decoding would have written. One document serves many questions:
its cache is cut back after each.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tools.reference_model.place import MODEL
from tools.reference_model.skills import SKILLS, Skill, make_sample
from tools.reference_model.tasks import Question, answer_turn, question_prompt
from tools.reference_model.texts import MissingTexts, load_texts

# A prefill in pieces bounds the memory of its activations.
CHUNK = 4096

app = typer.Typer(add_completion=False)


def wilson(right: int, asked: int) -> tuple[float, float]:
    """Interval of a share (Wilson 1927), 95 %."""
    z = 1.96
    if asked == 0:
        return 0.0, 1.0
    share = right / asked
    middle = (share + z * z / (2 * asked)) / (1 + z * z / asked)
    half = z / (1 + z * z / asked)
    half *= math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    return max(0.0, middle - half), min(1.0, middle + half)


class Reader:
    """A model that has read a document and answers questions about it."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "model.safetensors").exists():
            raise ValueError(f"evaluate: {folder} must hold model.safetensors; train a model first")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.cache = DynamicCache()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.encode(text))

    @torch.inference_mode()
    def read(self, document: str) -> None:
        """Fill a new cache with the document."""
        self.cache = DynamicCache()
        ids = torch.tensor([self.encode(document)])
        for chunk in ids.split(CHUNK, dim=1):
            self.model.model(input_ids=chunk, past_key_values=self.cache, use_cache=True)

    @torch.inference_mode()
    def answers(self, question: Question, keep: bool = False) -> bool:
        """Whether greedy decoding gives the answer; the cache is as before unless kept."""
        prompt = self.encode(question_prompt(question))
        answer = self.encode(answer_turn(question))
        ids = torch.tensor([prompt + answer])
        logits = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits
        best = logits[0, len(prompt) - 1 : -1].argmax(-1)
        if not keep:
            self.cache.crop(-ids.shape[1])
        return best.tolist() == answer


@lru_cache(maxsize=1)
def held_out_bodies() -> tuple[str, ...]:
    """What was never trained on."""
    return tuple(text.body for text in load_texts() if text.held_out)


def held_out_text(seed: int, characters: int) -> str:
    """A run of held-out text, beginning at a line."""
    texts = held_out_bodies()
    rng = np.random.default_rng(seed)
    joined = "\n".join(texts[i] for i in rng.permutation(len(texts)))
    first = int(rng.integers(len(joined) - characters))
    return joined[joined.index("\n", first) + 1 :][:characters]


def measure(
    reader: Reader,
    length: int,
    documents: int,
    skills: tuple[Skill, ...] = SKILLS,
    seed: int = 1000,
) -> dict[str, list[int]]:
    """Right answers and questions by skill, over so many documents of one length."""
    counts = {skill.name: [0, 0] for skill in skills}
    for number in track(range(documents), description=f"{length} tokens"):
        text = held_out_text(seed + number, 6 * length)
        document, asked = make_sample(seed + number, text, length, reader.count, skills)
        reader.read(document)
        # Turns are asked last: what they leave in the cache would help no one else.
        for item in sorted(asked, key=lambda item: item.skill.turns):
            counts[item.skill.name][0] += reader.answers(item.question, item.skill.turns)
            counts[item.skill.name][1] += 1
    return counts


def print_table(results: dict[str, dict[str, list[int]]], console: Console) -> None:
    table = Table(title="Exact answers, full cache, held-out text (95 % intervals)")
    table.add_column("skill")
    for length in results:
        table.add_column(f"{length}")
    for skill in SKILLS:
        cells = []
        for counts in results.values():
            right, asked = counts[skill.name]
            low, high = wilson(right, asked)
            cells.append(f"{right / max(asked, 1):.2f} ({low:.2f}-{high:.2f}, n={asked})")
        table.add_row(skill.name, *cells)
    console.print(table)


def parse_plan(lengths: str, documents: str) -> list[tuple[int, int]]:
    """Lengths and how many documents of each.

    Raises
    ------
    ValueError
        When they are not whole positive numbers, one count per length or one for all.
    """
    words = lengths.split(","), documents.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for row in words for word in row):
        raise ValueError(f"evaluate: numbers must be positive, got {lengths!r} and {documents!r}")
    sizes, counts = ([int(word) for word in row] for row in words)
    counts = counts * len(sizes) if len(counts) == 1 else counts
    if len(counts) != len(sizes):
        raise ValueError(f"evaluate: {len(sizes)} counts of documents must be given, got {counts}")
    return list(zip(sizes, counts, strict=True))


@app.command()
def main(
    model: Annotated[Path, typer.Option(help="folder of the model")] = MODEL,
    lengths: Annotated[str, typer.Option(help="tokens, with commas")] = "2048,8192,16384,32768",
    documents: Annotated[str, typer.Option(help="how many of each length")] = "16,16,10,8",
    seed: int = 1000,
    out: Annotated[Path | None, typer.Option(help="write counts as JSON")] = None,
) -> None:
    """Measure every skill at every length."""
    console = Console(width=140)
    try:
        reader = Reader(model)
        results = {}
        plan = parse_plan(lengths, documents)
        for length, count in plan:
            results[str(length)] = measure(reader, length, count, seed=seed)
            if out:
                out.write_text(json.dumps(results, indent=1) + "\n")
    except (ValueError, MissingTexts) as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    print_table(results, console)


if __name__ == "__main__":
    app()
