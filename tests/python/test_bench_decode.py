"""The settings that `python -m bench decode` measures, and a short run."""

from __future__ import annotations

import pytest
import typer

from bench import decode
from tests.python.tiny_models import has_native


def test_a_share_of_the_memory_gives_what_it_leaves_to_pages():
    setting = decode.Setting("tiny", 2, 1024, 2, group_tokens=8, memory="1/4")
    assert setting.budget_bytes == 2 * setting.shape.kv_bytes(2, 1024) // 8
    assert setting.config.pages_max == 1024 // 8
    assert setting.config.groups_max * setting.config.group_tokens == 400
    plain = decode.Setting("tiny", 2, 1024, 2)
    assert plain.budget_bytes is None and plain.config.pages_max == 150


@pytest.mark.skipif(not has_native(), reason="kvswap_torch._C is not built")
def test_every_contender_decodes_in_turn(tmp_path, capsys):
    size = {"shape": "tiny", "layers": 2, "context": 1024, "batch": 1, "steps": 8, "warm_up": 2}
    decode.main(**size, group_tokens=4, rank=32, rows="model", score="sum", memory="",
                path=tmp_path, device="", only=decode.NAMES, out="")  # fmt: skip
    shown = capsys.readouterr().out
    assert all(name in shown for name in decode.NAMES.split(",")) and "hit_rate" in shown
    with pytest.raises(typer.BadParameter, match="only: must be among kvswap,.*got mmap"):
        decode.main(**size, only="kvswap,mmap")
