"""Calibration text: that facts can be found in it, nothing is shared with what is held out, and
what happens with little text."""

import random
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvswap_torch.errors import ConfigError, StorageError
from kvswap_torch.tuning.documents import (
    TURNS,
    default_samples,
    samples_from_files,
    shipped_texts,
)
from kvswap_torch.tuning.samples import FORMS, FactMaker

TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "reference_model"


class Characters:
    """One token a character; a text begins with token 1, as with many tokenizers."""

    def __call__(self, text, add_special_tokens: bool = True):
        if isinstance(text, list):
            return SimpleNamespace(input_ids=[self(t, add_special_tokens).input_ids for t in text])
        start = [1] if add_special_tokens else []
        return SimpleNamespace(input_ids=start + [ord(letter) for letter in text])


def text_of(ids) -> str:
    return "".join(chr(token) for token in ids.tolist() if token != 1)


@pytest.fixture(scope="module")
def made():
    return default_samples(Characters(), lengths=(12000, 6000), count=6, seed=3)


def test_lengths_are_kept_and_the_focus_is_at_the_turns(made) -> None:
    fitted, held_out = made
    assert [len(fitted), len(held_out)] == [6, 3]
    for number, sample in enumerate(fitted):
        length = (12000, 6000)[number % 2]
        assert 0.9 * length < len(sample.ids) <= length
        assert 0.05 * length < len(sample.ids) - sample.focus <= min(length // 4, 1024)
        assert int(sample.ids[0]) == 1
        assert int(sample.ids[sample.focus - 1]) == ord("\n")


def test_every_answer_stands_in_the_text_once_laid_in(made) -> None:
    """Turns of one sample read back: the answer to each question is in the document before."""
    sample = made[0][0]
    document, turns = text_of(sample.ids[: sample.focus]), text_of(sample.ids[sample.focus :])
    answers = [
        line.removeprefix("Answer: ") for line in turns.splitlines() if line.startswith("Answer: ")
    ]
    assert len(answers) > 8
    flat = " ".join(document.split())
    for answer in answers[:-1]:  # the last one may be cut
        assert answer in flat
    facts = [line for line in document.splitlines() if any(a in line for a in answers)]
    assert len(facts) >= len(set(answers)) - len(answers) // 4


def test_samples_differ_in_text_facts_and_turns(made) -> None:
    fitted, held_out = made
    samples = fitted + held_out
    turns = [text_of(sample.ids[sample.focus :]) for sample in samples]
    assert len(set(turns)) == len(samples)
    starts = {turn.split("{")[0] for turn in TURNS if not turn.startswith("{")}
    assert {start for start in starts if any(turn.startswith(start) for turn in turns)} == starts


def test_held_out_text_is_not_fitted_to(made) -> None:
    fitted, held_out = (
        {line for s in part for line in text_of(s.ids[: s.focus]).splitlines() if len(line) > 60}
        for part in made
    )
    assert len(fitted) > 100 and len(held_out) > 50
    assert len(fitted & held_out) <= 1  # the cut of a line may be the same


def test_equal_seeds_give_equal_samples_and_others_do_not() -> None:
    first, again, other = (
        default_samples(Characters(), (2000,), 2, seed=seed)[0][0].ids.tolist()
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_a_real_tokenizer_keeps_to_the_length() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    fitted, held_out = default_samples(tokenizer, (1024, 2048), 2)
    assert all(0.9 * n < len(s.ids) <= n for s, n in zip(fitted, (2048, 1024), strict=True))
    assert max(len(s.ids) for s in held_out) > 1900
    assert "Question:" in tokenizer.decode(fitted[0].ids[fitted[0].focus :])


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 256 tokens"):
        default_samples(Characters(), (100,))
    with pytest.raises(ConfigError, match="count must be at least 1"):
        default_samples(Characters(), count=0)
    with pytest.raises(ConfigError, match="at least one file"):
        samples_from_files(Characters(), [])
    with pytest.raises(StorageError, match="must be readable") as caught:
        samples_from_files(Characters(), [tmp_path / "none.txt"])
    assert caught.value.errno == 2
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="must be UTF-8"):
        samples_from_files(Characters(), [tmp_path / "bytes.txt"])


def write_text(path: Path, lines: int) -> Path:
    rng = random.Random(5)
    words = ["river", "stone", "walks", "sings", "under", "over", "house", "tree", "old", "new"]
    path.write_text(
        "\n".join(f"line {n}: " + " ".join(rng.choices(words, k=10)) for n in range(lines))
    )
    return path


def test_own_text_is_split_and_given_facts(tmp_path: Path) -> None:
    path = write_text(tmp_path / "own.txt", 900)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted, held_out = samples_from_files(Characters(), [path], (4096,), count=2)
    numbers = [
        {int(line[5:].split(":")[0]) for s in part
         for line in text_of(s.ids[: s.focus]).splitlines() if line.startswith("line ")}
        for part in (fitted, held_out)
    ]  # fmt: skip
    assert max(numbers[0]) < 600 <= min(numbers[1])
    assert "Question: " in text_of(fitted[0].ids[fitted[0].focus :])


def test_short_text_gives_short_samples_and_says_so(tmp_path: Path) -> None:
    path = write_text(tmp_path / "short.txt", 60)
    with pytest.warns(UserWarning, match="should have 8192 tokens, but there is text for"):
        fitted, _ = samples_from_files(Characters(), [path], (8192,), count=1)
    assert 2000 < len(fitted[0].ids) < 8192
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="give a longer text"):
        samples_from_files(Characters(), [tmp_path / "empty.txt"], (8192,), count=1)


def test_one_endless_line_is_taken_apart(tmp_path: Path) -> None:
    (tmp_path / "line.txt").write_text("no end of words " * 4000)
    fitted, held_out = samples_from_files(Characters(), [tmp_path / "line.txt"], (4096,), count=2)
    for sample in fitted + held_out:
        assert 3600 < len(sample.ids) <= 4096
        assert text_of(sample.ids[: sample.focus]).count("\n") > 10


def test_facts_are_about_different_things() -> None:
    facts = FactMaker(random.Random(0)).draw(3000)
    questions = {fact.question for fact in facts}
    assert len(questions) == 3000
    assert all(fact.answer in fact.text for fact in facts)
    assert all("{" not in fact.text + fact.question + fact.answer for fact in facts)


def test_forms_say_and_ask_in_different_words() -> None:
    for form in FORMS:
        assert len(form.told) >= 2 and len(form.asked) >= 2
        assert all(told.count("{k}") == told.count("{v}") == 1 for told in form.told)
        assert all("{k}" in asked and "{v}" not in asked for asked in form.asked)


def test_the_text_comes_with_its_licence_and_without_markup() -> None:
    documents = shipped_texts()
    assert len(documents) > 40 and sum(map(len, documents)) > 1_000_000
    assert all(":func:`" not in text and ".. index::" not in text for text in documents)
    licence = (Path(__file__).resolve().parents[2] / "tuning" / "text" / "LICENSE.txt").read_text()
    assert "PSF LICENSE AGREEMENT" in licence and "Zero-Clause BSD" in licence
