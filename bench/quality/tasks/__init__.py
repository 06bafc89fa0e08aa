"""The tasks by name; each file has one kind.

A task is ``draw(rng, wording, words, density) -> Drawn``: facts to lay into a text, and which of
them are asked for. `density` below 1 lays in fewer distractors, for short documents.
"""

from bench.quality.tasks import json_table, needle, turns, variables, word_counts
from bench.quality.tasks.drawn import Drawn

TASKS = {
    "needle": needle.single,
    "multi-key": needle.multi_key,
    "multi-value": needle.multi_value,
    "multi-query": needle.multi_query,
    "variables": variables.draw,
    "words": word_counts.draw,
    "json": json_table.draw,
    "turns": turns.draw,
}
NEEDLES = ("needle", "multi-key")
LANGUAGE = "language"  # the text's own continuation: no right answer, only a loss

__all__ = ["LANGUAGE", "NEEDLES", "TASKS", "Drawn"]
