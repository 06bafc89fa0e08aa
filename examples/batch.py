"""The same question to many documents, over as many processes and machines as torchrun starts.

    python -m examples.batch --model DIR --question "Who wrote this?" --out answers.jsonl docs/*.txt
    torchrun --standalone --nproc-per-node 2 -m examples.batch ...
    torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m ...

Each process has the whole model, takes its share of the documents and appends a line of JSON an
answer to a file of its own, ``answers.jsonl.RANK``. A run that was stopped goes on where it
stopped, with any number of processes: what any of these files answers already is skipped, and a
line that was half written is taken out and answered again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm


@dataclass(frozen=True)
class Task:
    """What is asked of every document.

    Parameters
    ----------
    model
        Folder of a Hugging Face model.
    question
        Asked of each document apart.
    path
        Folder on the disk that holds the KV cache.
    kv_memory
        Most memory of a cache, like ``"256MiB"``; None: the defaults.
    max_new_tokens
        Longest answer.
    """

    model: str
    question: str
    path: str = "."
    kv_memory: str | None = None
    max_new_tokens: int = 100


class Answerer:
    """A model and a tokenizer that answer one document after another.

    Loading happens once, so that a worker (this script's, or one of Ray Data's) keeps it.
    """

    def __init__(self, task: Task):
        from kvswap_torch.cli.load import load_model, load_tokenizer
        from kvswap_torch.cli.prompt import make_prompt

        self.task = task
        self.model, self.tokenizer = load_model(task.model), load_tokenizer(task.model)
        self.prompt = make_prompt("auto", self.tokenizer)

    def __call__(self, document: str) -> dict[str, Any]:
        """The answer and what it took, ready for JSON.

        Parameters
        ----------
        document
            Path of a text file, UTF-8.
        """
        from kvswap_torch import KVSwapCache
        from kvswap_torch.cli.conversation import Conversation

        ids = self.prompt.prefix_ids(self.tokenizer, Path(document).read_text(encoding="utf-8"))
        with KVSwapCache(
            self.model, path=self.task.path, kv_memory_bytes=self.task.kv_memory
        ) as cache:
            conversation = Conversation(self.model, self.tokenizer, cache, self.prompt)
            seconds = conversation.read(ids, 4096, lambda tokens: None)
            turn = conversation.ask(self.task.question, self.task.max_new_tokens, lambda text: None)
        return {
            "document": document,
            "question": self.task.question,
            "answer": turn.answer.strip(),
            "tokens": len(ids),
            "read_seconds": round(seconds, 3),
        }


def answered(out: Path, question: str) -> set[str]:
    """Documents that an earlier run has answered, whatever number of processes it had."""
    done = set()
    for file in out.parent.glob(f"{out.name}.*"):
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the line that was being written
                told = json.loads(line)
                if told.get("question") == question:
                    done.add(told["document"])
    return done


def answer_all(task: Task, documents: Sequence[str], out: Path) -> Iterator[dict[str, Any]]:
    """Answers `documents` and appends each answer to `out` as soon as it is there."""
    if not documents:
        return
    answer = Answerer(task)
    with out.open("a", encoding="utf-8") as file:
        for document in documents:
            told = answer(document)
            file.write(json.dumps(told) + "\n")
            file.flush()
            yield told


def drop_half_lines(out: Path, rank: int, size: int) -> None:
    """Takes out what a run that was killed had written of its last lines.

    Each process does it for its own file and, so that each is done once, for some of those that an
    earlier run had more of.
    """
    for file in out.parent.glob(f"{out.name}.*"):
        number = file.suffix[1:]
        if number.isdecimal() and int(number) % size == rank:
            os.truncate(file, file.read_bytes().rfind(b"\n") + 1)


def share(documents: Sequence[str]) -> tuple[int, list[str]]:
    """This process's number and its share of the documents."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, list(documents)
    from accelerate import PartialState

    state = PartialState(cpu=True)
    with state.split_between_processes(list(documents)) as mine:
        return state.process_index, list(mine)


def main(
    documents: Annotated[list[str], typer.Argument(help="text files, UTF-8")],
    model: Annotated[str, typer.Option(help="folder of a Hugging Face model")],
    question: Annotated[str, typer.Option(help="asked of each document")],
    out: Annotated[Path, typer.Option(help="answers; each process adds its number")],
    path: Annotated[str, typer.Option(help="folder on the disk for the KV cache")] = ".",
    kv_memory: Annotated[str | None, typer.Option(help="most memory of a cache")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="longest answer, in tokens")] = 100,
) -> None:
    task = Task(model, question, path, kv_memory, max_new_tokens)
    rank, mine = share(documents)
    drop_half_lines(out, rank, int(os.environ.get("WORLD_SIZE", "1")))
    done = answered(out, question)  # by whichever process; shares are of all documents alike
    mine = [document for document in mine if document not in done]
    file = out.with_name(f"{out.name}.{rank}")
    for _ in tqdm(answer_all(task, mine, file), total=len(mine), disable=rank != 0):
        pass


if __name__ == "__main__":
    typer.run(main)
