"""What each of the users brings along, types and must come to."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.first_hour.machine import Host, Machine
from tests.first_hour.pdf import book_pdf
from tests.first_hour.typist import PAGES, Typist, WentWrongError, must_say
from tests.packaging.run_docs import ROOT, blocks
from tools.real_model.source import RealModelError, fetch

MODEL = ROOT / "examples" / "reference_model"
QUESTION = "What is the secret of the amber falcon?"
ANSWER = "copper lantern"
BOOK_CHARACTERS = 20_000
SHORT_CHARACTERS = 5_000  # for a model that loses a fact in a longer text
GGUF_FOLDER = ROOT / "build" / "models" / "downloads"


@dataclass(frozen=True)
class Given:
    """A wheel made from this tree, the torch that it was made for, and where a reader types."""

    wheel: Path
    torch: str
    machine: Machine = field(default_factory=Host)

    def words(self) -> dict[str, str]:
        """Of every page that installs a wheel."""
        return {
            "kvswap_torch-*.whl": str(self.wheel),
            "pip install torch": f"pip install -q {self.torch}",
            "pip install ": "pip install -q ",
        }


def book(folder: Path, characters: int = BOOK_CHARACTERS) -> None:
    """A manual with a fact in its middle."""
    text = (MODEL / "documents" / "perl_operators.txt").read_text(encoding="utf-8")
    lines = text[:characters].splitlines()
    lines.insert(len(lines) // 2, f"The secret of the amber falcon is {ANSWER}.")
    (folder / "book.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def laptop(folder: Path, given: Given) -> Typist:
    """A document of one's own, read once and asked: as text, as Markdown and as a PDF."""
    book(folder, SHORT_CHARACTERS)
    (folder / "book.txt").rename(folder / "notes.md")
    book(folder)
    (folder / "book.pdf").write_bytes(book_pdf((folder / "book.txt").read_text("utf-8")))
    return _over_a_book("laptop", folder, given, {"8000": str(_free_port())})


def few_bits(folder: Path, given: Given) -> Typist:
    """The same with weights of four bits."""
    return _over_a_book("few-bits", folder, given)


def gguf(folder: Path, given: Given) -> Typist:
    """A model that others trained, as one file."""
    GGUF_FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        model = fetch(GGUF_FOLDER, print)
    except RealModelError as error:
        raise WentWrongError(str(error)) from error
    own = {"--model MODEL.gguf": f"--model {model}"}
    return _over_a_book("gguf", folder, given, own, SHORT_CHARACTERS)


def _over_a_book(
    page: str, folder: Path, given: Given, more: dict[str, str] | None = None,
    characters: int = BOOK_CHARACTERS,
) -> Typist:  # fmt: skip
    book(folder, characters)
    own = {"Who tells it?": QUESTION}
    if "--model DIR" in _page(page):
        own["--model DIR"] = f"--model {MODEL}"
    words = _pip_once(given.words()) | own | (more or {})
    words.pop("kvswap_torch-*.whl")
    wheel = {"$(ls kvswap_torch-*.whl)": str(given.wheel), "kvswap_torch-*.whl": str(given.wheel)}
    words = {name: word for name, word in wheel.items() if name in _page(page)} | words
    reader = Typist(page, folder, words, given.machine)
    try:
        _read(reader)
    finally:
        reader.give_up()
    return reader


def _page(page: str) -> str:
    return (PAGES / f"{page}.md").read_text(encoding="utf-8")


def _read(reader: Typist) -> None:
    for command in reader.unread():
        if "piped.kvswap" in command and shutil.which("pdftotext") is None:
            # The page has another way, which is typed.
            print(f"left out, there is no pdftotext: {command}", flush=True)
            continue
        if command.startswith("kvswap serve"):
            reader.serve(command, "a page to ask")
            continue
        told = reader.type(command)
        if any(f"kvswap {word}" in command for word in ("ask", "generate", "chat")):
            must_say(told, ANSWER)
        if command.startswith("kvswap fit"):
            must_say(told, "it fits")
        if command.startswith("kvswap show"):
            must_say(told, "tokens", "book.txt")
    reader.must_have_said_what_is_shown()
    reader.press_ctrl_c()


def researcher(folder: Path, given: Given) -> Typist:
    """Three methods in a table, on questions of one's own."""
    book(folder)
    asked = {"document": (folder / "book.txt").read_text(encoding="utf-8"),
             "question": QUESTION, "answer": ANSWER}  # fmt: skip
    (folder / "x.jsonl").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    own = {"--model DIR": f"--model {MODEL}"}
    reader = Typist("researcher", folder, _pip_once(given.words()) | own, given.machine)
    for command in reader.unread():
        told = reader.type(command)
        if command.startswith("kvswap compare"):
            must_say(told, "4 runs")
    for name, budget in (("compare", "tokens:1024"), ("memory", "bytes:1/4")):
        results = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        found = {each["name"]: each["budget"] for each in results["methods"] if each["runs"]}
        wanted = {"full": None, "kvswap": budget, "quest": budget, "snapkv": budget}
        right = {each["name"]: each["summary"]["accuracy"][0] for each in results["methods"]}
        if found != wanted or right["full"] != 1.0 or right["kvswap"] != 1.0:
            raise WentWrongError(f"{name}.json: must have {wanted}, has {found}, right: {right}")
    return reader


def cpp(folder: Path, given: Given) -> Typist:
    """A program of a few lines, found, linked and run."""
    words = _pip_once(given.words())
    words.pop("pip install torch")  # the page names the release itself
    reader = Typist("cpp", folder, words, given.machine)
    (folder / "CMakeLists.txt").write_text(reader.block("cmake"), encoding="utf-8")
    shown = [b.text for b in blocks(ROOT / "docs" / "cpp.md") if b.language == "cpp"]
    (folder / "main.cpp").write_text(shown[0], encoding="utf-8")
    told = ""
    for command in reader.unread():
        told = reader.type(command)
    must_say(told, "301")
    wrong = reader.type("build/app nowhere 2>&1; test $? = 1")
    must_say(wrong, "nowhere")
    return reader


def operator(folder: Path, given: Given) -> Typist:
    """A server, asked twice by what a chat program sends, streamed."""
    book(folder)
    port = str(_free_port())
    own = {"--model DIR": f"--model {MODEL}", "8000": port, "--name NAME": "--name reference"}
    words = _pip_once(given.words()) | own
    words.pop("kvswap_torch-*.whl")
    wheel = {"$(ls kvswap_torch-*.whl)": str(given.wheel)}
    reader = Typist("operator", folder, wheel | words, given.machine)
    content = (folder / "book.txt").read_text(encoding="utf-8")
    question = {
        "model": "reference", "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0, "session_id": "a", "metadata": {"chat_id": "b"},
        "messages": [{"role": "user", "content": f"{content}\nQuestion: {QUESTION}\nAnswer:"}],
    }  # fmt: skip
    (folder / "question.json").write_text(json.dumps(question), encoding="utf-8")
    cached = []
    try:
        for command in reader.unread():
            if command.startswith("kvswap serve"):
                reader.serve(command, "a page to ask")
                continue
            told = reader.type(command)
            if "completions" in command:
                cached.append(_streamed(told))
        if not 0 == cached[0] < cached[1]:
            raise WentWrongError(f"the second question must find the first one's, cached {cached}")
        must_say(told, "kvswap")
        reader.press_ctrl_c()
    finally:
        reader.give_up()
    return reader


def _streamed(told: str) -> int:
    """That a stream's pieces are the answer; how many of the prompt's tokens were cached."""
    pieces = [json.loads(found) for found in re.findall(r"^data: (\{.*)$", told, re.MULTILINE)]
    deltas = [choice["delta"].get("content") or "" for each in pieces for choice in each["choices"]]
    if ANSWER not in "".join(deltas) or "data: [DONE]" not in told:
        raise WentWrongError(f"a stream must have {ANSWER!r} and end, is\n{told}")
    usage = next(each["usage"] for each in reversed(pieces) if each.get("usage"))
    return usage["prompt_tokens_details"]["cached_tokens"]


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _pip_once(words: dict[str, str]) -> dict[str, str]:
    """The general replacement would undo what the one before it has put."""
    return {name: word for name, word in words.items() if name != "pip install "}


USERS: dict[str, Callable[[Path, Given], Typist]] = {
    "laptop": laptop, "researcher": researcher, "cpp": cpp, "operator": operator,
    "few-bits": few_bits, "gguf": gguf,
}  # fmt: skip
