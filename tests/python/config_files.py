"""Config files, good and bad, that Python's loader and the C++ one must judge alike.

`BAD` has the text and words of Python's message; `PARSERS_OWN` are refused by both,
each in the words of its JSON parser. `GOOD` are fields beside the version.
"""

from __future__ import annotations

import json
from typing import Any

_ROW = {"batch": 1, "context": 8192, "settings": {}}


def _file(**fields: Any) -> str:
    return json.dumps({"version": 1, **fields})


def _table(*rows: Any) -> str:
    return _file(table=list(rows))


GOOD: list[dict[str, Any]] = [
    {},
    {"rank": 8, "group_tokens": 64, "summary_dtype": "int8", "replacement": "unused"},
    {"rank": [8, 48, 16], "true_query_layers": [0, 2], "look_ahead": False, "checksum": False},
    {
        "groups_max": 7,
        "pages_max": 8,
        "sink_tokens": 0,
        "tail_tokens": 0,
        "read_depth": 1024,
        "io_timeout_seconds": 0,
        "wipe_on_close": True,
        "audit_every": 16,
        "missed_mass_max": 0.05,
        "resident_layers": 2,
    },
    {"disk_quota_bytes": 2**63 - 1, "device_model": "ufs", "reader": "sync", "io_mode": "buffered"},
    {
        "disk_quota_bytes": None,
        "resident_layers": None,
        "device_model": None,
        "projection_file": None,
        "model": None,
    },
    {"projection_file": "deep/..er/p.safetensors", "projection_kind": "svd_keys"},
    {"model": {"layers": 5, "dtype": None, "model_type": "qwen3"}, "provenance": {"é": [1, None]}},
    {"merge_gap_bytes": 4096, "merge_bytes_max": 4096, "select_queries_max": 16},
    {"heads": "each", "rank": 64, "group_tokens": 16},
    {"records": "fp8", "group_tokens": 8},
    {
        "records": "model",
        "table": [
            {"batch": 1, "context": 8192, "settings": {"records": "fp8", "group_tokens": 16}}
        ],
    },
    {"heads": "each", "rows": "box", "group_tokens": 32},
    {"rows": "mean", "score": "max", "exact_layers": [0, 1], "heads": "each"},
    {"rows": "none", "group_tokens": 16, "score": "sum", "audit_every": 0, "missed_mass_max": None},
    {"projection_kind": "skewed", "score": "max"},
    {"score_columns": 12, "score": "max", "projection_kind": "svd_keys"},
    {"score_columns": None, "score_share": 0.2, "score": "mass"},
    {
        "rank": 32,
        "table": [
            {"batch": 1, "context": 8192, "settings": {}},
            {
                "batch": 1,
                "context": 131072,
                "settings": {"score_columns": 12, "score_share": 0.5},
            },
        ],
    },
    {"rows": "given", "heads": "each", "group_tokens": 16, "audit_every": 64},
    {"rows": "none", "keeper": "given", "keep_tokens": 9, "keep_interval": 7},
    {"rows": "none", "keeper": "newest", "tail_tokens": 1020, "groups_max": 1, "pages_max": 8},
    {"rows": "box", "keeper": "observed", "keep_tokens": 1, "keep_window": 4096, "keep_pool": 63},
    {"keeper": "observed", "keep_interval": 128, "keep_scores": "disk"},
    {"rows": "mean", "keeper": "observed", "keep_share": "auto", "replacement": "score"},
    {"rows": "none", "keeper": "heavy", "keep_interval": 1, "keep_pool": 5},
    {"rows": "none", "keeper": "arkv", "keep_variance": 263.8108280337562, "keep_slack": 0.0},
    {"rows": "box", "keeper": "arkv", "keep_variance": 1e6, "keep_slack": 1.0, "keep_pool": 3},
    {"keeper": "observed", "keep_variance": 0.0, "keep_slack": 0.75, "keep_ratio": 1.0},
    {"rows": "none", "keeper": "arkv", "keep_ratio": None},
    {"keeper": "arkv", "keep_ratio": 0.0, "keep_count": "tokens"},
    {"keeper": "arkv", "keep_ratio": None, "keep_temperatures": [0.1, 1e6, 2.5]},
    {"keeper": "arkv", "keep_ratio": 1.0, "keep_count": "bytes", "keep_tokens": 4},
    {"keeper": "observed", "keep_tokens": 1, "group_tokens": 64},
    {"rows": "box", "group_tokens": 16, "rank": 32, "score": "sum", "projection_file": None},
    {
        "group_tokens": 2,
        "table": [
            {"batch": 1, "context": 8192, "settings": {"rank": [8, 8]}},
            {"batch": 1, "context": 32768, "settings": {"rank": 16, "true_query_layers": [1]}},
            {"batch": 8, "context": 32768, "settings": {"pages_max": 400, "device_model": None}},
        ],
    },
]

BAD: list[tuple[str, str]] = [
    ("[]", "must be a JSON object, got list"),
    ("3", "must be a JSON object, got int"),
    ("3.5", "must be a JSON object, got float"),
    ("null", "must be a JSON object, got NoneType"),
    ('"text"', "must be a JSON object, got str"),
    ("{}", "version must be 1"),
    ('{"version": 2, "new_field": 1}', "version must be 1"),
    ('{"version": true}', "got True"),
    ('{"version": 1.0}', "got 1.0"),
    ('{"version": "1"}', "got '1'"),
    ('{"version": null}', "got None"),
    ('{"version": 1, "rank": 32, "rank": 16}', "got rank again"),
    (_file(rnak=32, zeta=1, Alpha=2), "got Alpha, rnak, zeta"),
    (_file(source="x"), "got source"),
    *((_file(rank=rank), "rank: must be") for rank in (0, 65537, -1, "32", [], [8, 0], [True])),
    *((_file(heads=heads), "heads: must be") for heads in ("both", "", None, 4, ["each"])),
    (
        _file(table=[{"batch": 1, "context": 8, "settings": {"heads": "each"}}]),
        "table: a solution must set only",
    ),
    *((_file(rows=rows), "rows: must be") for rows in ("pq", "", None, 1, ["box"])),
    *((_file(records=kind), "records: must be") for kind in ("e4m3", "", None, 8, ["fp8"])),
    *(
        (_file(rows="box", **{name: value}), f"{name}: must be left out where rows is box")
        for name, value in (
            ("rank", 16),
            ("rank", [32, 32]),
            ("score", "mass"),
            ("score", "max_mass"),
            ("projection_file", "p.safetensors"),
            ("projection_kind", "svd_keys"),
            ("score_columns", 8),
        )
    ),
    *((_file(score_columns=value), "score_columns: must be") for value in (0, 65537, 8.0, True)),
    *((_file(score_columns=8, score_share=value), "score_share: must be a float from 0.0 to 1.0")
      for value in (1, -0.5, 1.5, "all", None)),
    *((_file(score_columns=8, score=score),
       f"score_columns: must be left out where score is {score}, since a head's softmax needs")
      for score in ("mass", "max_mass")),
    *((_file(score_columns=8, projection_kind=kind),
       f"score_columns: must be left out where projection_kind is {kind}, since its first columns")
      for kind in ("pca_per_head", "skewed", "channels")),
    (_file(score_share=0.5),
     "score_share: must be left out where score_columns is null, since all groups are scored by"),
    *((_file(rank=rank), "rank: must be") for rank in (None, 8.0, [[8]], {"a": 1}, 10**30)),
    *((_file(group_tokens=value), "group_tokens: must be") for value in (0, 65, 4.0, True, None)),
    (_file(group_tokens=1e22), "got 1e+22"),
    (_file(group_tokens=0.00001), "got 1e-05"),
    (_file(group_tokens=-0.5), "got -0.5"),
    (_file(summary_dtype="int4"), "must be one of model, int8, got 'int4'"),
    (_file(summary_dtype=None), "got None"),
    (_file(summary_dtype='it"s\n'), "summary_dtype: must be"),
    (_file(summary_dtype="it's"), "summary_dtype: must be"),
    (_file(replacement=["fifo"]), "got ['fifo']"),
    (_file(device_model="tape"), "must be one of None, nvme, ufs, emmc"),
    *((_file(resident_layers=value), "resident_layers: must be")
      for value in (1, 0, -2, "all", 2.0, True)),
    (_file(layout="clusters"), "must be one of sequence"),
    (_file(look_ahead=1), "must be true or false, got 1"),
    (_file(checksum=None), "must be true or false, got None"),
    *((_file(true_query_layers=value), "true_query_layers: must be")
      for value in (3, "1", [1, 0], [0, 0], [-1], [1.0], [False], None)),
    *((_file(exact_layers=value), "exact_layers: must be") for value in (0, [2, 1], [-1], [2**63])),
    *((_file(rows=rows, rank=8), f"rank: must be left out where rows is {rows}")
      for rows in ("mean", "given", "none")),
    (_file(rows="none", score="mass"), "score: must be left out where rows is none"),
    (_file(keeper="oldest"), "keeper: must be one of none, newest, observed, heavy,"),
    (_file(keeper="newest"), "keeper: must be left out where rows is low_rank"),
    (_file(keep_tokens=8), "keep_tokens: must be left out where keeper is none, since no token"),
    (_file(rows="none", keeper="newest", keep_interval=8),
     "keep_interval: must be left out where keeper is newest"),
    (_file(keeper="heavy", keep_pool=3), "keep_pool: must be left out where keeper is heavy"),
    (_file(keeper="given", keep_window=8), "keep_window: must be left out where keeper is given"),
    *((_file(keeper="observed", **{name: value}), f"{name}: must be")
      for name, value in (("keep_tokens", 0), ("keep_window", 0), ("keep_window", 4097),
                          ("keep_pool", 0), ("keep_pool", 64), ("keep_interval", -1))),
    *((_file(rows="none", **{name: value}), f"{name}: must be left out where rows is none, since")
      for name, value in (("missed_mass_max", 0.1), ("audit_every", 16))),
    *((_file(keeper="observed", **{name: 0.5}),
       f"{name}: must be left out where keeper is observed, since it belongs to arkv")
      for name in ("keep_variance", "keep_slack", "keep_ratio")),
    (_file(keeper="observed", keep_ratio=None),
     "keep_ratio: must be left out where keeper is observed, since it belongs to arkv"),
    *((_file(keeper="arkv", keep_ratio=value), "keep_ratio: must be a float from 0.0 to 1.0")
      for value in (1, -0.5, 1.5, "half", False)),
    (_file(keeper="observed", keep_interval=8, keep_scores="all"), "keep_scores: must be one of"),
    (_file(keeper="observed", keep_scores="disk"),
     "keep_scores: must be left out where keep_interval is 0, since nothing is decided while dec"),
    (_file(keeper="heavy", keep_interval=1, keep_scores="disk"),
     "keep_scores: must be left out where keeper is heavy, since it belongs to observed"),
    (_file(rows="none", keeper="observed", keep_share="auto"),
     "keep_share: must be left out where rows is none, since no groups are selected"),
    (_file(keeper="heavy", keep_share="auto"), "keep_share: must be left out where keeper is h"),
    (_file(keeper="observed", keep_share=0.25), "keep_share: must be one of fixed, auto, got 0.25"),
    (_file(keeper="arkv", keep_tokens=3),
     "keep_tokens: must be at least group_tokens (4), since a group joins what is kept at once"),
    (_file(keeper="arkv", keep_count="pages", keep_ratio=0.5), "keep_count: must be one of bytes"),
    (_file(keeper="arkv", keep_count="tokens"),
     "keep_count: must be left out where keep_ratio is 1, since no token is rounded"),
    (_file(keeper="heavy", keep_count="tokens"), "keep_count: must be left out where keeper is h"),
    *((_file(keeper="arkv", keep_ratio=None, keep_temperatures=value),
       "keep_temperatures: must be 3 floats from 0.1 to 1000000.0, got")
      for value in ([1.0, 2.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 0.0], [1.0, 2.0, 3], 2.0, None,
                    ["1", 2.0, 3.0], [])),
    (_file(keeper="arkv", keep_ratio=0.5, keep_temperatures=[1.0, 2.0, 3.0]),
     "keep_temperatures: must be left out where keep_ratio is 0.5, since it belongs to null"),
    (_file(keep_temperatures=[1.0, 2.0, 3.0]),
     "keep_temperatures: must be left out where keep_ratio is 1, since it belongs to null"),
    (_file(keeper="arkv", keep_interval=4), "keep_interval: must be left out where keeper is arkv"),
    *((_file(keeper="arkv", keep_slack=value), "keep_slack: must be a float from 0.0 to 1.0")
      for value in (1, -0.5, 1.5, "all", None, True)),
    (_file(keeper="arkv", keep_variance=-1.0),
     "keep_variance: must be a float from 0.0 to 1000000.0, got -1.0"),
    (_file(rows="given", score="max"), "score: must be left out where rows is given, since scores"),
    (_file(rows="given", summary_dtype="int8"),
     "summary_dtype: must be left out where rows is given, since there is no summary"),
    (_table({**_ROW, "settings": {"rows": "none", "audit_every": 1}}),
     "context 8192: audit_every: must be left out where rows is none"),
    (_file(disk_quota_bytes=0), "disk_quota_bytes: must be"),
    (_file(disk_quota_bytes=2**63), "got 9223372036854775808"),
    (_file(read_depth=1025), "read_depth: must be"),
    (_file(missed_mass_max=1), "missed_mass_max: must be a number between 0 and 1, got 1"),
    (_file(missed_mass_max=0.0), "missed_mass_max: must be a number between 0 and 1, got 0.0"),
    (_file(missed_mass_max=1.5), "missed_mass_max: must be"),
    (_file(missed_mass_max="5 %"), "missed_mass_max: must be"),
    (_file(missed_mass_max=True), "missed_mass_max: must be"),
    (_file(io_timeout_seconds=-1), "io_timeout_seconds: must be"),
    (_file(wipe_on_close=1), "wipe_on_close: must be"),
    (_file(io_timeout_seconds=1.5), "io_timeout_seconds: must be"),
    (_file(merge_bytes_max=4095), "merge_bytes_max: must be"),
    (_file(merge_gap_bytes=1 << 20), "merge_bytes_max: must be at least merge_gap_bytes"),
    (_file(pages_max=99), "pages_max: must be at least groups_max"),
    (_file(pages_max=7, groups_max=4), "pages_max: must be at least select_queries_max"),
    *((_file(projection_file=name), "projection_file: must") for name in ("", "/a", "../a", 3)),
    (_file(projection_file="a/../../b"), "projection_file: must lie"),
    (_file(projection_kind="pca"), "projection_kind: must"),
    (_file(model=3), "model: must be a ModelIdentity or None, got 3"),
    (_file(model=[]), "model: must be"),
    (_file(model={"wheels": 4, "doors": 2}), "got doors, wheels"),
    *((_file(model={"layers": value}), "model.layers: must be")
      for value in (0, -3, "5", 1.5, 2**63)),
    (_file(model={"dtype": ""}), "model.dtype: must be a str"),
    (_file(model={"config_hash": 7}), "model.config_hash: must be a str"),
    (_file(provenance=None), "provenance: must be a mapping"),
    (_file(provenance=[1]), "provenance: must be a mapping"),
    (_file(table="none"), "table: must be a list of solutions, got 'none'"),
    (_file(table={"a": 1}), "table: must be a list"),
    (_table({**_ROW, "context": 2**63}), "context must be a positive int"),
    (_table({"batch": 1}), "got {'batch': 1}"),
    (_table(3), "a row must have batch"),
    (_table({**_ROW, "more": True}), "'more': True}"),
    (_table({**_ROW, "settings": []}), "settings must be an object, got []"),
    (_table({**_ROW, "batch": 0}), "batch must be a positive int, got 0"),
    (_table({**_ROW, "context": 2.0}), "context must be a positive int, got 2.0"),
    (_table({**_ROW, "batch": True}), "got True"),
    (_table(_ROW, _ROW), "got two for batch 1, context 8192"),
    (_table({**_ROW, "settings": {"checksum": False, "b": 1}}), "got b, checksum"),
    (_table({**_ROW, "settings": {"rank": 0}}), "table: batch 1, context 8192: rank: must be"),
    (_table({**_ROW, "settings": {"pages_max": 10}}), "context 8192: pages_max: must be at least"),
    (_table({**_ROW, "settings": {"projection_file": "/p"}}), "8192: projection_file: must lie"),
]  # fmt: skip

PARSERS_OWN = [
    r'{"version": 1, "projection_file": "21\ud8008a"}',
    "",
    '{"version": 1}\x00, "layout": "clusters"}',
    "{",
    '{"version": 1,}',
    "[" * 100_000,
    "\ufeff{}",
    '{"version": 1, "rank": ' + "9" * 5000 + "}",
    '{"version": 1, "provenance": {"x": NaN}}',
    '{"version": 1, "provenance": {"x": -Infinity}}',
]
