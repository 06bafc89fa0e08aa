"""What changes a whole cache changes no layer in memory where the disk fails."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from kvswap_torch.hf.open_pass import all_or_none


def test_layers_in_memory_go_back_where_the_disk_fails() -> None:
    layer = DynamicLayer()
    keys = torch.randn(2, 1, 5, 4)
    layer.update(keys, -keys)
    with pytest.raises(OSError), all_or_none([layer], "crop", -2):
        assert layer.get_seq_length() == 3
        raise OSError
    with pytest.raises(OSError), all_or_none([layer], "batch_repeat_interleave", 2):
        raise OSError
    assert torch.equal(layer.keys, keys) and torch.equal(layer.values, -keys)
    with all_or_none([layer], "crop", -2):
        pass
    assert layer.get_seq_length() == 3
