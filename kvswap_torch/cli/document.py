"""A document's text: of a file, of stdin, or of a PDF where pypdf is installed."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from kvswap_torch.errors import ConfigError

STDIN = Path("-")
PDF = b"%PDF-"
WITHOUT = (
    "convert it (pdftotext {name} - | kvswap ingest -), or install what reads it: "
    "pip install 'kvswap_torch[pdf]'"
)


def document_text(document: Path) -> str:
    """The document's text.

    Raises
    ------
    ConfigError
        It is empty of text, cannot be read, or is no text.
    """
    name = "stdin" if document == STDIN else str(document)
    try:
        content = _stdin() if document == STDIN else document.read_bytes()
        if content.startswith(PDF):
            return _pdf_text(content, name)
        return content.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--document: must be readable UTF-8 text: {error}") from error


def _stdin() -> bytes:
    if sys.stdin is None:
        raise ConfigError("--document: must not be - where stdin is closed")
    return sys.stdin.buffer.read()


def _pdf_text(content: bytes, name: str) -> str:
    """Page after page, an empty line between them."""
    remedy = WITHOUT.format(name=name if name != "stdin" else "book.pdf")
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError as error:
        raise ConfigError(
            f"--document: must be text, and {name} is a PDF; {remedy} ({error})"
        ) from error
    try:
        pages = [page.extract_text().strip() for page in PdfReader(io.BytesIO(content)).pages]
    except (PyPdfError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--document: {name} must be a PDF that pypdf can read, and is none: {error}; convert "
            f"it: pdftotext {name} -"
        ) from error
    text = "\n\n".join(filter(None, pages))
    if not text:
        raise ConfigError(
            f"--document: {name} must have text, and its {len(pages)} pages are pictures; run them "
            "through an OCR program first"
        )
    return text
