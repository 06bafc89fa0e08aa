"""A PDF of plain lines: what tests and first-hour users have in the place of a printed book."""

from __future__ import annotations

LINES_A_PAGE = 50
POINTS_A_LINE = 14
TOP = 770  # of the first line, in points from the bottom of A4


def pdf(*pages: str) -> bytes:
    """A PDF with these pages of Latin text, a line below the other; an empty one has no text."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>")
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for i, text in enumerate(pages):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        drawn = _drawn(text)
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    return _file(objects)


def book_pdf(text: str) -> bytes:
    """The same for a long text, cut into pages."""
    lines = text.splitlines()
    starts = range(0, len(lines), LINES_A_PAGE)
    return pdf(*("\n".join(lines[start : start + LINES_A_PAGE]) for start in starts))


def _drawn(text: str) -> str:
    """What draws the lines of a page."""
    if not text:
        return ""
    shown = (f"({_escaped(line)}) Tj T*" for line in text.splitlines())
    return f"BT /F1 10 Tf {POINTS_A_LINE} TL 30 {TOP} Td {' '.join(shown)} ET"


def _escaped(line: str) -> str:
    plain = line.encode("latin-1", "replace").decode("latin-1")
    return plain.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")


def _file(objects: list[str]) -> bytes:
    made, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(made))
        made += f"{number} 0 obj\n{content}\nendobj\n".encode("latin-1")
    start, count = len(made), len(objects) + 1
    made += f"xref\n0 {count}\n0000000000 65535 f \n".encode()
    made += b"".join(f"{place:010} 00000 n \n".encode() for place in places)
    made += f"trailer\n<< /Size {count} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF".encode()
    return made
