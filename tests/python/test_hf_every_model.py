"""Every causal language model of transformers: equal tokens, or refused at open by its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.python.every_model import families, outcome, row

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", list(families()))
def test_equal_or_refused_as_the_page_says(family, tmp_path):
    assert row(family, outcome(family, str(tmp_path))) in PAGE.read_text().splitlines()
