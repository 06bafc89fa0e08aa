"""An image and a video before a question, with the KV cache on disk.

    python -m examples.vision [--path FOLDER] [--seconds 16] [--kv-memory 1MiB]

Frames of a video are what makes the prompt of a vision-language model long. The model is a tiny
random one of Qwen2.5-VL's class, made on the spot, so its answer means nothing; what is shown is
that `generate()` takes the cache as for text, gives the full cache's tokens as long as the budget
covers the prompt, and what it keeps in memory. A real model comes with
``AutoModelForImageTextToText.from_pretrained()``, and its inputs from its ``AutoProcessor``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from kvswap_torch import KVSwapCache, format_bytes
from kvswap_torch.cache_argument import cache_argument
from kvswap_torch.hf.stats import CacheStats

IMAGE, VIDEO, START, END = 90, 91, 92, 93  # tokens; those below are text
PATCH, MERGED = 4, 2  # pixels a side of a patch, patches a side of a token
FRAMES = 2  # of a token
SIDE = 32  # pixels of a frame
FRAMES_PER_SECOND = 2


@dataclass(frozen=True)
class Answer:
    """Tokens answered from disk and with the full cache, and what the cache on disk did."""

    on_disk: list[int]
    in_memory: list[int]
    prompt_tokens: int
    stats: CacheStats


def make_model() -> Any:
    """A random model of four layers whose rotary positions have time, height and width."""
    text = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "patch_size": PATCH, "spatial_merge_size": MERGED, "temporal_patch_size": FRAMES,
        "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 16,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
        model.get_input_embeddings().weight.normal_()  # a token counts as much as a layer adds
    return model


def moving_square(frames: int) -> torch.Tensor:
    """``[frames, 3, SIDE, SIDE]``: a bright square that goes from left to right."""
    film = torch.zeros(frames, 3, SIDE, SIDE)
    for i in range(frames):
        left = (SIDE - 8) * i // max(1, frames - 1)
        film[i, :, 12:20, left : left + 8] = 1
    return film


def patches(film: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[patches, 3 * FRAMES * PATCH * PATCH]`` and the grid ``[1, 3]`` they fill.

    Patches that one token is merged of stand together, as the vision tower wants them.
    """
    rows = film.shape[2] // PATCH // MERGED
    columns = film.shape[3] // PATCH // MERGED
    cut = film.reshape(-1, FRAMES, 3, rows, MERGED, PATCH, columns, MERGED, PATCH)
    pixels = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * FRAMES * PATCH * PATCH)
    return pixels, torch.tensor([[len(cut), rows * MERGED, columns * MERGED]])


def make_inputs(seconds: int) -> dict[str, torch.Tensor]:
    """An image, a video of so many seconds, and a question of random tokens."""
    image, image_grid = patches(moving_square(1).repeat(FRAMES, 1, 1, 1))
    video, video_grid = patches(moving_square(seconds * FRAMES_PER_SECOND))

    def tokens(kind: int, grid: torch.Tensor) -> list[int]:
        return [START] + [kind] * (int(grid.prod()) // MERGED**2) + [END]

    question = torch.randint(3, 80, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    ids = torch.tensor([tokens(IMAGE, image_grid) + tokens(VIDEO, video_grid) + question])
    kinds = torch.zeros_like(ids)
    kinds[ids == IMAGE], kinds[ids == VIDEO] = 1, 2
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds,
        "pixel_values": image, "image_grid_thw": image_grid,
        "pixel_values_videos": video, "video_grid_thw": video_grid,
    }  # fmt: skip


def answer(model: Any, inputs: dict[str, torch.Tensor], path: Path, kv_memory: str) -> Answer:
    """The same question with both caches, greedily."""
    prompt = inputs["input_ids"].shape[1]

    def tokens(cache: Any) -> list[int]:
        named = cache_argument(model, cache)
        out = model.generate(**inputs, **named, do_sample=False, max_new_tokens=16)
        return out[0, prompt:].tolist()

    with KVSwapCache(model, path, kv_memory_bytes=kv_memory) as cache:
        on_disk, stats = tokens(cache), cache.stats()
    return Answer(on_disk, tokens(DynamicCache(config=model.config)), prompt, stats)


def main(
    path: Annotated[Path, typer.Option(help="Folder on the disk that takes the cache.")] = Path(),
    seconds: Annotated[int, typer.Option(min=1, help="Length of the video.")] = 16,
    kv_memory: Annotated[str, typer.Option(help="Most memory for the cache.")] = "1MiB",
) -> None:
    found = answer(make_model(), make_inputs(seconds), path, kv_memory)
    print(f"prompt: {found.prompt_tokens} tokens, most of them of the video")
    print(f"on disk:   {found.on_disk}")
    print(f"in memory: {found.in_memory}")
    print(f"KV memory: at most {format_bytes(found.stats.resident_bytes_peak)}")


if __name__ == "__main__":
    typer.run(main)
