"""Doors from other programs: ``generate(custom_generate=...)``, lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path


def generate_folder() -> str:
    """The folder that ``model.generate(custom_generate=...)`` takes, to open a cache by itself.

    ::

        model.generate(
            **inputs, max_new_tokens=200, custom_generate=generate_folder(), trust_remote_code=True,
            kv_path="/fast/disk", kv_memory_bytes="256MiB",
        )

    Everything but the names of `kvswap_torch.integrations.generating.generate` is ``generate()``'s
    own. transformers runs no code of a folder without ``trust_remote_code=True``.
    """
    return str(Path(__file__).resolve().parent / "generate")
