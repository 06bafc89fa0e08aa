"""The classes of our own C++ sources: how many methods each declares, how many lines it takes.

It reads what clang-format and our style leave: no macro opens or closes a brace, and a `<` before a
declaration's `=` opens template arguments. What it does not know it does not skip silently: braces
must match, and a member that is defined outside must belong to a class that was found.

A method is a member function that a class declares, each overload by itself, with its body there or
without; constructors, the destructor, operators and friends are none. A class takes the lines from
its head to its closing brace and those of its members that are defined elsewhere, less those of the
types inside it, which are counted by themselves. Types inside functions belong to their function.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SILENT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:[^"\\\n]|\\.)*"|(?<!\w)'(?:[^'\\\n]|\\.)+'"""
    r"""|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*""",
    re.DOTALL | re.MULTILINE,
)
TOKEN = re.compile(r"[A-Za-z_]\w*|::|->|[0-9][\w.']*|\S")
CLOSING = {"(": ")", "{": "}", "[": "]"}
CLASS_KEYS = ("class", "struct", "union")
# A declaration that begins so declares no member function.
OTHERS = ("using", "typedef", "friend", "static_assert", "enum")
# What may stand before parentheses that are not a function's.
NOT_NAMES = ("alignas", "decltype", "explicit", "noexcept", "requires", "__attribute__")


class Token(NamedTuple):
    text: str
    line: int


@dataclass
class CppClass:
    methods: int = 0
    lines: int = 0


class Unknown(Exception):
    """The sources say something that this reader does not know."""


def tokens_of(source: str) -> list[Token]:
    """Without comments, preprocessor lines and what stands in quotes."""
    blank = SILENT.sub(lambda found: "\n" * found[0].count("\n") or " ", source)
    found, line, at = [], 1, 0
    for match in TOKEN.finditer(blank):
        line += blank.count("\n", at, match.start())
        at = match.start()
        found.append(Token(match[0], line))
    return found


class Reader:
    """Reads one file after the other; `classes` is what they hold together."""

    def __init__(self) -> None:
        self.classes: dict[str, CppClass] = {}
        self.outside: list[tuple[str, tuple[str, ...], str, int]] = []  # of members defined outside
        self.path = ""
        self.tokens: list[Token] = []
        self.at = 0

    def read(self, path: str, source: str) -> None:
        self.path, self.tokens, self.at = path, tokens_of(source), 0
        self.scope((), None)
        if self.at < len(self.tokens):
            raise Unknown(f"{path}:{self.tokens[self.at].line}: a brace closes nothing")

    def finish(self) -> dict[str, CppClass]:
        """After the last file: members that stand outside are added to their classes."""
        for path, space, name, lines in self.outside:
            for depth in range(len(space), -1, -1):
                owner = self.classes.get("::".join((*space[:depth], name)))
                if owner is not None:
                    owner.lines += lines
                    break
            else:
                raise Unknown(f"{path}: no class {name}")
        self.outside = []
        return self.classes

    def scope(self, space: tuple[str, ...], of: CppClass | None) -> None:
        """The declarations of a namespace or class, up to its closing brace."""
        while self.at < len(self.tokens) and self.tokens[self.at].text != "}":
            self.declaration(space, of)

    def declaration(self, space: tuple[str, ...], of: CppClass | None) -> None:
        begin = self.at
        if self.tokens[begin].text in (";", "public", "private", "protected"):
            self.at += 1 if self.tokens[begin].text == ";" else 2
            return
        head = self.head()
        end = self.tokens[self.at].text
        texts = without_attributes([token.text for token in head])
        first = texts[0] if texts else ""
        if end == "{" and first in ("namespace", "inline") and "namespace" in texts:
            names = [text for text in texts if text not in ("namespace", "inline", "::")]
            self.block((*space, *(names or [self.path])), None)
        elif end == "{" and texts == ["extern"]:
            self.block(space, None)
        elif end == "{" and first in CLASS_KEYS and "(" not in texts:
            self.define_class(space, of, texts, begin)
        else:
            self.member(space, of, texts, begin)

    def head(self) -> list[Token]:
        """Up to what ends a declaration's head: its `;`, its body's `{`, or its value's `=`."""
        head: list[Token] = []
        while self.tokens[self.at].text == "template":
            self.skip_template()
        while True:
            token = self.tokens[self.at]
            if token.text in (";", "{") or (token.text == "=" and not is_operator(head)):
                return head
            if token.text == ":" and head and head[-1].text != ":" and is_function(head):
                self.skip_initialisers()
                return head
            begin = self.at
            self.pass_one()
            head += self.tokens[begin : self.at]

    def define_class(
        self, space: tuple[str, ...], of: CppClass | None, texts: Sequence[str], begin: int
    ) -> None:
        name = class_name(texts)
        here = CppClass()
        key = "::".join((*space, *name))
        if name:
            if key in self.classes:
                raise Unknown(f"{self.path}: a second class {key}")
            self.classes[key] = here
        self.block((*space, *name), here)
        self.until_semicolon()
        taken = self.lines_since(begin)
        here.lines += taken
        if of is not None and name:
            of.lines -= taken

    def member(
        self, space: tuple[str, ...], of: CppClass | None, texts: list[str], begin: int
    ) -> None:
        """A function or a datum: declared in a class, defined here or outside of its class."""
        if texts and texts[0] in OTHERS:
            self.until_semicolon()
            return
        name, is_named = function_name(texts)
        # A function that returns a function's address has its name deeper.
        has_body = name or (texts and texts[-1] == ")")
        if self.tokens[self.at].text == "{" and has_body:
            self.skip("{")
        else:
            self.until_semicolon()
        if name and of is not None and is_named and name[-1] != space[-1]:
            of.methods += 1
        if name[:-1] and of is None:
            self.outside.append((self.path, space, "::".join(name[:-1]), self.lines_since(begin)))

    def block(self, space: tuple[str, ...], of: CppClass | None) -> None:
        self.at += 1
        self.scope(space, of)
        if self.at == len(self.tokens):
            raise Unknown(f"{self.path}: a brace is not closed")
        self.at += 1

    def lines_since(self, begin: int) -> int:
        return self.tokens[self.at - 1].line - self.tokens[begin].line + 1

    def skip_template(self) -> None:
        """`template <...>`, in which a `=` may stand."""
        begin, depth = self.at, 0
        while depth > 0 or self.at < begin + 2:
            depth += {"<": 1, ">": -1}.get(self.tokens[self.at].text, 0)
            self.at += 1

    def skip_initialisers(self) -> None:
        """Of a constructor: a brace behind a name belongs to it, the other one is the body's."""
        self.at += 1
        while self.tokens[self.at].text != "{" or self.tokens[self.at - 1].text not in (")", "}"):
            self.pass_one()

    def until_semicolon(self) -> None:
        while self.tokens[self.at].text != ";":
            self.pass_one()
        self.at += 1

    def pass_one(self) -> None:
        """A token, or all that stands in brackets."""
        text = self.tokens[self.at].text
        if text in CLOSING:
            self.skip(text)
        else:
            self.at += 1

    def skip(self, opening: str) -> None:
        """From an opening bracket to behind the one that closes it."""
        begin, closing = self.at, CLOSING[opening]
        self.at += 1
        while self.at < len(self.tokens):
            text = self.tokens[self.at].text
            if text in CLOSING:
                self.skip(text)
                continue
            self.at += 1
            if text == closing:
                return
            if text in CLOSING.values():
                break
        raise Unknown(f"{self.path}:{self.tokens[begin].line}: {opening} is not closed")


def is_operator(head: Sequence[Token]) -> bool:
    """Is the next token part of an operator's name?"""
    return any(token.text == "operator" for token in head[-3:]) and head[-1].text != ")"


def is_function(head: Sequence[Token]) -> bool:
    return bool(function_name(without_attributes([token.text for token in head]))[0])


def after_angles(texts: Sequence[str], at: int) -> int:
    """Behind the template arguments that begin at `at`."""
    depth = 0
    while at < len(texts):
        depth += {"<": 1, ">": -1}.get(texts[at], 0)
        at += 1
        if depth == 0:
            break
    return at


def without_attributes(texts: list[str]) -> list[str]:
    while texts and texts[0] == "[":
        texts = texts[texts.index("]") + 2 :]
    return texts


def plain(texts: Sequence[str]) -> Iterator[str]:
    """Without template arguments, which are written <>."""
    at = 0
    while at < len(texts):
        if texts[at] == "<":
            at = after_angles(texts, at)
            yield "<>"
        else:
            yield texts[at]
            at += 1


def class_name(texts: Sequence[str]) -> tuple[str, ...]:
    """Of `class alignas(8) A::B final : public C`: ("A", "B")."""
    words = [text for text in plain(without_attributes(list(texts[1:]))) if text != "<>"]
    name: list[str] = []
    for at, word in enumerate(words):
        if word in ("final", ":"):
            break
        if re.match(r"[A-Za-z_]", word) and (not name or words[at - 1] == "::"):
            name.append(word)
    return tuple(name)


def function_name(texts: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """((classes and name), whether it counts as a method) of a function's head; () of another's."""
    if "operator" in texts:
        begin = texts.index("operator")
        return (*qualifiers(list(plain(texts[:begin]))), "operator"), False
    words = list(plain(texts))
    for at, word in enumerate(words[:-1]):
        if words[at + 1] != "(" or (word == "<>" and at == 0):
            continue
        if word == "<>":  # a function template's specialisation
            at, word = at - 1, words[at - 1]
        if word in NOT_NAMES or not re.match(r"[A-Za-z_]", word):
            return (), False
        if words[words.index("(") + 1] in ("*", "&"):  # a pointer to a function is a datum
            return (), False
        is_destructor = at > 0 and words[at - 1] == "~"
        before = words[: at - 1] if is_destructor else words[:at]
        of = qualifiers(before)
        return (*of, word), not is_destructor
    return (), False


def qualifiers(words: list[str]) -> tuple[str, ...]:
    """Of `Result<int> A<>::B::`: ("A", "B")."""
    names: list[str] = []
    while words and words[-1] == "::":
        words = words[:-1]
        if words and words[-1] == "<>":
            words = words[:-1]
        if not words or not re.match(r"[A-Za-z_]", words[-1]):
            break
        names.insert(0, words[-1])
        words = words[:-1]
    return tuple(names)
