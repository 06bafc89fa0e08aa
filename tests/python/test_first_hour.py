"""New users on a bare Debian: what is carried into it, how it is typed there, and what is shown."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.first_hour import debian, results
from tests.first_hour.__main__ import ALL
from tests.first_hour.carried import SEEN, carried
from tests.first_hour.clone import PAGE, readme_commands
from tests.first_hour.limits import LIMITS, Limit
from tests.first_hour.machine import Host
from tests.first_hour.typist import PAGES, Began, Step, Typist
from tests.packaging.run_docs import blocks, commands

# At least these have been recorded: user by machine. `make first-hour` may add the others.
RECORDED = {
    "Debian 12": {"laptop", "researcher", "cpp", "operator", "few-bits"},
    "Debian 13": {"laptop", "cpp", "operator"},
}


def hour(**other: Any) -> dict[str, Any]:
    return {
        "user": "laptop", "machine": "Debian 12", "limit_seconds": 120, "answer_seconds": 59.6,
        "answer_processor_seconds": 61.2, "within": True, "load_before": 0.4, "load_after": 1.25,
        "cores": 2, "python": "3.11.2", "torch": "2.13.0+cpu", "date": "2026-11-28",
    } | other  # fmt: skip


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    page = tmp_path / "versions.md"
    page.write_text("before\n<!-- first-hour -->\nold\n<!-- /first-hour -->\nafter\n")
    monkeypatch.setattr(results, "PAGE", page)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    return tmp_path


def test_the_page_shows_the_results_that_are_there() -> None:
    page = results.PAGE.read_text(encoding="utf-8")
    assert results.with_table(page) == page


def test_recorded_hours_say_what_their_steps_add_up_to() -> None:
    found = results.results()
    names = {f"Debian {number}" for number, _ in debian.RELEASES.values()}
    assert {each["machine"] for each in found} == names == RECORDED.keys()
    for machine, users in RECORDED.items():
        assert users <= {each["user"] for each in found if each["machine"] == machine}
    for each in found:
        limit = LIMITS[each["user"]]
        steps = [Step(s["typed"], s["seconds"], s["processor_seconds"]) for s in each["steps"]]
        answer = limit.reached(steps)
        assert answer.seconds == pytest.approx(each["answer_seconds"], abs=0.1 * len(steps))
        assert each["limit_seconds"] == limit.seconds and not each["wrong"]
        assert each["within"] == (each["answer_seconds"] <= limit.seconds)
        assert not any(word in json.dumps(each) for word in (str(Path.home()), "/tmp/", "http"))


def test_every_user_s_answer_is_a_command_of_its_page() -> None:
    """With what stands for something of theirs replaced or not: the patterns have none of it."""
    assert list(LIMITS) == list(ALL)
    for user, limit in LIMITS.items():
        typed = readme_commands() if user == "clone" else [
            command for block in blocks(PAGES / f"{user}.md") for command in commands(block)
        ]  # fmt: skip
        steps = [Step(command, 1.0) for command in typed]
        assert 0 < limit.reached(steps).seconds <= len(steps), user
        assert limit.seconds <= 900


def test_a_limit_counts_to_its_answer_and_no_further() -> None:
    steps = [
        Step("pip", 2, 1),
        Step("ask --dry-run", 3, 2),
        Step("ask it", 5, 4),
        Step("end", 9, 9),
    ]
    assert Limit(10, "ask(?!.*--dry-run)").reached(steps) == Step("ask it", 10, 7)
    with pytest.raises(ValueError, match="show"):
        Limit(10, "show").reached(steps)


def test_pages_name_the_packages_of_a_bare_debian_first() -> None:
    for page in [PAGES / f"{user}.md" for user in ALL if user != "clone"] + [PAGES / f"{PAGE}.md"]:
        first = next(block for block in blocks(page) if block.language == "text")
        update, install, *_ = commands(first)
        assert update == "apt-get update", page
        wanted = ("git", "make") if page.stem == "quick-start" else ("python3-venv",)
        typed = install.removeprefix("apt-get install ").split()
        assert set(wanted) <= set(typed), page
        text = page.read_text(encoding="utf-8")
        assert ("curl" in typed) == ("\ncurl " in text), page


def test_the_host_s_packages_stay_and_a_reader_s_folder_is_the_command_s(tmp_path: Path) -> None:
    reader = Typist("cpp", tmp_path, {})
    assert next(reader.unread()) == "python3 -m venv env"
    (tmp_path / "below").mkdir()
    reader.type("cd below")
    assert reader.type("pwd").strip() == str(tmp_path / "below")
    assert [step.typed for step in reader.steps] == ["cd below", "pwd"]
    assert "PYTHONPATH" not in Host().environment() and "PATH" in Host().environment()


def test_processor_time_is_that_of_programs_that_have_ended() -> None:
    began = Began()
    subprocess.run(["python3", "-c", "for _ in range(3_000_000): pass"], check=True)
    assert 0 < began.processor_seconds() < 60 and began.seconds() > 0


def test_what_pip_is_configured_with_is_carried_and_seen_elsewhere(tmp_path: Path) -> None:
    index, wheels = tmp_path / "index" / "simple", tmp_path / "wheels"
    index.mkdir(parents=True)
    wheels.mkdir()
    certificates = tmp_path / "all.crt"
    certificates.touch()
    found = carried(
        [
            f":env:.find-links='{wheels}'", "global.find-links='/elsewhere'",
            f"global.extra-index-url='file://{index} file:///not/there'",
            f"install.constraint='{wheels}/none.txt'", "global.index-url='https://index/simple'",
            "global.cache-dir='/home/cache'", ":env:.default-timeout='180'",
        ],
        ['Acquire::http::Proxy "http://proxy:1/";', 'Acquire::Languages "none";'],
        {"SSL_CERT_FILE": str(certificates), "https_proxy": "http://proxy:2", "SECRET": "s",
         "CURL_CA_BUNDLE": "/not/there"},
    )  # fmt: skip
    below = f"{SEEN}{tmp_path}"
    assert found.files["etc/pip.conf"].splitlines() == [
        "[global]", f"find-links = {below}/wheels",
        f"extra-index-url = file://{below}/index/simple file:///not/there",
        "index-url = https://index/simple", "default-timeout = 180",
        "[install]", f"constraint = {wheels}/none.txt",
    ]  # fmt: skip
    assert found.files["etc/apt/apt.conf.d/90carried"].split("\n") == [
        'Acquire::http::Proxy "http://proxy:1/";', "",
    ]  # fmt: skip
    assert found.environment == {
        "SSL_CERT_FILE": f"{below}/all.crt", "https_proxy": "http://proxy:2",
        "CURL_CA_BUNDLE": "/not/there",
    }  # fmt: skip
    # An index's pages refer to what is beside it.
    assert found.seen == {
        path: Path(f"{SEEN}{path}") for path in (index.parent, wheels, certificates)
    }


def test_no_debian_without_root_or_a_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(debian.NotToBeHadError, match="needs root"):
            debian.check_possible()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 0)
        patched.setattr(debian.shutil, "which", lambda name: None if name == "chroot" else name)
        with pytest.raises(debian.NotToBeHadError, match="chroot must be on PATH"):
            debian.check_possible()
    none = subprocess.CompletedProcess([], 0, "http://one/ubuntu\n")
    monkeypatch.setattr(debian.subprocess, "run", lambda *_, **__: none)
    with pytest.raises(debian.NotToBeHadError, match="names none"):
        debian.mirrors()


def test_sources_are_those_that_apt_here_is_configured_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = "http://a/debian\nhttp://b/other\nhttp://a/debian\nhttp://a/debian-security\n"
    done = subprocess.CompletedProcess([], 0, told)
    monkeypatch.setattr(debian.subprocess, "run", lambda *_, **__: done)
    assert debian.sources("trixie").splitlines() == [
        "deb http://a/debian trixie main", "deb http://a/debian trixie-updates main",
        "deb http://a/debian-security trixie-security main",
    ]  # fmt: skip


def test_a_wheel_is_for_the_python_of_that_debian(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(debian, "ROOT", tmp_path)
    monkeypatch.setattr(debian.platform, "machine", lambda: "x86_64")
    (tmp_path / "dist").mkdir()
    end = "manylinux_2_28_x86_64.whl"
    wheel = tmp_path / "dist" / f"kvswap_torch-0.1.0-cp313-cp313-{end}"
    for path in (wheel, tmp_path / "dist" / "kvswap_torch-0.1.0-cp313-cp313-other.whl"):
        path.touch()
    assert debian.own_wheel("trixie") == wheel
    for release, version in (("bookworm", "3.11"), ("testing", "3.14")):
        with pytest.raises(debian.NotToBeHadError, match=f"--python {version}"):
            debian.own_wheel(release)


def test_results_are_rows_with_time_limit_and_load(folder: Path) -> None:
    results.record(hour(machine="Debian 13", user="cpp", limit_seconds=600))
    results.record(hour(answer_seconds=299.7, within=False))
    results.record(hour(user="clone", limit_seconds=600))
    rows = results.PAGE.read_text().splitlines()
    assert rows[:2] == ["before", "<!-- first-hour -->"] and rows[-1] == "after"
    told = "1 min 01 s | 0.4 to 1.2, 2 | 3.11.2 | 2.13.0+cpu | 2026-11-28 |"
    assert rows[4:-2] == [
        f"| Debian 12 | clone | 10 min 00 s | 1 min 00 s | {told}",
        f"| Debian 12 | laptop | 2 min 00 s | **5 min 00 s** | {told}",
        f"| Debian 13 | cpp | 10 min 00 s | 1 min 00 s | {told}",
    ]
    with pytest.raises(SystemExit, match="once"):
        results.with_table("no marks")
    there = Path("/there")
    assert results.without_paths("a /there/b /there/c/d", there, there / "c") == "a b d"
