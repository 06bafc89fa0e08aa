"""Pictures stay beside the results they show; the pages get copies under pictures/."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File

PLACE = "../bench/results/"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pictures of bench/results to the pages' files."""
    from pathlib import Path

    results = Path(config.docs_dir) / PLACE
    for picture in sorted(results.rglob("*.png")):
        name = picture.relative_to(results).as_posix()
        files.append(File.generated(config, f"pictures/{name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(f"]({PLACE}", "](pictures/")
