"""Writes the tables of README.md and of docs/ from what stands in bench/results.

    python -m bench.table

Replaces what stands between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` on these pages; a
table whose marks are on neither is left out. Writes every side-by-side cell and their figure, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from bench import float8_scales, headline, kept_recall
from bench.clusters_table import cluster_rows, clustering_rows, drift_rows
from bench.float8_records import COLUMNS, lines
from bench.machine import RESULTS
from bench.presets_table import preset_rows
from bench.projections import projection_rows
from bench.quality.plan import CORE
from bench.quality.report import interval
from bench.rank_settings import ranked_rows
from bench.real_table import (
    lookup_rows,
    product_rows,
    sharing_rows,
    speed_rows,
    stage_rows,
    task_rows,
)
from bench.resident import resident_rows
from bench.side_by_side import figure as side_by_side_figure
from bench.side_by_side import report as side_by_side
from bench.sweep_table import sweep_rows
from kvswap_torch import format_bytes

PAGES = (Path("README.md"), Path("docs/results.md"), Path("docs/choosing.md"))
SHOWN = 2  # lengths of documents


def load(pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def decode_table() -> Iterator[str]:
    yield (
        "| shape, context, batch | disk | G, pages, KV memory | cache | ms per token "
        "| against kvswap | with a free disk |"
    )
    yield "|---|---|---|---|---|---|---|"
    for result in load("decode_*.json"):
        free = result["kvswap"].get("ms_with_a_free_disk")
        setting = (
            f"{result['shape']} ({result['layers']} layers), {result['context']:,}, "
            f"{result['batch']}"
        )
        disk = result["device"] + (
            "" if result["choices"] == "random" else f", choices of {result['choices']}"
        )
        for name, value in result["ms_per_token"].items():
            memory = bound = ""
            ratio = result["speed_against"].get(name)
            if name == "kvswap":
                memory = _decode_memory(result["kvswap"])
                bound = "" if free is None else f"{free:.1f} ms"
            elif free is not None:
                bound = f"{value / free:.1f}x"
            against = "" if ratio is None else f"{ratio:.2f}x"
            yield f"| {setting} | {disk} | {memory} | {name} | {value:.1f} | {against} | {bound} |"
            setting = disk = ""


def _decode_memory(ours: dict[str, Any]) -> str:
    config = ours["config"]
    policy = config.get("replacement", "fifo")
    return f"{config['G']}, {config['pages_max']} {policy}, 1/{1 / ours['memory_share']:.1f}"


def demo_table(name: str = "demo") -> Iterator[str]:
    for demo in load(f"{name}.json"):
        right, full = (
            sum(_is_right(q[where], q["truth"]) for q in demo["questions"])
            for where in ("on_disk", "in_memory")
        )
        yield "| | cache on disk | full cache |"
        yield "|---|---|---|"
        yield f"| right answers | {right} of {len(demo['questions'])} | {full} |"
        yield (
            f"| KV in memory | {format_bytes(demo['kv_bytes_in_memory'])} "
            f"(1/{1 / demo['memory_share']:.1f}) | {format_bytes(demo['kv_bytes_full'])} |"
        )
        yield (
            f"| tokens per second | {demo['tokens_per_second_on_disk']:.1f} "
            f"| {demo['tokens_per_second_in_memory']:.1f} |"
        )
        read, whole = (demo["run"][where]["prefill_seconds"] for where in ("disk", "memory"))
        yield f"| reading the document | {read:.1f} s | {whole:.1f} s |"


def _is_right(answer: str, truth: str) -> bool:
    """A chat model answers in a sentence that ends with the truth."""
    return truth in (answer, answer.rstrip(".").rpartition(" ")[2])


def tuner_table() -> Iterator[str]:
    yield (
        "| disk | context, batch | tuned in | settings measured | predictions off by (median, nine "
        "in ten) | within 20 % | tuned setting's speed of the best |"
    )
    yield "|---|---|---|---|---|---|---|"
    for result in load("tuner_*.json"):
        seconds = result["tune_seconds"]
        took = "" if seconds is None else f"{seconds:.0f} s"
        yield (
            f"| {result['device']} | {result['context']:,}, {result['batch']} | {took} "
            f"| {result['settings_measured']} "
            f"| {result['error_median']:.1%}, {result['error_p90']:.1%} "
            f"| {result['within_20_percent']:.0%} | {result['tuned_speed_of_best']:.1%} |"
        )


def turns_table() -> Iterator[str]:
    """Prefill, and time to the first token of a question about a document that is in the cache."""
    yield (
        "| shape | tokens | prefill: DynamicCache | kvswap | second turn: recomputed "
        "| DynamicCache holding it | kvswap | KV memory |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for result in load("turns_*.json"):
        prefill, turn = result["prefill_seconds"], result["second_turn_seconds"]
        yield (
            f"| {result['shape']} ({result['layers']} layers) | {result['tokens']:,} "
            f"| {prefill['DynamicCache']:.2f} s | {prefill['kvswap']:.2f} s "
            f"({result['prefill_ratio_of_pairs']:.2f}x) | {turn['recomputed']:.2f} s "
            f"| {turn['DynamicCache']:.3f} s | {turn['kvswap']:.3f} s "
            f"| {format_bytes(result['kv_memory_bytes'])} ({result['memory_share']:.1%}) |"
        )


def quality_table() -> Iterator[str]:
    """The longest documents; the rest stands in the results."""
    yield "| tokens | method | KV memory | read per token | needles | all tasks | loss |"
    yield "|---|---|---|---|---|---|---|"
    for result in load("quality/reference_model.json"):
        for length in sorted(result["lengths"], key=int)[-SHOWN:]:
            part, tokens = result["lengths"][length], f"{int(length):,}"
            for name in (name for name in CORE if name in part["methods"]):
                yield f"| {tokens} | {name} | {quality_cells(part['methods'][name])} |"
                tokens = ""


def million_table() -> Iterator[str]:
    yield "| rows | tokens | ms per token | the model's own | scoring | its share |"
    yield "|---|---|---|---|---|---|"
    for result in [*load("million.json"), *load("million_int4.json")]:
        for size in result["sizes"]:
            yield (
                f"| {result.get('rows', 'int8')} | {size['context']:,} "
                f"| {size['ms_per_token']:.1f} | {size['floor_ms_per_token']:.1f} "
                f"| {size['time_of_a_token_ms']['select']:.1f} | {size['scoring_share']:.0%} |"
            )


def quality_cells(method: dict[str, Any]) -> str:
    share, tasks = method["memory_share"], method["tasks"]
    return " | ".join(
        [
            "" if share is None else f"1/{1 / share:.1f}",
            format_bytes(method["bytes_read_per_token"]),
            interval(tasks.get("needles", {}).get("exact")),
            interval(tasks.get("all", {}).get("exact")),
            interval(tasks.get("language", {}).get("loss_difference"), "+.3f"),
        ]
    )


def quality_tasks_table() -> Iterator[str]:
    """Exact answers of each task, with the full cache and with kvswap, and their difference."""
    yield "| tokens | task | answers | full cache | kvswap | difference |"
    yield "|---|---|---|---|---|---|"
    for result in load("quality/reference_model.json"):
        for length, part in result["lengths"].items():
            tokens, methods = f"{int(length):,}", part["methods"]
            for task in part["able"] if "kvswap" in methods else ():
                full, ours = (methods[name]["tasks"][task] for name in ("full", "kvswap"))
                difference = interval(ours["exact_difference"], "+.2f")
                yield (
                    f"| {tokens} | {task} | {ours['answers']} | {full['exact'][0]:.2f} "
                    f"| {interval(ours['exact'])} | {difference} |"
                )
                tokens = ""
            for task, share in part["left_out"].items():
                yield f"| {tokens} | {task} | | {share:.2f} | left out | |"
                tokens = ""


def scoring_table() -> Iterator[str]:
    yield "| scoring by | traffic (worst layer) | of the choice still made (worst layer) |"
    yield "|---|---|---|"
    for result in load("score_bounds.json"):
        for way in result["ways"]:
            yield (
                f"| {way['way']} | {way['traffic']:.2f} ({way['traffic_worst']:.2f}) "
                f"| {way['kept']:.2f} ({way['kept_worst']:.2f}) |"
            )


def two_stage_choices() -> Iterator[str]:
    yield "| | columns first | share | of the choice (worst layer) | mass held | look-ups found |"
    yield "|---|---|---|---|---|---|"
    for result in load("stages.json"):
        for line in result["choices"]:
            found = "" if line["found"] is None else f"{line['found']:.2f}"
            yield (
                f"| {line['model']}, {line['length']:,} tokens | {line['columns']} "
                f"| {line['share']:.0%} | {line['chosen']:.2f} ({line['chosen_worst']:.2f}) "
                f"| {line['held']:.2f} | {found} |"
            )


def two_stage_times() -> Iterator[str]:
    yield "| shape, threads | tokens | columns first, share | one stage, ms | two stages, ms | |"
    yield "|---|---|---|---|---|---|"
    for result in load("stages.json"):
        for line in result["times"]:
            one, two = ("{:.2f} ({:.2f} to {:.2f})".format(*line[way]) for way in ("one", "two"))
            yield (
                f"| {line['shape']}, {line['threads']} | {line['context']:,} "
                f"| {line['columns']}, {line['share']:.0%} | {one} | {two} "
                f"| {line['two'][0] / line['one'][0]:.2f}x |"
            )


def float8_table() -> Iterator[str]:
    """What records in e4m3 take and save, a line a cache."""
    yield f"| shape, disk | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for results in load("float8_*.json"):
        place = f"`{results['shape']}`, {results['layers']} layers, {results['context']:,} tokens, "
        place += f"batch {results['batch']}, {results['device']}"
        for line in lines(results):
            yield f"| {place} | {' | '.join(line)} |"
            place = ""


def linear_table() -> Iterator[str]:
    yield "| kernels | model | batch | torch's linear layers | ours | |"
    yield "|---|---|---|---|---|---|"
    for results in load("linear*.json"):
        level = results["machine"]["simd"]
        for row in results["rows"]:
            yield (
                f"| {level} | {row['model']} | {row['batch']} | {row['torch_ms']:.1f} ms "
                f"| {row['ours_ms']:.1f} ms | {row['ratio_of_pairs']:.2f}x |"
            )


TABLES = {"headline": headline.rows, "decode": decode_table, "demo": demo_table}
TABLES |= {"tuner": tuner_table, "million": million_table}
TABLES |= {"quality": quality_table, "quality-tasks": quality_tasks_table}
TABLES |= {"side-by-side-context": side_by_side.context_rows}
TABLES |= {"side-by-side-presets": side_by_side.preset_rows}
TABLES |= {"side-by-side": side_by_side.compact_rows, "side-by-side-costs": side_by_side.in_full}
TABLES |= {"linear": linear_table}
TABLES |= {"turns": turns_table, "scoring": scoring_table}
TABLES |= {"two-stage-choices": two_stage_choices, "two-stage-times": two_stage_times}
TABLES |= {"demo-real": lambda: demo_table("demo_smollm2")}
DEFAULTS = "quality/*_defaults.json"
TABLES |= {"product": lambda: product_rows(load(DEFAULTS) + load("quality/smollm2*_tuned.json"))}
TABLES |= {"real-tasks": lambda: task_rows(load("quality/smollm2_*.json"))}
TABLES |= {"real-speed": lambda: speed_rows(load("real_speed*.json"))}
TABLES |= {"shared-pages": lambda: sharing_rows(load("shared_pages_*.json"))}
TABLES |= {"lookups": lambda: lookup_rows(load("lookups_*.json"))}
TABLES |= {"projections": lambda: projection_rows(load("projections_*.json"))}
TABLES |= {"ranked": lambda: ranked_rows(load("ranked_*.json"))}
TABLES |= {"sweeps": lambda: sweep_rows(load("quality/real_sweeps.json"))}
TABLES |= {"stages": lambda: stage_rows(load("score_stages_*.json"))}
TABLES |= {"clusters": lambda: cluster_rows(load("quality/clusters_*.json"))}
TABLES |= {"clusters-drift": lambda: drift_rows(load("drift*.json"))}
TABLES |= {"clusters-in-pools": lambda: clustering_rows(load("pools_*.json"))}
TABLES |= {"clusters-updates": lambda: clustering_rows(load("updates_*.json"))}
TABLES |= {"clusters-group-sizes": lambda: clustering_rows(load("sizes_*.json"))}
TABLES |= {"resident": lambda: resident_rows(load("resident*.json"))}


def placed_rows(
    head: str,
    of: ModuleType,
    results: list[dict[str, Any]],
    place_of: Callable[[dict[str, Any]], str],
) -> Iterator[str]:
    """A benchmark's own COLUMNS and lines() behind where they were measured, said once each."""
    yield f"| {head} | " + " | ".join(of.COLUMNS) + " |"
    yield "|" + "---|" * (1 + len(of.COLUMNS))
    for result in results:
        place = place_of(result)
        for line in of.lines(result):
            yield "| " + " | ".join([place, *line]) + " |"
            place = ""


def scales_table() -> Iterator[str]:
    head, results = "model, tokens, documents", load("scales_*.json")
    yield from placed_rows(
        head, float8_scales, results, lambda r: f"{r['model']}, {r['tokens']:,}, {r['documents']}"
    )


def recall_table() -> Iterator[str]:
    """What PRKV's mix holds of the attention."""
    head, results = "model, tokens read and decoded", load("kept_recall_*.json")
    yield from placed_rows(
        head, kept_recall, results, lambda r: f"{r['model']}, {r['prompt']:,} and {r['decoded']:,}"
    )


TABLES |= {"float8": float8_table, "float8-scales": scales_table, "kept-recall": recall_table}
TABLES |= {"presets": lambda: preset_rows(load("quality/presets_*.json"))}


def with_tables(text: str, tables: dict[str, str]) -> str:
    """The page with what stands between its marks replaced."""
    for name, table in tables.items():
        marks = rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)"
        text = re.sub(marks, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
    return text


def main() -> None:
    tables = {name: "\n".join(table()) for name, table in TABLES.items()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(with_tables(text, tables), encoding="utf-8")
    side_by_side.write_all()
    side_by_side_figure.draw()


if __name__ == "__main__":
    main()
