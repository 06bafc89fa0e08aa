"""Libraries for a machine with a GPU, made on one without: ``make gpu-prebuilt``.

    python -m tests.gpu.prebuilt --python python3.12 --torch 2.11.0 --architectures 90

Downloads that torch's wheel with CUDA (530 MB, once, into build/gpu-torch), takes its headers and
link libraries, builds against them with this machine's nvcc, and leaves in .gpu what travels: lib/,
the Python module, and dep/ with the headers and the archive that a build over there would lack.
``python3 -m tests.gpu.check --prebuilt .gpu`` takes them. The wheel, nvcc and the other machine's
driver must be of one CUDA version, `--python` of its Python's, with headers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOWNLOADS = ROOT / "build" / "gpu-torch"
BUILD = ROOT / "build" / "gpu-prebuilt"
LINKED = ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libtorch_python.so",
          "libc10.so", "libc10_cuda.so")  # fmt: skip
# What CMake needs to know of torch, and all that this machine could import of it.
STAND_IN = '__version__ = "{version}"\n\n\nclass version:\n    cuda = "{cuda}"\n'
HEADERS = ("liburing.h", "liburing", "hwy", "nlohmann")


def download(version: str, python_version: str) -> Path:
    """The wheel's file: from an earlier call, or by pip."""
    pattern = f"torch-{version}-cp{python_version.replace('.', '')}-*.whl"
    if not list(DOWNLOADS.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation", "cp", "--dest", str(DOWNLOADS)]
        command += ["--python-version", python_version, "--platform", "manylinux_2_28_x86_64"]
        subprocess.run([*command, f"torch=={version}"], check=True)
    wheels = list(DOWNLOADS.glob(pattern))
    if not wheels:
        raise SystemExit(f"gpu-prebuilt: pip must bring {pattern} into {DOWNLOADS} and did not")
    return wheels[0]


def unpack(wheel: Path) -> Path:
    """Headers, link libraries and a stand-in for the package; the folder to import it from."""
    site = DOWNLOADS / wheel.stem
    if (site / "torch" / "__init__.py").is_file():
        return site
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            is_linked = name.startswith("torch/lib/") and name.rsplit("/", 1)[-1] in LINKED
            if name.startswith("torch/include/") or is_linked or name == "torch/version.py":
                packed.extract(name, site)
    facts: dict[str, str] = {}
    exec((site / "torch" / "version.py").read_text(encoding="utf-8"), facts)
    if not facts["cuda"]:
        raise SystemExit(f"gpu-prebuilt: {wheel.name} must be built with CUDA, and is for the CPU")
    told = STAND_IN.format(version=facts["__version__"], cuda=facts["cuda"])
    (site / "torch" / "__init__.py").write_text(told, encoding="utf-8")
    return site


def build(site: Path, python: str, architectures: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(site)}
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-GNinja", "-DKVSWAP_BUILD_TESTS=OFF"]
    configure += [f"-DPython_EXECUTABLE={python}", f"-DKVSWAP_CUDA_ARCHITECTURES={architectures}"]
    subprocess.run(configure, check=True, env=environment, stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", str(BUILD), "libraries"], check=True, env=environment)


def pack(target: Path) -> None:
    """The stripped libraries and, for a build over there, what a bare machine lacks."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "lib").mkdir(parents=True)
    built = BUILD / "kvswap_torch"
    shutil.copy2(built / "lib" / "build_info.json", target / "lib")
    for library, folder in ((built / "lib" / "libkvswap_torch.so", target / "lib"),
                            *((module, target) for module in built.glob("_C.*.so"))):  # fmt: skip
        subprocess.run(["strip", "-o", str(folder / library.name), str(library)], check=True)
    (target / "dep" / "include").mkdir(parents=True)
    (target / "dep" / "lib").mkdir()
    for name in HEADERS:
        source = Path("/usr/include") / name
        if source.is_dir():
            shutil.copytree(source, target / "dep" / "include" / name)
        elif source.is_file():
            shutil.copy2(source, target / "dep" / "include")
    for archive in Path("/usr/lib").glob("*/liburing.a"):
        shutil.copy2(archive, target / "dep" / "lib")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="python3.12", help="of the other machine's version")
    parser.add_argument("--torch", default="2.11.0", help="the other machine's torch")
    parser.add_argument("--architectures", default="90", help="sm_XX, with semicolons between")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu")
    args = parser.parse_args()
    python = shutil.which(args.python)
    if python is None:
        parser.error(f"--python: must be on PATH or a path, with its headers; got {args.python}")
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True)
    build(unpack(download(args.torch, version.stdout.strip())), python, args.architectures)
    pack(args.out)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"gpu-prebuilt: {args.out}, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
