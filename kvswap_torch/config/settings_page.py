"""The page docs/settings.md, made of the fields' own words: ``make schema`` writes it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kvswap_torch.config.engine import WORDS
from kvswap_torch.config.nested import BLOCKS, default_score
from kvswap_torch.config.retention import POLICIES
from kvswap_torch.config.swap_config import SwapConfig
from kvswap_torch.config.v1 import PATHS

_HEAD = """\
# Settings

A cache needs none of them. Eight are worth knowing; everything else is advanced.

| | where | meaning |
|---|---|---|
| 1 | `KVSwapCache(path=)` | folder on the disk that holds the cache |
| 2 | `kv_memory_bytes=` | hard limit on memory; everything else follows from it |
| 3 | `max_context=`, `max_batch=` | allocate and check now, for this many tokens and sequences |
| 4 | `preset=` or `config=` | a published method ([presets](presets.md)), or a tuned file |
| 5 | `keep=` | for presets that evict: tokens attended per layer, or a fraction of `max_context` |
| 6 | `selection.top_k_groups` | groups attended per step: more is more accurate and slower |
| 7 | `storage.kv_dtype` | `auto`; `fp8_e4m3`: half on disk and in pages; `int4`: 0.3 on disk |
| 8 | `prefetch.mode` | `verify` needs nothing; `trust` only with a config of `kvswap tune` |

The first five are arguments of a cache. The others belong to a `SwapConfig`, in blocks:

```python
from kvswap_torch import SwapConfig

config = SwapConfig(selection={"top_k_groups": 128}, storage={"kv_dtype": "fp8_e4m3"})
config = SwapConfig.preset("quest", {"selection.top_k_groups": 128})
config = config.with_settings({"memory.replacement": "lru"})
```

A file has the same blocks, and only what differs from the defaults (`SwapConfig.save(full=True)`
writes all):

```text
{
  "version": 2,
  "selection": {"top_k_groups": 128},
  "retention": {"policy": "snapkv", "tokens": 256}
}
```

`retention`, `clusters` and `audit` may be absent. Files of version 1, which were flat, are read as
they were meant; their names are the last column of each table.

## Advanced
"""


def page() -> str:
    """The text of docs/settings.md."""
    parts = [_HEAD]
    for name, kind in BLOCKS.items():
        if name == "retention":
            parts += [_retention()]
            continue
        about = SwapConfig.__dataclass_fields__[name].metadata["doc"]
        parts += [f"### {name}\n\n{_sentence(about)}\n", _table(name, kind)]
    return "\n".join(parts)


def _retention() -> str:
    lines = [
        "### retention",
        "",
        "Tokens that stay in memory. One policy, with its own fields.",
        "",
    ]
    for policy, kind in POLICIES.items():
        about = (kind.__doc__ or "").splitlines()[0].replace("``", "`")
        lines += [f"#### {policy}", "", f"`{kind.__name__}`: {about}", ""]
        if dataclasses.fields(kind):
            lines.append(_table("retention", kind))
    return "\n".join(lines)


def _table(block: str, kind: type) -> str:
    names = {path: name for name, path in PATHS.items()}
    lines = ["| setting | default | meaning | version 1 |", "|---|---|---|---|"]
    for item in dataclasses.fields(kind):
        path = f"{block}.{item.name}"
        default: Any = default_score("low_rank") if path == "selection.score" else item.default
        doc = item.metadata["doc"].replace("|", "\\|")
        old = names.get(path)
        words = {} if old is None else WORDS.get(old, {})
        changed = {new: word for new, word in words.items() if new != word}
        told = "" if old is None else f"`{old}`" + _words(changed)
        lines.append(f"| `{path}` | `{json.dumps(default)}` | {doc} | {told} |")
    return "\n".join(lines) + "\n"


def _words(changed: dict[str, Any]) -> str:
    told = (
        f"`{json.dumps(old) if isinstance(old, bool) else old}` is `{new}`"
        for new, old in changed.items()
    )
    return ": " + ", ".join(told) if changed else ""


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
