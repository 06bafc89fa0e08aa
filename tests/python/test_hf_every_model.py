"""Every causal language model of transformers: equal tokens, or refused at open by its reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.python.every_model import families, outcome, row

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", list(families()))
def test_equal_or_refused_as_the_page_says(family, tmp_path):
    assert row(family, outcome(family, str(tmp_path))) in PAGE.read_text().splitlines()


def test_the_page_counts_what_it_lists():
    text = PAGE.read_text()
    listed = [line for line in text.splitlines() if line.startswith("| ")][1:]
    refused = sum("| refused: " in line for line in listed)
    tried = sum("| not tried: " not in line for line in listed)
    said = re.search(r"Of\s(\d+) families (\d+) are equal and (\d+) refused", text)
    assert [int(number) for number in said.groups()] == [tried, tried - refused, refused]
    assert refused <= 50
