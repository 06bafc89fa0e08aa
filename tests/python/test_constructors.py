"""What a part of the C++ code must be given to be built: at most four others, by reference.

A constructor with more ties its class to all of them. Those that have more today are named, with
how many; the list is to become shorter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.python.test_map import CPP

REFERENCES_MAX = 4
MORE = {
    "SnapshotWriter": 8,
    "ChunkedPrefill": 7,
    "UserOverrides": 7,
    "Appender": 6,
    "SequenceEditor": 6,
    "SnapshotReader": 6,
}
CLASS = re.compile(r"\b(?:class|struct)\s+(?:\[\[\w+\]\]\s*)?(\w+)[^;{}()]*\{")


def closed(text: str, begin: int) -> int:
    """Behind what closes the bracket that stands before `begin`."""
    depth = 1
    while depth:
        depth += (text[begin] in "({[") - (text[begin] in ")}]")
        begin += 1
    return begin


def parameters(listed: str) -> list[str]:
    """What stands between commas, but for those inside of brackets."""
    found, depth = [""], 0
    for letter in listed:
        depth += (letter in "<({[") - (letter in ">)}]")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def constructors(source: str) -> Iterator[tuple[str, int]]:
    """(class, references that it takes) of each constructor that a class declares."""
    text = re.sub(r"//[^\n]*", "", source)
    for match in CLASS.finditer(text):
        name, body = match[1], text[match.end() : closed(text, match.end())]
        for call in re.finditer(rf"(?<![\w~:.>])(?<!new )(?<!return ){name}\(", body):
            end = closed(body, call.end())
            if re.match(r"\s*(?:noexcept\s*)?[:;{=]", body[end:]):
                taken = parameters(body[call.end() : end - 1])
                yield name, sum("&" in each and "&&" not in each for each in taken)


def test_constructors_take_few_references() -> None:
    found = [each for path in CPP for each in constructors(path.read_text(encoding="utf-8"))]
    assert len(found) > 150
    assert {name: count for name, count in found if count > REFERENCES_MAX} == MORE


TOY = """
    /// Toy(int& none, int& none, int& none);
    class [[nodiscard]] Toy final : public Base<int> {
     public:
      explicit Toy(A& a, const B& b, std::map<int, C&> c, D&& moved, Met met = {}) : a_(a) {}
      Toy(const Toy&) = delete;
      ~Toy();
      Toy* again(A& a, B& b) { return new Toy(a, b, {}, D(), met_); }

     private:
      struct Inner {
        Inner(A& a,
              B& b);
      };
      A& a_;
    };
"""


def test_what_is_counted() -> None:
    assert list(constructors(TOY)) == [("Toy", 3), ("Toy", 1), ("Inner", 2)]
