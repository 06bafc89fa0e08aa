"""The command line: what it refuses before loading a model, and what it does with one."""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import kvswap_torch
from kvswap_torch import BudgetError, ConfigError, SwapConfig
from kvswap_torch.chunks import even_chunks
from kvswap_torch.cli.app import app
from kvswap_torch.cli.conversation import AnswerStream
from kvswap_torch.cli.generate import _check_context
from kvswap_torch.cli.prompt import PLAIN, make_prompt
from kvswap_torch.native import PACKAGE_DIR

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["What is the colour?", "And the number?"]


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text("The colour of the house is blue, the number is nine. " * 6, encoding="utf-8")
    return path


@pytest.fixture
def full_cache(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts a cache in memory in the disk cache's place; returns the arguments it was made with."""
    from transformers import DynamicCache

    made: list[dict[str, Any]] = []

    class FullCache(DynamicCache):
        def __init__(self, model: Any, **arguments: Any) -> None:
            super().__init__(config=model.config)
            made.append(arguments)

        def __enter__(self) -> "FullCache":
            return self

        def __exit__(self, *_: object) -> None:
            made.append({"closed": True})

        def stats(self) -> dict[str, Any]:
            return {"bytes_read": 4096, "hit_rate": 0.5, "resident_bytes": 2048}

    monkeypatch.setitem(vars(kvswap_torch), "KVSwapCache", FullCache)
    return made


def generate(model: Path, document: Path, *more: str, questions: list[str] = QUESTIONS) -> Any:
    arguments = ["generate", "--model", str(model), "--document", str(document)]
    for question in questions:
        arguments += ["--question", question]
    return CliRunner().invoke(
        app, [*arguments, "--max-new-tokens", "4", *more], catch_exceptions=False
    )


def test_answers_are_those_of_plain_generate(
    tiny_model_dir: Path, document: Path, full_cache: list[dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    config = SwapConfig(rank=8).save(tmp_path / "config.json")
    done = generate(
        tiny_model_dir, document,
        "--compare", "--json", str(out), "--kv-memory", "2MiB", "--path", str(tmp_path),
        "--config", str(tmp_path / "config.json"), "--prefill-chunk", "100",
    )  # fmt: skip
    assert done.exit_code == 0
    result = json.loads(out.read_text())
    questions = sum(turn["question_tokens"] for turn in result["disk"]["turns"])
    made = {"path": tmp_path, "config": config, "kv_memory_bytes": 2 << 20, "max_batch": 1}
    made |= {"timeline_spans": 0, "preset": None, "keep": None}
    context = result["document_tokens"] + questions + len(QUESTIONS) * 4
    assert full_cache == [made | {"max_context": context}, {"closed": True}]
    assert full_cache[0]["config"].source == tmp_path / "config.json"
    assert result["answers_equal"] is True
    assert result["document_tokens"] == len(document.read_text())
    expected = plain_generate(tiny_model_dir, document.read_text())
    assert [turn["answer_ids"] for turn in result["disk"]["turns"]] == expected
    assert [turn["question"] for turn in result["disk"]["turns"]] == QUESTIONS
    assert result["disk"]["stats"]["bytes_read"] == 4096
    assert result["memory"]["stats"]["kv_bytes_full"] > 0
    for told in ("hit rate", "KV in memory", "same tokens", *QUESTIONS):
        assert told in done.output


def plain_generate(model_dir: Path, document: str) -> list[list[int]]:
    """The same turns without any cache kept between them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    ids = tokenizer(document)["input_ids"]
    answers = []
    for question in QUESTIONS:
        text = PLAIN.split("{document}")[1].replace("{question}", question)
        ids = ids + tokenizer(text)["input_ids"]
        inputs = torch.tensor([ids])
        # Without a mask `generate` would hide every token whose id is the padding's.
        mask = torch.ones_like(inputs)
        output = model.generate(
            inputs, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        answers.append(output[0, len(ids) :].tolist())
        ids = output[0].tolist()
    return answers


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--kv-memory", "lots"], "--kv-memory: must be a number with a unit"),
        (["--config", "missing.json"], "missing.json: must be a readable JSON file"),
        (["--json", "no/folder/out.json"], "--json: its folder must exist"),
        (["--timeline", "no/folder/trace.json"], "--timeline: its folder must exist"),
        (
            ["--prompt-template", "{document}{question}\udcff"],
            "--prompt-template: must be UTF-8 text",
        ),
        (["--prompt-template", "{document}"], "must have {document} once and {question} once"),
        (["--max-new-tokens", "3000"], "at most the 4,096 tokens that this model was made for"),
    ],
)
def test_what_is_wrong_is_one_clear_error(
    tiny_model_dir: Path, document: Path, more: list[str], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(tiny_model_dir, document, *more)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "yarn"}, {"full_attention": {"rope_type": "linear"}, "rope_theta": 1.0}]
)
def test_a_model_that_scales_its_positions_may_go_further(rope: dict[str, Any]) -> None:
    config = SimpleNamespace(max_position_embeddings=100, rope_parameters=rope)
    config.get_text_config = lambda: config
    material = SimpleNamespace(model=SimpleNamespace(config=config))
    _check_context(1000, material)
    config.rope_parameters = {"rope_type": "default"}
    _check_context(100, material)
    with pytest.raises(ConfigError, match=r"come to 101; .* scale its positions knowingly"):
        _check_context(101, material)


def test_no_model_empty_or_binary_document(tiny_model_dir: Path, tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="^--model: must be a Hugging Face causal"):
        generate(tmp_path / "nowhere", empty)
    with pytest.raises(ConfigError, match="^--document: must not be empty"):
        generate(tiny_model_dir, empty, "--prompt-template", "{document}{question}")
    with pytest.raises(ConfigError, match="^--document: must be readable UTF-8"):
        generate(tiny_model_dir, binary)


@pytest.mark.parametrize(
    "more", [["--dtype", "int8"], ["--max-new-tokens", "0"], ["--wheels", "4"]]
)
def test_what_the_parser_refuses(tiny_model_dir: Path, document: Path, more: list[str]) -> None:
    assert generate(tiny_model_dir, document, *more).exit_code == 2


def test_a_cache_that_refuses_is_told_and_nothing_is_written(
    tiny_model_dir: Path, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BudgetError("KVSwapCache: kv_memory_bytes must be at least 5.00 MiB, got 1.00 MiB")

    monkeypatch.setitem(vars(kvswap_torch), "KVSwapCache", refuse)
    with pytest.raises(BudgetError, match="at least"):
        generate(tiny_model_dir, document, "--json", str(tmp_path / "out.json"))
    assert not (tmp_path / "out.json").exists()


def test_an_error_is_one_line_on_stderr_and_status_1(document: Path) -> None:
    done = command(
        *("generate", "--model", "x", "--document", str(document)),
        *("--question", "q", "--kv-memory", "[b]9"),
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: --kv-memory: must be a number")
    assert done.stderr.count("\n") == 1 and "'[b]9'" in done.stderr


def test_help_teaches() -> None:
    done = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "100"})
    assert done.exit_code == 0
    for told in ("--compare", "--kv-memory", "Start here", "kvswap generate"):
        assert told in done.output
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0


def test_info_tells_versions_and_limits(tmp_path: Path) -> None:
    done = command("info", "--json", "--path", str(tmp_path))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["torch"].startswith(str(facts["built_for_torch"]).split("+")[0])
    assert {
        "python",
        "transformers",
        "cuda",
        "free_bytes",
        "memlock_bytes",
        "bf16_products",
    } <= set(facts)
    shown = command("info", "--path", str(tmp_path))
    assert shown.returncode == 0 and facts["torch"] in shown.stdout
    missing = command("info", "--path", str(tmp_path / "no"))
    assert missing.returncode == 1 and "must be an existing directory" in missing.stderr


def test_cmake_prefix_says_where_or_why_not() -> None:
    done = command("cmake-prefix")
    if (PACKAGE_DIR / "share" / "cmake" / "kvswap").is_dir():
        assert done.stdout.strip() == str(PACKAGE_DIR / "share" / "cmake")
    elif (PACKAGE_DIR.parent / "build" / "dev" / "cmake_install.cmake").is_file():
        folder = Path(done.stdout.strip())
        assert (folder / "kvswap" / "kvswapConfig.cmake").is_file()
        # What CMake looks for beside it, as in site-packages.
        assert (folder.parents[2] / "torch" / "include" / "torch").is_dir()
    else:
        assert done.returncode == 1 and "must exist and does not" in done.stderr


def test_a_document_from_stdin_and_json_on_stdout(
    tiny_model_dir: Path, document: Path, full_cache: list[dict[str, Any]]
) -> None:
    arguments = ["generate", "--model", str(tiny_model_dir), "--document", "-", "--json", "-"]
    arguments += ["--question", QUESTIONS[0], "--max-new-tokens", "4"]
    done = CliRunner().invoke(app, arguments, input=document.read_bytes(), catch_exceptions=False)
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert result["document_tokens"] == len(document.read_text())
    assert [turn["answer_ids"] for turn in result["disk"]["turns"]] == plain_generate(
        tiny_model_dir, document.read_text()
    )[:1]
    assert QUESTIONS[0] in done.stderr


def test_every_script_starts_and_the_commands_have_one_name() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {"kvswap", "kvswap-torch", "kvswap-tune"} == set(scripts)
    for target in scripts.values():
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name))
    for name in ("generate", "tune", "info"):
        done = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100"})
        assert done.exit_code == 0 and "--json" in done.output


def test_a_shell_completes_commands() -> None:
    asked = {"_KVSWAP_COMPLETE": "complete_bash", "COMP_WORDS": "kvswap tu", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, [], env=asked, prog_name="kvswap")
    assert done.output.split() == ["tune"]


def test_tune_writes_what_it_found_as_json(tmp_path: Path, capsys: Any) -> None:
    from kvswap_torch.tuning.cli import write_json

    config = SwapConfig(rank=8).save(tmp_path / "config.json")
    write_json(config, tmp_path / "out.json", report=None)
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["config"] == str(tmp_path / "config.json") and told["report"] is None
    assert told["settings"]["summary"]["rank"] == 8
    write_json(config, Path("-"), report=tmp_path / "page.html")
    assert json.loads(capsys.readouterr().out)["report"] == str(tmp_path / "page.html")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvswap_torch", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


class Tokenizer:
    """As much of a tokenizer as prompts need: characters are tokens."""

    eos_token_id = ord("$")

    def __init__(self, template: bool = False) -> None:
        self.chat_template = "yes" if template else None

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        ids = [ord(letter) for letter in text]
        return {"input_ids": [ord("^"), *ids, ord("$")] if add_special_tokens else ids}

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{turn['role']}>{turn['content']}</s>" for turn in turns) + "<assistant>"

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_a_plain_template_keeps_the_document_first_and_repeats_the_rest() -> None:
    tokenizer = Tokenizer()
    prompt = make_prompt("Read: {document}\\nQ {question}\\nA", tokenizer)
    # The tokenizer's end mark would end the text before the question.
    assert text(prompt.prefix_ids(tokenizer, "D")) == "^Read: D"
    assert text(prompt.question_ids(tokenizer, "one", 0)) == "\nQ one\nA"
    assert text(prompt.question_ids(tokenizer, "two", 1)) == "\nQ two\nA"
    assert text(make_prompt("auto", tokenizer).prefix_ids(tokenizer, "D")) == "^D"


def test_a_chat_template_is_asked_how_turns_are_put() -> None:
    tokenizer = Tokenizer(template=True)
    prompt = make_prompt("auto", tokenizer)
    whole = (
        text(prompt.prefix_ids(tokenizer, "D{question}"))
        + text(prompt.question_ids(tokenizer, "one", 0))
        + "an answer"
        + text(prompt.question_ids(tokenizer, "two", 1))
    )
    turns = [
        {"role": "user", "content": "D{question}\n\none"},
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "two"},
    ]
    assert whole == tokenizer.apply_chat_template(turns)


@pytest.mark.parametrize("template", ["{question}{document}", "{document}{document}{question}", ""])
def test_a_template_without_its_places_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="^--prompt-template: "):
        make_prompt(template, Tokenizer())


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 64), (64, 64), (65, 64), (1000, 64), (0, 64)])
def test_chunks_cover_all_and_are_even(tokens: int, chunk: int) -> None:
    chunks = even_chunks(tokens, chunk)
    assert [token for begin, end in chunks for token in range(begin, end)] == list(range(tokens))
    lengths = {end - begin for begin, end in chunks}
    assert not lengths or (max(lengths) <= chunk and max(lengths) - min(lengths) <= 1)


def test_a_character_of_several_tokens_is_written_whole() -> None:
    import torch

    written: list[str] = []
    stream = AnswerStream(Tokenizer(), written.append)
    stream.put(torch.tensor([[1, 2, 3]]))
    for byte in "aé…".encode():
        stream.put(torch.tensor([byte]))
    stream.end()
    assert written == ["a", "é", "…"]
    assert len(stream.times) == 6
