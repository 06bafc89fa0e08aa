"""What README and docs/ tell to type: which lines are commands, and why some are not typed here.

A reason stands once, by the first words of the commands that it is for. `test_docs_typed.py` types
all others, and a block of text that is not in `SHOWN`; there each reason must be used.
"""

from __future__ import annotations

from pathlib import Path

from tests.how_long import is_long
from tests.packaging.run_docs import NEVER, PAGES, Block, blocks, commands

# First words of a command -> why no test here types it.
NOT_TYPED = NEVER | {
    "make demo": "minutes; the demo is run by itself",
    "make build": "has been done where this test runs",
    "make docs": "make test runs it",
    "make libtorch-example": "make test runs it",
    "make cpp-test": "make test runs it",
    "make py-test": "make test runs it",
    "make format": "rewrites the sources",
    "python3 -m venv": "a new environment, gigabytes; make first-hour makes it",
    ". env/bin/activate": "of that new environment",
    "pip install": "changes the environment; make first-hour and make wheels-check install",
    "apt-get": "changes the machine, as root; .ci/setup installs what is needed",
    "cmake": "compiles for minutes; make first-hour and test_libtorch_example.py do",
    "build/app": "what cmake would have made",
    "kvswap --install-completion": "writes to the reader's shell; test_cli_documents.py completes",
    "git clone": "needs the network",
    "cd kvswap_torch": "of that clone",
    "python -m kvswap_torch.integrations.kvpress": "needs the clone; test_integrations_kvpress.py",
    "python -m kvswap_torch.integrations.lm_eval": "fetches data; test_integrations_lm_eval.py",
    "lm_eval": "fetches a data set; test_serving_fields.py sends what it asks for",
}
# Start of a text that is no command -> what it is.
SHOWN = {
    "/etc/kvswap/serve.env": "two files of a server",
    "from langchain_openai": "a program for a package that is not among the tests'",
    "from llama_index": "a program for a package that is not among the tests'",
    "{": "settings in JSON",
    "csrc/": "the folders of the project",
}
# First words of a command -> why only `make test-long` types it.
LONG = {
    "kvswap tune": "times decoding steps for minutes",
    "torchrun": "two processes that load torch",
}
#: Long pages that only `make test-long` types.
LONG_PAGES = ("first-hour/operator.md", "first-hour/researcher.md")


def typed(block: Block) -> list[str]:
    """The block's commands; none where it shows something else."""
    if block.language not in ("sh", "text") or is_shown(block):
        return []
    return commands(block)


def is_shown(block: Block) -> bool:
    return block.language == "text" and block.text.startswith(tuple(SHOWN))


def is_typed_here(command: str) -> bool:
    left_out = NOT_TYPED if is_long() else NOT_TYPED | LONG
    return not command.startswith(tuple(left_out))


def pages_to_type() -> dict[Path, list[str]]:
    """Each page's commands that are typed here, in order; pages without any are left out."""
    found = {
        page: [c for b in blocks(page) for c in typed(b) if is_typed_here(c)] for page in PAGES
    }
    return {page: told for page, told in found.items() if told}
