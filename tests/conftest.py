"""What all Python tests share: a tiny model with a tokenizer, and settings for busy machines."""

import ctypes
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.how_long import lives

# No test may reach for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shared machine is slow at times; that is no finding.
settings.register_profile(
    "kvswap",
    deadline=None,
    max_examples=lives(20, 60),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvswap")

_NATIVE_STACK = Path(__file__).parents[1] / "build/dev/tests/cpp/libnative_stack.so"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """A fatal signal shows the native frames of its thread before Python's.

    With KVSWAP_SIMD=AVX2 kernels are those of another processor, by a level that this one has too.
    """
    if _NATIVE_STACK.exists():
        ctypes.CDLL(str(_NATIVE_STACK)).show_native_stacks(os.dup(2))
    if level := os.environ.get("KVSWAP_SIMD"):
        use_simd_level(level)


def use_simd_level(level: str) -> None:
    from kvswap_torch import _C

    if not _C.use_simd_level(level):
        raise pytest.UsageError(
            f"KVSWAP_SIMD: must be one of {', '.join(_C.simd_levels())}, got {level!r}"
        )


def skip_reasons(config: pytest.Config, watched: tuple[str, ...] = ("",)) -> list[str]:
    """Of the tests whose place holds one of these words."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    return [
        each.longrepr[2].removeprefix("Skipped: ")
        for each in skipped
        if any(word in each.nodeid for word in watched)
    ]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With KVSWAP_KNOWN_SKIPS=1, what may not be skipped is a failure."""
    if os.environ.get("KVSWAP_KNOWN_SKIPS") != "1" or exitstatus != pytest.ExitCode.OK:
        return
    from tests import known_skips

    if not all(map(known_skips.is_known, skip_reasons(session.config, known_skips.WATCHED))):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if os.environ.get("KVSWAP_KNOWN_SKIPS") != "1":
        return
    from tests import known_skips

    for line in known_skips.report(skip_reasons(config)):
        terminalreporter.write_line(f"skipped: {line}")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random 2-layer Qwen3 (2 KV heads x 64) and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # which comes in another order each time
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary["</s>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)

    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
