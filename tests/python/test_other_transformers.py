"""What each release of transformers in our range must do. Here the installed one's turn; ``make
other-transformers`` runs this file on the oldest and on the newest.

No call may warn: a name that transformers will take back is to be gone before it does.
"""

from __future__ import annotations

import inspect
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation import GenerationMixin

from kvswap_torch import KVSwapCache, SwapConfig
from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.cli.conversation import Conversation
from kvswap_torch.cli.prompt import Prompt
from kvswap_torch.hf.edits import forget
from kvswap_torch.hf.families import model_parts
from kvswap_torch.tuning.api import _decode
from tests.packaging.other_transformers import NEWEST, oldest
from tests.packaging.run_docs import readme_program
from tests.python.test_serving_reuse import Desk, in_memory, text
from tests.python.tiny_models import (
    COVERING,
    FAMILIES,
    SMALL,
    TIGHT,
    character_tokenizer,
    greedy,
    has_native,
    prompt,
    tiny_model,
)

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built"),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning:kvswap_torch"),
]


@pytest.fixture(autouse=True)
def nothing_deprecated() -> Iterator[None]:
    """transformers logs what it does not warn of, once a process."""
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logger, listener = logging.getLogger("transformers"), Listener()
    logger.addHandler(listener)
    yield
    logger.removeHandler(listener)
    assert not [line for line in told if "deprecat" in line]


def test_this_release_is_in_our_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (line,) = (each for each in project["dependencies"] if each.startswith("transformers"))
    begin, end = re.fullmatch(r"transformers>=([\d.]+),<([\d.]+)", line).groups()
    assert oldest() == f"{begin}.0"
    numbers = [tuple(map(int, each.split(".")[:2])) for each in (begin, NEWEST, end)]
    here = tuple(map(int, transformers.__version__.split(".")[:2]))
    assert numbers[0] <= here <= numbers[1] < numbers[2]
    # The oldest name of the cache is taken back in the release that our range ends before.
    assert numbers[2] == (5, 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_a_cache_in_memory(family, tmp_path) -> None:
    model, inputs = tiny_model(family), prompt(2, 24, padding=(0, 5))
    expected = greedy(model, inputs, DynamicCache(config=model.config))
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        assert torch.equal(greedy(model, inputs, cache), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("arguments", [
    {"num_beams": 3},
    {"prompt_lookup_num_tokens": 3},
    {"prefill_chunk_size": 7},
    {"return_dict_in_generate": True, "output_scores": True},
], ids=lambda each: next(iter(each)))  # fmt: skip
def test_modes_of_generate(arguments, tmp_path) -> None:
    model, inputs = tiny_model("llama"), prompt(1, 24)
    expected = greedy(model, inputs, DynamicCache(config=model.config), **arguments)
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        told = greedy(model, inputs, cache, **arguments)
    if not isinstance(told, torch.Tensor):
        told, expected = told.sequences, expected.sequences
    assert torch.equal(told, expected)


def test_a_second_turn_and_a_crop(tmp_path) -> None:
    model = tiny_model("gemma3", sliding_window=64)
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        plain = DynamicCache(config=model.config)
        for held in (cache, plain):
            greedy(model, prompt(1, 20), held)
        expected, told = (greedy(model, prompt(1, 40), held) for held in (plain, cache))
        assert torch.equal(told, expected)
        cache.crop(-9)
        assert cache.get_seq_length() == 40 + 12 - 1 - 9


def test_a_reset_cache_is_as_new(tmp_path) -> None:
    """Layers in memory too, whose reset() once left zeros behind."""
    model, inputs = tiny_model("gemma3"), prompt(2, 24)
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        greedy(model, prompt(2, 30, seed=2), cache)
        cache.reset()
        assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))


def test_a_layer_whose_reset_leaves_zeros_is_emptied() -> None:
    """Whichever release is installed."""

    class LeavesZeros(DynamicSlidingWindowLayer):
        def reset(self) -> None:
            self.keys.zero_()
            self.values.zero_()
            self.cumulative_length = 0

    layer, tokens = LeavesZeros(sliding_window=6), torch.ones(1, 2, 8, 4)
    layer.update(tokens, tokens)
    forget(layer)
    keys, values = layer.update(tokens[:, :, :3], tokens[:, :, :3])
    assert keys.shape[2] == values.shape[2] == layer.get_seq_length() == 3


def test_a_selection_is_attended(tmp_path) -> None:
    model = tiny_model("llama")
    with KVSwapCache(model, tmp_path, TIGHT) as cache:
        greedy(model, prompt(2, 80), cache)
        assert 0 < cache.stats().groups_per_step <= 3


def test_saved_and_opened_again(tmp_path) -> None:
    model, inputs = tiny_model("llama"), prompt(1, 30)
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        first = greedy(model, inputs, cache)
        cache.save(tmp_path / "saved")
    more = {"input_ids": torch.cat([first, prompt(1, 5, seed=2)["input_ids"]], 1)}
    with KVSwapCache.open(model, tmp_path / "saved", path=tmp_path) as cache:
        assert torch.equal(greedy(model, more, cache), greedy(model, more))


def test_a_conversation_of_the_commands(tmp_path) -> None:
    model, tokenizer = tiny_model("llama"), character_tokenizer()
    model.generation_config.eos_token_id = None
    document, told = prompt(1, 40)["input_ids"][0].tolist(), []
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        for held in (cache, DynamicCache(config=model.config)):
            talk = Conversation(
                model, tokenizer, held, Prompt("", "{question}", "{question}", False)
            )
            talk.read(document, 16, lambda tokens: None)
            told.append(talk.ask("why?", 6, lambda text: None).answer)
    assert told[0] == told[1] and told[0]


def test_a_server_answers_from_what_it_has_read(tmp_path) -> None:
    model, book = tiny_model("llama"), text(70, 1)
    with Desk(model, tmp_path, prefill_chunk=32) as desk:
        for seed, cached in ((1, 0), (2, 70)):
            asked = torch.cat([book, text(9, seed)], 1)
            assert desk.ask(asked) == in_memory(model, asked) and desk.cached == cached


def test_the_tuner_decodes(tmp_path) -> None:
    model, ids = tiny_model("llama"), text(40, 1)[0]
    with KVSwapCache(model, tmp_path, COVERING) as cache:
        ours, theirs = (_decode(model, ids, 30, c) for c in (cache, DynamicCache()))
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_the_cache_has_the_name_that_the_signature_has(tmp_path) -> None:
    model = tiny_model("llama")
    takes = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    expected = "cache" if "cache" in takes else "past_key_values"
    assert expected in inspect.signature(model.forward).parameters
    with KVSwapCache(model, tmp_path, SwapConfig(**SMALL)) as cache:
        assert cache.as_argument() == cache_argument(model, cache) == {expected: cache}
        for wrapped in (torch.compile(model), Adapted(model), model.model):
            assert cache_argument(wrapped, cache) == {expected: cache}


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_either_name_is_found(name) -> None:
    """Whichever release is installed."""
    assert cache_argument(Taking[name](), None) == {name: None}


class Adapted:
    """PEFT's wrapper, as far as it is seen from here."""

    def __init__(self, model: Any):
        self.get_base_model = lambda: model

    def forward(self, *args: Any, **kwargs: Any) -> None: ...


class TakesCache:
    def forward(self, input_ids: Any, cache: Any = None, **kwargs: Any) -> None: ...


class TakesPast:
    def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> None: ...


Taking = {"cache": TakesCache, "past_key_values": TakesPast}


@pytest.mark.parametrize("made", ["a dict", "a list"])
def test_what_layers_are_made_with_in_either_shape(made, monkeypatch) -> None:
    """One dict for all layers before 5.19, a dict a layer since."""
    from kvswap_torch.hf import families

    kinds = ["sliding_attention", "full_attention"] * 2
    each = {"sliding_window": 6}
    shapes = {"a dict": each, "a list": [each if "sliding" in kind else {} for kind in kinds]}
    monkeypatch.setattr(families, "get_layer_types_and_kwargs", lambda _: (kinds, shapes[made]))
    parts = model_parts(tiny_model("gemma3"))
    assert parts.disk == (1, 3) and len(parts.layer_kwargs) == 4
    assert parts.layer_kwargs[0] == each
    parts.layer_kwargs[0]["sliding_window"] = 7
    assert parts.layer_kwargs[2] == each or made == "a list"


def test_no_line_of_ours_has_the_older_name() -> None:
    """Where a user looks, or a warning would be shown to one."""
    shown = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*")]
    code = [*ROOT.glob("kvswap_torch/**/*.py"), *ROOT.glob("tuning/**/*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in {*shown, *code}
        if path.suffix in (".md", ".py", ".ipynb")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "past_key_values=" in line
    ]
    assert found == []


def test_the_lines_of_the_readme_run_as_they_are_printed() -> None:
    """In an interpreter of their own; nothing is told but the bar of the weights."""
    done = subprocess.run(
        [sys.executable, "-c", readme_program()], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].strip() == "copper lantern"
    bars = re.compile(r"Loading weights: .*|\s*")
    assert [line for line in re.split("[\r\n]", done.stderr) if not bars.fullmatch(line)] == []
