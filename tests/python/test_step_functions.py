"""The class of a symbol that a decoding step ran, as tools/step_functions.py counts it."""

import pytest

from tools.step_functions import SYMBOL, class_of


@pytest.mark.parametrize(
    ("symbol", "owner"),
    [
        ("kvswap::Engine::attend(kvswap::AttendArgs const&)", "Engine"),
        ("kvswap::(anonymous namespace)::UringReader::submit(std::span<int, 4ul>)", "UringReader"),
        ("kvswap::ReadPool::Part::operator()(int) const", "ReadPool"),
        ("kvswap::N_AVX2::score(float const*)", ""),
        ("kvswap::(anonymous namespace)::asked(kvswap::AttendArgs const&)", ""),
        ("kvswap::Result<std::vector<kvswap::Batch> >::value()", "Result"),
    ],
)
def test_the_outermost_class_counts(symbol: str, owner: str) -> None:
    found = SYMBOL.match(f"00000000000a1b20 t {symbol}")
    assert found and found[2] == symbol
    assert class_of(symbol) == owner


def test_what_is_no_code_of_ours_has_no_breakpoint() -> None:
    assert SYMBOL.match("00000000000a1b20 r kvswap::kNames") is None
    assert SYMBOL.match("00000000000a1b20 t std::sort(int*, int*)") is None
