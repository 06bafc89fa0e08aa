"""Every causal language model of transformers: equal tokens, or refused at open by its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.python.every_model import families, outcome, row

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", list(families()))
def test_equal_or_refused_as_the_page_says(family, tmp_path):
    assert row(family, outcome(family, str(tmp_path))) in PAGE.read_text().splitlines()
