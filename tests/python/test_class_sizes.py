"""No class is the place where everything happens: what it declares fits a head, all of it a file.

`cpp_classes.py` says what is counted of C++; of Python's the same: constructors and what operators
call, `__names__`, are no methods.
"""

import ast
import textwrap

import pytest

from tests.python.cpp_classes import CppClass, Reader, Unknown
from tests.python.test_map import CPP, CSRC, PYTHON, ROOT, inside

METHODS_MAX = 25
LINES_MAX = 400


def classes_of(**sources: str) -> dict[str, CppClass]:
    reader = Reader()
    for name, source in sources.items():
        reader.read(name, textwrap.dedent(source))
    return reader.finish()


@pytest.fixture(scope="module")
def ours() -> dict[str, CppClass]:
    reader = Reader()
    for path in CPP:
        reader.read(path.relative_to(CSRC).as_posix(), path.read_text(encoding="utf-8"))
    return reader.finish()


def test_classes_are_small(ours: dict[str, CppClass]) -> None:
    larger = {
        name: (size.methods, size.lines)
        for name, size in ours.items()
        if size.methods > METHODS_MAX or size.lines > LINES_MAX
    }
    assert larger == {}


def test_python_s_classes_are_small() -> None:
    sizes = {}
    for path in PYTHON:
        if not inside(path, "kvswap_torch/", "tuning/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                methods = sum(not name.startswith("__") for name in names)
                lines = node.end_lineno - node.lineno + 1
                sizes[f"{path.relative_to(ROOT)}: {node.name}"] = (methods, lines)
    assert len(sizes) > 100
    larger = {
        name: size for name, size in sizes.items() if size[0] > METHODS_MAX or size[1] > LINES_MAX
    }
    assert larger == {}


def test_the_reader_finds_classes_and_their_members(ours: dict[str, CppClass]) -> None:
    """A few that stay what they are, so that a reader that found nothing would not pass."""
    assert len(ours) > 300
    assert ours["kvswap::BlockReader"].methods == 5
    assert ours["kvswap::PaddingMask"].lines > ours["kvswap::PaddingMask"].methods > 4


TOY = """
    #include <vector>  // class Comment { void none(); };
    namespace kvswap {

    /// Not counted: void none();
    template <typename T>
    class [[nodiscard]] Toy final : public std::vector<T> {
     public:
      explicit Toy(int size) : size_(size), names_{"}", "{"} {}
      Toy(const Toy&) = delete;
      ~Toy() override = default;
      Toy& operator=(const Toy& other) = default;
      bool operator==(const Toy&) const { return true; }
      explicit operator bool() const { return size_ > 0; }
      friend void friendly(Toy& toy);
      using Met = std::function<void(int)>;

      int size() const { return size_; }
      void grow(int by);
      void grow(int by, std::function<void(int)> met = {});
      virtual void pure() = 0;
      virtual void usual() = default;
      [[nodiscard]] static std::vector<std::pair<int, int>> pairs() { return {{1, 2}}; }
      template <typename U, typename = std::enable_if_t<true>>
      U as(U (*how)(int)) const;

     private:
      struct Inner {
        int twice() const { return 2 * number; }
        enum class Kind { kOne, kTwo };
        int number = 0;
      };
      int size_ = 0;
      void (*hook_)(int) = nullptr;
      std::function<bool(int)> wanted_ = [](int i) { return i > 0; };
      std::vector<char> names_;
    };

    }  // namespace kvswap
"""
TOY_MEMBERS = """
    namespace kvswap {
    namespace {

    struct Toy {
      int of_this_file() const { return 1; }
    };
    int free(int number) { return number; }

    }  // namespace

    template <typename T>
    void Toy<T>::grow(int by) {
      struct Local {
        void counted_by_nobody() {}
      };
      size_ += by;
    }

    Toy<int>::Inner* found(Toy<int>& toy) { return nullptr; }

    struct Other::Late {
      void come();
    };

    void Other::Late::come() {}

    Other::Other(int number)
        : number_{number},
          twice_(2 * number) {
      free(number);
    }

    }  // namespace kvswap
"""
OTHER = """
    namespace kvswap {
    class Other {
     public:
      explicit Other(int number);

     private:
      struct Late;
      int number_, twice_;
    };
    }  // namespace kvswap
"""


def test_what_is_counted() -> None:
    found = classes_of(toy=TOY, other=OTHER, members=TOY_MEMBERS)
    assert found == {
        # size, grow twice, pure, usual, pairs, as; 32 lines, of which Inner has 5; 7 of grow().
        "kvswap::Toy": CppClass(methods=7, lines=32 - 5 + 7),
        "kvswap::Toy::Inner": CppClass(methods=1, lines=5),
        "kvswap::members::Toy": CppClass(methods=1, lines=3),
        "kvswap::Other": CppClass(methods=0, lines=8 + 5),
        "kvswap::Other::Late": CppClass(methods=1, lines=3 + 1),
    }


@pytest.mark.parametrize(
    "source",
    [
        "class Open { void one();",
        "void Nobody::come() {}",
        "}",
        "struct Twice {}; struct Twice {};",
        "void one() { (] }",
    ],
)
def test_what_it_does_not_know_is_not_skipped(source: str) -> None:
    with pytest.raises(Unknown):
        classes_of(one=source)
