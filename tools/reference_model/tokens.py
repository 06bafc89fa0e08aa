"""Trains the tokenizer and turns texts into one array of token numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.reference_model.texts import Text
from tools.reference_model.words import PROMPT_WORDS, WHOLE_WORDS

VOCABULARY = 3072
START, END = "<s>", "</s>"
# One class of bytes per piece, so that a few lines of C++ can do the same: a newline alone, a
# digit alone, letters (all of non-ASCII is a letter) or signs with one space before, spaces.
_LETTER = r"A-Za-z\x{80}-\x{10FFFF}"
PIECES = rf"\n|[0-9]| ?[{_LETTER}]+| ?[^ \n0-9{_LETTER}]+| +"
# How often each readable word is shown to BPE: often enough to become one token.
WORD_REPEATS = 4000


def train_tokenizer(texts: list[Text]) -> Tokenizer:
    """Byte-level BPE over the training texts and the readable words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bodies = [text.body for text in texts if not text.held_out]
    words = " " + " ".join(WHOLE_WORDS + PROMPT_WORDS) + "\n" + "\n".join(PROMPT_WORDS)
    tokenizer.train_from_iterator(bodies + [words] * WORD_REPEATS, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and the settings `AutoTokenizer` wants."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def encode_texts(tokenizer: Tokenizer, texts: list[Text]) -> np.ndarray:
    """All texts one after another, each opened by the start token: `[tokens]` uint16."""
    start = tokenizer.token_to_id(START)
    parts = []
    for encoding in tokenizer.encode_batch([text.body for text in texts]):
        parts.append(np.array([start, *encoding.ids], dtype=np.uint16))
    return np.concatenate(parts)
