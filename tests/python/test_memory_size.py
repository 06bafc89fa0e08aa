"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvswap_torch import ConfigError, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("65536", 65536),
        (65536, 65536),
        (" 2 kib ", 2048),
        ("3K", 3072),
        ("1TB", 10**12),
        (".5KiB", 512),
        ("1.KiB", 1024),
        ("7b", 7),
        ("1.9B", 1),
        ("0" * 5000 + "1." + "0" * 5000 + "KiB", 1024),
    ],
)
def test_sizes(size: int | str, count: int) -> None:
    assert parse_bytes(size) == count


@pytest.mark.parametrize(
    "size",
    [
        "",
        "MiB",
        "-1MiB",
        "1 XB",
        "1e3",
        "0",
        0,
        -5,
        "0.5B",
        "1_000",
        "1,5GB",
        "nan",
        2**63,
        "٣KB",
        "\x1e5",
        "9" * 5000,
        "0." + "0" * 5000 + "1KiB",
    ],
)
def test_what_is_no_size_is_refused(size: int | str) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-memory: must be"):
        parse_bytes(size, "--kv-memory")


@pytest.mark.parametrize("size", [None, 1.5, True, b"1"])
def test_other_types_are_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="must be an int or a string"):
        parse_bytes(size)


@given(st.integers(1, 2**63 - 1))
def test_a_plain_count_is_itself(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(str(count)) == parse_bytes(f"{count} B") == count


@given(st.integers(1, 10**6), st.sampled_from(["KiB", "MiB", "GiB", "kb", "Mb", "G"]))
def test_units_scale(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * parse_bytes(f"1{unit}")


@given(st.integers(1, 2**60))
def test_what_is_printed_reads_back_within_its_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006, abs=1)
