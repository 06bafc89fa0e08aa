"""A wheel's bill of materials names what is inside, what it needs, and the wheel itself."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

from tools import sbom

METADATA = """\
Metadata-Version: 2.4
Name: kvswap_torch
Version: 0.1.0
License-Expression: Apache-2.0 AND Python-2.0
Requires-Dist: torch>=2.11
Requires-Dist: transformers<5.40,>=5.17
Requires-Dist: prometheus-client>=0.22; extra == "serve"
Requires-Dist: uvicorn[standard]; extra == "serve"
"""


def test_a_bill_names_all_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "kvswap_torch-0.1.0-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kvswap_torch-0.1.0.dist-info/METADATA", METADATA)
        info = {"torch": "2.13", "liburing": 1, "highway": 1, "xxhash": 1, "json": 0}
        archive.writestr("kvswap_torch/lib/build_info.json", json.dumps(info))
    sbom.main([str(wheel)])
    bill = json.loads(wheel.with_suffix(".cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    itself = bill["metadata"]["component"]
    assert itself["purl"] == "pkg:pypi/kvswap-torch@0.1.0"
    assert itself["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    found = {each["name"]: each for each in bill["components"]}
    assert set(found) == {
        *("liburing", "highway", "xxhash"),
        *("torch", "transformers", "prometheus-client", "uvicorn"),
    }
    assert found["torch"]["scope"] == "required" and found["uvicorn"]["scope"] == "optional"
    assert found["transformers"]["properties"][0]["value"] == "<5.40,>=5.17"
    refs = [each["bom-ref"] for each in bill["components"]]
    assert bill["dependencies"] == [{"ref": itself["bom-ref"], "dependsOn": refs}]
    assert len(set(refs)) == len(refs)


def test_every_library_of_the_build_is_known() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "cmake" / "KvswapTorch.cmake").read_text()
    written = text.split("build_info.json @ONLY CONTENT [[{")[1].split("}")[0]
    names = {line.split('"')[1] for line in written.splitlines() if '"' in line}
    assert names - {"torch", "cuda", "build_type"} == set(sbom.INSIDE)
