"""Puts libraries into a wheel, with the licences and the list of what else is in them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = ("lib", "include", "share")


@dataclass(frozen=True)
class Part:
    """A library of others that is linked or compiled into ours."""

    name: str
    package: str  # Debian's; where its version and licence are read
    licence: str
    within: str


# As their licences say; of those who give a choice, the one that is taken.
PARTS = (
    Part("liburing", "liburing-dev", "MIT", "linked into libkvswap_torch.so, and beside it"),
    Part("highway", "libhwy-dev", "Apache-2.0", "headers, compiled in"),
    Part("nlohmann-json", "nlohmann-json3-dev", "MIT", "headers, compiled in"),
    Part("libstdc++", "libstdc++-12-dev", "GPL-3.0-or-later WITH GCC-exception-3.1",
         "what is newer than a promised machine's, linked in"),
)  # fmt: skip


def tag(version: str, architecture: str) -> str:
    python = f"cp{version.replace('.', '')}"
    return f"{python}-{python}-manylinux_2_28_{architecture}"


def pack(
    base: Path,
    installed: Path,
    version: str,
    architecture: str,
    torch: str,
    root: Path,
    out: Path,
    label: str = "",
) -> Path:
    """A wheel of `base`'s Python files and `installed`'s libraries; its path in `out`.

    It asks for the torch that the libraries were built for, or a newer one. `label` (``cu130``)
    makes it a local version, as torch's own builds with CUDA are. Such a wheel asks for that minor
    release of torch alone: 2.14 has another c10_cuda_check_implementation.
    """
    with tempfile.TemporaryDirectory() as name:
        with zipfile.ZipFile(base) as packed:
            packed.extractall(name)
        package = Path(name) / "kvswap_torch"
        for old in package.glob("_C*.so"):
            old.unlink()
        for folder in LIBRARIES:
            shutil.rmtree(package / folder, ignore_errors=True)
        shutil.copytree(installed, package, dirs_exist_ok=True)
        (info,) = Path(name).glob("*.dist-info")
        if label:
            info = _local_version(info, label)
        _retag(info / "WHEEL", tag(version, architecture))
        minor = torch.rpartition(".")[0]
        _ask_for(info / "METADATA", f"=={minor}.*" if label else f">={torch}")
        _add_licences(info, root)
        _add_bill(info, root)
        out.mkdir(parents=True, exist_ok=True)
        pattern = f"kvswap_torch-*-{tag(version, architecture)}.whl"
        for old in out.glob(pattern):
            old.unlink()
        command = [sys.executable, "-m", "wheel", "pack", "--dest-dir", str(out), name]
        subprocess.run(command, check=True, capture_output=True)
        (made,) = out.glob(pattern)
    return made


def _local_version(info: Path, label: str) -> Path:
    """Writes the label into the metadata; the folder under its new name."""
    text = (info / "METADATA").read_text(encoding="utf-8")
    text, count = re.subn(r"^(Version: [^+\n]+)$", rf"\1+{label}", text, flags=re.MULTILINE)
    if count != 1:
        raise SystemExit("wheels: the metadata must name the version once, and does not")
    (info / "METADATA").write_text(text, encoding="utf-8")
    return info.rename(info.with_name(f"{info.name.removesuffix('.dist-info')}+{label}.dist-info"))


def _retag(file: Path, to: str) -> None:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("Tag:")]
    file.write_text("\n".join([*filter(None, lines), f"Tag: {to}", ""]))


def _ask_for(file: Path, versions: str) -> None:
    text = file.read_text(encoding="utf-8")
    text, count = re.subn(
        r"^Requires-Dist: torch>=[\d.]+$",
        f"Requires-Dist: torch{versions}",
        text,
        flags=re.MULTILINE,
    )
    if count != 1:
        raise SystemExit("wheels: the metadata must ask for torch>=... once, and does not")
    file.write_text(text, encoding="utf-8")


def _add_licences(info: Path, root: Path) -> None:
    """The texts that others' licences ask to go with their code."""
    folder = info / "licenses" / "third_party"
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        text = Path("/usr/share/doc") / part.package / "copyright"
        if not text.is_file():
            raise SystemExit(f"wheels: {text} must be there to go into the wheel, and is not")
        shutil.copyfile(text, folder / f"{part.name}.txt")
    header = (root / "third_party" / "xxhash" / "xxhash.h").read_text(encoding="utf-8")
    (folder / "xxhash.txt").write_text(header[: header.index("*/") + 2] + "\n", encoding="utf-8")


def _add_bill(info: Path, root: Path) -> None:
    """A CycloneDX bill of materials, where wheels have theirs."""
    (info / "sboms").mkdir(exist_ok=True)
    text = json.dumps(bill(root), indent=2) + "\n"
    (info / "sboms" / "kvswap_torch.cdx.json").write_text(text, encoding="utf-8")


def bill(root: Path) -> dict[str, object]:
    """What is in the libraries besides ours."""
    header = (root / "third_party" / "xxhash" / "xxhash.h").read_text(encoding="utf-8")
    numbers = re.findall(r"define XXH_VERSION_(?:MAJOR|MINOR|RELEASE) +(\d+)", header)
    components = [_component("xxhash", ".".join(numbers), "BSD-2-Clause", "compiled in")]
    for part in PARTS:
        asked = ["dpkg-query", "-W", "-f=${Version}", part.package]
        version = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
        components.append(_component(part.name, version, part.licence, part.within))
    ours = (root / "kvswap_torch" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "(.*)"', ours)
    assert found is not None
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library", "bom-ref": "kvswap_torch", "name": "kvswap_torch",
                "version": found[1], "purl": f"pkg:pypi/kvswap-torch@{found[1]}",
            },
        },
        "components": components,
    }  # fmt: skip


def _component(name: str, version: str, licence: str, within: str) -> dict[str, object]:
    key = "expression" if " " in licence else "license"
    value: object = licence if " " in licence else {"id": licence}
    return {
        "type": "library", "bom-ref": name, "name": name, "version": version,
        "licenses": [{key: value}], "description": within,
    }  # fmt: skip
