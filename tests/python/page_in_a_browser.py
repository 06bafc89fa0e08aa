"""Uses the server's page as a person would: ``BROWSER ADDRESS FILE [SCREENSHOT]``; prints JSON.

Needs playwright, which need not be where the tests run.
"""

from __future__ import annotations

import json
import sys

from playwright.sync_api import expect, sync_playwright

# Of how many lines each head of the table of documents is.
LINES = """[...document.querySelectorAll("thead th")].map((head) => {
  const range = document.createRange();
  range.selectNodeContents(head);
  return range.getClientRects().length;
})"""
SECONDS = 240_000  # thousandths of them, on a machine that others use


def main(
    browser: str, address: str, file: str, screenshot: str = "", question: str = "who?"
) -> None:
    errors: list[str] = []
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = opened.new_page(viewport={"width": 1100, "height": 700})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(f"{request.url} failed"))
        page.goto(f"{address}/")
        page.wait_for_selector("#key-form:visible, #model:not(:empty)", timeout=SECONDS)
        if page.is_visible("#key-form"):
            page.fill("#key", "the-key")
            page.click("#key-form button")
        page.wait_for_selector("#model:not(:empty)", timeout=SECONDS)
        page.set_input_files("#file", file)
        page.click("#ingest button")
        expect(page.locator("#bar-text")).to_contain_text(" s, ", timeout=SECONDS)
        page.fill("#question", question)
        page.fill("#most", "40")
        page.click("#send")
        expect(page.locator("#reused")).to_contain_text("from a cache", timeout=SECONDS)
        expect(page.locator("#kvswap_hits_total")).not_to_have_text("0", timeout=SECONDS)
        if screenshot:
            page.screenshot(path=screenshot, full_page=True)
        said = {
            "bar": page.text_content("#bar-text"),
            "documents": page.locator("#documents tr").count(),
            "first": page.text_content("#documents td"),
            "chosen": page.locator("#document option:checked").text_content(),
            "head_lines": page.evaluate(LINES),
            "answer": page.text_content("#answer"),
            "reused": page.text_content("#reused"),
            "hits": page.text_content("#kvswap_hits_total"),
            "errors": errors,
        }
        opened.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
