"""Vision-language models with images and frames of a video through generate()."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.python.tiny_models import PAD, greedy

IMAGE, VIDEO, START, END = 90, 91, 92, 93
TEXT = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 1}  # fmt: skip
# Three coordinates of a token take turns over the rotated values of a head.
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
         "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64}  # fmt: skip
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
          "vision_end_token_id": END, "tie_word_embeddings": False}  # fmt: skip


def build(name: str):
    if name == "InternVL":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "image_size": [8, 8], "patch_size": [2, 2]}  # fmt: skip
        text = TEXT | {"model_type": "qwen2"}
        config = transformers.InternVLConfig(
            vision_config=vision, text_config=text, image_token_id=IMAGE, downsample_ratio=0.5
        )
        model_class = transformers.InternVLForConditionalGeneration
    elif name == "Qwen2_5_VL":
        tower = TOWER | {"fullatt_block_indexes": [1], "window_size": 16}
        config = transformers.Qwen2_5_VLConfig(
            text_config=TEXT | {"rope_parameters": ROTARY}, vision_config=tower, **TOKENS
        )
        model_class = transformers.Qwen2_5_VLForConditionalGeneration
    else:
        tower = TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        text = TEXT | {"head_dim": 16, "rope_parameters": ROTARY | {"mrope_interleaved": True}}
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=tower, **TOKENS)
        model_class = transformers.Qwen3VLForConditionalGeneration
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.0 / parameter[0].numel() ** 0.5)
    return model


def inputs_of(name: str, batch: int, with_video: bool) -> dict:
    """Text, an image of 4 tokens and, if asked for, four frames of a video, then text."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(3, 80, (batch, 17), generator=generator)
    image = torch.tensor([[START] + [IMAGE] * 4 + [END]])
    middle = [image.expand(batch, -1)]
    inputs = {}
    if name == "InternVL":
        middle = middle * (2 if with_video else 1)  # frames are images there
        frames = batch * len(middle)
        inputs["pixel_values"] = torch.randn(frames, 3, 8, 8, generator=generator)
    else:
        grid = torch.tensor([[1, 4, 4]] * batch)
        inputs["image_grid_thw"] = grid
        inputs["pixel_values"] = torch.randn(16 * batch, 3 * 2 * 4 * 4, generator=generator)
        if with_video:
            frame = torch.tensor([[START] + [VIDEO] * 4 + [END]]).expand(batch, -1)
            middle += (
                [frame, frame]
                if name == "Qwen3VL"
                else [torch.tensor([[START] + [VIDEO] * 8 + [END]]).expand(batch, -1)]
            )
            inputs["video_grid_thw"] = torch.tensor([[2, 4, 4]] * batch)
            inputs["pixel_values_videos"] = torch.randn(
                32 * batch, 3 * 2 * 4 * 4, generator=generator
            )
    ids = torch.cat([text[:, :7], *middle, text[:, 7:]], 1)
    if name != "InternVL":
        kinds = torch.zeros_like(ids)
        kinds[ids == IMAGE], kinds[ids == VIDEO] = 1, 2
        inputs["mm_token_type_ids"] = kinds
    mask = torch.ones_like(ids)
    ids[-1, :3], mask[-1, :3] = (PAD, 0) if batch > 1 else (ids[-1, :3], 1)
    return inputs | {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("sessions", ["native"], indirect=True)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("with_video", [False, True], ids=["image", "image and video"])
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL", "InternVL"])
def test_images_and_frames(name, with_video, batch, open_cache):
    model, inputs = build(name), inputs_of(name, batch, with_video)
    expected = greedy(model, inputs)
    cache = open_cache(model)
    assert torch.equal(greedy(model, inputs, cache), expected)
    other = dict(inputs, pixel_values=-inputs["pixel_values"])
    assert not torch.equal(greedy(model, other), expected)  # the image is looked at
