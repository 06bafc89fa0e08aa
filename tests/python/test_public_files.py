"""What a public host reads: workflows, templates, the changelog, a release's checks."""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvswap_torch
from tests.python.test_docs import LINK
from tests.python.test_prose import BANNED
from tools.release import ReleaseError, problems, release, sections

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
PAGES = [
    ROOT / name
    for name in ("CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
] + [GITHUB / "PULL_REQUEST_TEMPLATE.md"]  # fmt: skip
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
SCRIPTS = sorted(path for path in (ROOT / ".ci").iterdir() if path.is_file())
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
SIGNS = {"attest": {"id-token", "attestations"}, "publish": {"id-token"}}
TODAY = datetime.date(2026, 12, 1)


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def check_shell(script: str) -> None:
    """By bash's own parser, and by shellcheck where it is installed."""
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    if shellcheck := shutil.which("shellcheck"):
        words = [shellcheck, "--shell=bash", "-"]
        done = subprocess.run(words, input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_shell(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
    assert path.stat().st_mode & 0o111
    check_shell(text)


def test_a_script_that_is_none_is_found() -> None:
    with pytest.raises(AssertionError):
        check_shell("if true; then")


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def filled(text: str, matrix: dict[str, Any]) -> str:
    """With a matrix's values; no other expression may reach a shell."""
    filled_in = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found: str(matrix[found[1]]), text)
    assert "${{" not in filled_in, "a value from outside would be run"
    return filled_in


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_make_and_may_only_read(path: Path) -> None:
    workflow = parsed(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text()
    for name, job in workflow["jobs"].items():
        # Only who signs what was built, or hands it on, may do more, and runs nothing of the tree.
        if "permissions" in job:
            assert {key for key, may in job["permissions"].items() if may == "write"} <= SIGNS[name]
            assert not any("checkout" in step.get("uses", "") for step in job["steps"])
        assert job["timeout-minutes"]
        rows = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@(release/)?v\d+", step["uses"])
                continue
            for script in {filled(step["run"], row) for row in rows}:
                check_shell(script)
                for targets in re.findall(r"^make (.+)$", script, re.MULTILINE):
                    named = re.sub(r"[A-Z]+=(\"[^\"]*\"|\S*)", "", targets).split()
                    assert named and set(named) <= TARGETS, targets


def test_the_jobs_are_lint_build_test_wheels_and_docs() -> None:
    rows = parsed(GITHUB / "workflows" / "ci.yml")["jobs"]["make"]["strategy"]["matrix"]["include"]
    targets = {row["job"]: row["targets"].split() for row in rows}
    assert targets == {
        "lint": ["lint"],
        "build": ["build"],
        "test": ["test"],
        "wheels": ["wheel-check", "wheel"],
        "docs": ["docs"],
    }


def test_a_tag_gets_wheels_sources_provenance_and_bills_of_materials() -> None:
    jobs = parsed(GITHUB / "workflows" / "wheels.yml")["jobs"]
    assert {row["architecture"] for row in jobs["build"]["strategy"]["matrix"]["include"]} == {
        "x86_64",
        "aarch64",
    }
    used = {name: [step.get("uses", "").split("@")[0] for step in job["steps"]]
            for name, job in jobs.items()}  # fmt: skip
    assert "actions/attest-build-provenance" in used["attest"]
    script = "\n".join(step.get("run", "") for step in jobs["attest"]["steps"])
    assert "sboms/kvswap_torch.cdx.json" in script and "sha256sum" in script
    assert set(jobs["attest"]["needs"]) == {"build", "cuda", "sources"}
    cuda = [step.get("run") for step in jobs["cuda"]["steps"]]
    assert "make wheels ARGS=--cuda" in cuda
    assert jobs["publish"]["needs"] == "attest" and "refs/tags/v" in jobs["publish"]["if"]
    # An index refuses a local version, and with it all that is sent.
    assert any("dist/*+cu*.whl" in step.get("run", "") for step in jobs["publish"]["steps"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_ask_for_what_is_needed(path: Path) -> None:
    form = parsed(path)
    assert form["name"] and form["description"] and form["labels"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids)) >= 3
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_templates_are_where_a_host_looks_for_them() -> None:
    assert parsed(GITHUB / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": True}
    assert [path.stem for path in FORMS] == ["bug", "feature"]
    assert len(WORKFLOWS) >= 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_link_to_what_is_there_and_speak_plainly(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        assert (page.parent / link.partition("#")[0]).exists(), link
    assert [turn for turn in BANNED if re.search(turn, text, re.IGNORECASE)] == []
    assert not re.search(r"https?://|\S+@\S+\.\w", text), "no address is made up"


def test_the_readme_leads_to_them() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("CHANGELOG.md", "SECURITY.md"):
        assert f"]({name})" in readme


def test_the_citation_is_of_this_project_and_names_no_version() -> None:
    """Which stands in one place; a host takes it from the tag."""
    citation = parsed(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["authors"] and citation["message"] and "kvswap_torch" in citation["title"]
    assert not {"version", "date-released", "doi"} & set(citation)


def test_the_version_is_written_in_one_place_alone() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.toml", "*.cff", "*.cmake", "*.txt", "*.yml"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split()  # fmt: skip
    pattern = re.compile(r"""^\s*(__version__|version)\s*[=:]\s*["']?\d+\.\d+\.\d+""", re.MULTILINE)
    found = [name for name in listed if pattern.search((ROOT / name).read_text("utf-8"))]
    assert found == ["kvswap_torch/version.py"] or listed == []


def test_the_changelog_has_each_version_once_and_the_newest_first() -> None:
    names = list(sections((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")))
    assert names[0] == "Unreleased"
    dated = [re.fullmatch(r"(\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)", name) for name in names[1:]]
    assert all(dated)
    versions = [tuple(map(int, found[1].split("."))) for found in dated]
    assert versions == sorted(set(versions), reverse=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Version 0.2.0, ready to be released after 0.1.0."""
    (tmp_path / "kvswap_torch").mkdir()
    (tmp_path / "kvswap_torch" / "version.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-12-01)\n\n### Added\n\n- A thing.\n\n"
        "## 0.1.0 (2026-11-01)\n\n- The first.\n"
    )
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v0.1.0"]):
        git(tmp_path, *words)
    return tmp_path


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_a_release_runs_the_checks_and_sets_the_tag(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "a")
    ran: list[Any] = []
    assert release(repository, "0.2.0", TODAY, ran.append) == "v0.2.0"
    made = ["test", "test-long", "docs-run", "wheel"]
    assert [" ".join(command) for command in ran] == [f"make {target}" for target in made]
    assert {command[1] for command in ran} <= TARGETS
    told = git(repository, "for-each-ref", "--format=%(objecttype) %(contents)", "refs/tags/v0.2.0")
    assert told.startswith("tag 0.2.0") and "### Added\n\n- A thing." in told
    with pytest.raises(ReleaseError, match=r"must be newer than v0\.2\.0"):
        release(repository, "0.2.0", TODAY, ran.append)


@pytest.mark.parametrize(
    ("change", "version", "told"),
    [
        (
            lambda r: (r / "new.py").touch(),
            "0.2.0",
            r"tree: must have no changes, has '\?\? new.py'",
        ),
        (None, "0.3.0", "version.py: must say 0.3.0, got 0.2.0"),
        (lambda r: git(r, "tag", "v0.10.0"), "0.2.0", r"must be newer than v0\.10\.0"),
        (
            lambda r: edit(r, "(2026-12-01)", "(2026-11-30)"),
            "0.2.0",
            "must begin with the sections",
        ),
        (lambda r: edit(r, "### Added\n\n- A thing.\n", ""), "0.2.0", "must say what is new"),
        (lambda r: edit(r, "Unreleased\n", "Unreleased\n\n- More.\n"), "0.2.0", "must be empty"),
        (lambda r: (r / "CHANGELOG.md").unlink(), "0.2.0", "must begin with .*, got nothing"),
        (None, "0.2", "VERSION must be MAJOR.MINOR.PATCH, got '0.2'"),
        (None, "v0.2.0", "VERSION must be MAJOR.MINOR.PATCH"),
    ],
)
def test_what_is_in_the_way_of_a_release_is_named(repository, change, version, told) -> None:
    if change is not None:
        change(repository)
    with pytest.raises(ReleaseError, match=told):
        release(repository, version, TODAY, lambda command: pytest.fail("nothing is run"))
    assert f"v{version}" not in git(repository, "tag").split()


def edit(repository: Path, old: str, new: str) -> None:
    path = repository / "CHANGELOG.md"
    path.write_text(path.read_text().replace(old, new))
    git(repository, "commit", "-qam", "x")


def test_a_failed_check_or_a_changed_tree_sets_no_tag(repository: Path) -> None:
    def fails(command: Any) -> None:
        raise ReleaseError("make test must pass")

    with pytest.raises(ReleaseError, match="must pass"):
        release(repository, "0.2.0", TODAY, fails)
    with pytest.raises(ReleaseError, match="must stay as it was"):
        release(repository, "0.2.0", TODAY, lambda _: (repository / "left").touch())
    assert git(repository, "tag").split() == ["v0.1.0"]


def test_the_command_wants_a_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.release"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "make release VERSION=" in done.stderr


def test_this_version_is_one_that_can_be_released() -> None:
    told = problems(ROOT, kvswap_torch.__version__, TODAY)
    assert not any("version.py" in line for line in told)
