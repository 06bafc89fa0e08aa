"""examples/vision.py: an image and a video, the full cache's tokens from disk."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.vision import answer, make_inputs, make_model, moving_square, patches
from tests.python import ready_python


def test_both_caches_answer_alike_and_look_at_the_video(tmp_path: Path) -> None:
    model, inputs = make_model(), make_inputs(seconds=4)
    found = answer(model, inputs, tmp_path, "4MiB")
    assert found.on_disk == found.in_memory and len(set(found.on_disk)) > 2
    assert found.prompt_tokens == inputs["input_ids"].shape[1] == 96
    dark = inputs | {"pixel_values_videos": torch.zeros_like(inputs["pixel_values_videos"])}
    assert answer(model, dark, tmp_path, "4MiB").in_memory != found.in_memory


def test_patches_that_one_token_is_merged_of_stand_together() -> None:
    film = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
    pixels, grid = patches(film)
    assert grid.tolist() == [[1, 8, 8]] and pixels.shape == (64, 3 * 2 * 4 * 4)
    second = pixels[1].reshape(3, 2, 4, 4)  # to the right of the first
    assert torch.equal(second, film[:, :, :4, 4:8].transpose(0, 1))
    third = pixels[2].reshape(3, 2, 4, 4)  # below the first
    assert torch.equal(third, film[:, :, 4:8, :4].transpose(0, 1))
    assert moving_square(3)[2, 0, 12, -1] == 1


def test_the_example_runs(tmp_path: Path) -> None:
    output = ready_python.run("-m", "examples.vision", "--path", tmp_path, "--seconds", "8")
    told = dict(line.split(":", 1) for line in output.splitlines())
    assert told["on disk"].split() == told["in memory"].split() and "iB" in told["KV memory"]
