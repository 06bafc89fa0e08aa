"""`make cuda-report`: what it reads in the tools' words, computes, and compares."""

import json
from pathlib import Path

import pytest

from tests.gpu import occupancy, report, sass

NAME = "_ZN6kvswap4cuda12_GLOBAL__N_112gather_pagesI5uint4EEvNS0_9GatherJobIT_EE"
PTXAS = f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{NAME}' for 'sm_90'
ptxas info    : Function properties for {NAME}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8336 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 36.0 ms
"""
PTX = f"""
.target sm_90
.entry {NAME}(
.param .align 8 .b8 {NAME}_param_0[48]
)
.maxntid 256, 1, 1
.minnctapersm 2
{{
"""


def sass_of(*instructions: str) -> str:
    """As cuobjdump lists them, each with the two lines of its encoding."""
    lines = ["\tcode for sm_90", f"\t\tFunction : {NAME}", '\t.headerflags\t@"EF_CUDA_SM90"']
    for at, each in enumerate(instructions):
        lines += [f"        /*{16 * at:04x}*/          {each} ;      /* 0x0000000604047981 */",
                  "                                   /* 0x000ea2000c1e1d00 */"]  # fmt: skip
    return "\n".join(lines)


def most(*instructions: str) -> tuple[int, int]:
    found = sass.loads_of(sass_of(*instructions))[NAME]
    return found.loads, found.bytes


# Registers, shared bytes and threads of kernels, and the blocks that NVIDIA's calculator gives.
@pytest.mark.parametrize(
    ("architecture", "threads", "registers", "shared", "blocks"),
    [
        ("sm_90", 128, 120, 10240, 4), ("sm_90", 128, 191, 16500, 2),
        ("sm_90", 256, 48, 8448, 5), ("sm_90", 256, 103, 34048, 2),
        ("sm_90", 256, 171, 16900, 1), ("sm_90", 1024, 55, 8336, 1),
        ("sm_90", 256, 32, 0, 8), ("sm_90", 32, 16, 0, 32),  # warps and blocks bind
        ("sm_90", 32, 16, 100 * 1024, 2), ("sm_80", 32, 16, 100 * 1024, 1),  # shared memory does
        ("sm_80", 1024, 32, 0, 2), ("sm_87", 1024, 32, 0, 1), ("sm_87", 32, 16, 0, 16),
        ("sm_90", 1024, 65, 0, 0),  # does not fit at all
    ],
)  # fmt: skip
def test_blocks_at_once(architecture, threads, registers, shared, blocks) -> None:
    assert occupancy.blocks_at_once(architecture, threads, registers, shared) == blocks
    warps = occupancy.warps_at_once(architecture, threads, registers, shared)
    assert warps == blocks * -(-threads // 32)


def test_a_block_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="threads and registers must be above 0, got 0 and 8"):
        occupancy.blocks_at_once("sm_90", 0, 8, 0)


def test_loads_before_the_first_use_are_under_way() -> None:
    loads = [f"LDG.E.128 R{r}, desc[UR4][R2.64+0x{r:x}]" for r in (8, 12, 16, 20)]
    stores = [f"STG.E.128 desc[UR4][R30.64], R{r}" for r in (8, 12, 16, 20)]
    assert most(*loads, *stores) == (4, 64)
    alternately = [each for pair in zip(loads, stores, strict=True) for each in pair]
    assert most(*alternately) == (1, 16)


def test_a_load_ends_with_the_use_of_any_of_its_registers() -> None:
    load, other = "@!P0 LDG.E.64 R8, desc[UR4][R2.64]", "LDG.E.U16 R12, desc[UR4][R4.64]"
    assert most(load, "FADD R1, R9, R1", other) == (1, 8)
    assert most(load, "FADD R1, R10, R1", other) == (2, 10)
    assert most(load, "LDG.E R12, desc[UR4][R8.64]") == (1, 8)  # its address
    assert most(load, "MOV R8, RZ", other) == (1, 8)  # overwritten
    # Memory answers in order: who waits for the second has the first.
    assert most(load, other, "IMAD R1, R12, R1, RZ", "LDG.E.U8 R14, desc[UR4][R4.64]") == (2, 10)


def test_loads_in_branches_of_their_own_are_not_under_way_together() -> None:
    load, other = "LDG.E R8, desc[UR4][R2.64]", "LD.E R9, desc[UR4][R2.64]"
    assert most(load, "BRA 0x100", other) == (1, 4)
    assert most(load, "EXIT", other) == (1, 4)
    assert most(load, "@P1 BRA 0x100", other) == (2, 8)  # where it falls through
    assert most(load, "@P0 EXIT", other) == (2, 8)
    assert most(load, "BRA.DIV UR8, 0x100", other) == (2, 8)


def test_loads_to_one_register_under_two_predicates_are_one() -> None:
    wide, narrow = "@P0 LDG.E.128 R8, desc[UR4][R2.64]", "@!P0 LDG.E.64 R8, desc[UR4][R4.64]"
    assert most(wide, narrow, "LDG.E R12, desc[UR4][R2.64]") == (2, 16)


def test_shared_memory_is_no_load_of_global_memory() -> None:
    assert most("LDS.128 R8, [R2]", "LDC R4, c[0x0][0x28]", "LDL R5, [R1]") == (0, 0)


def test_what_the_tools_say_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "paged_gather.o.ptxas").write_text(PTXAS)
    listings = {"-ptx": PTX, "-sass": sass_of("LDG.E.128 R8, desc[UR4][R2.64]", "EXIT")}
    monkeypatch.setattr(sass, "listing", lambda folder, path, kind, *rest: listings[kind])
    name = report.readable([NAME])[NAME]
    found = report.collect(tmp_path, tmp_path)["sm_90"][name]
    assert found == report.Kernel(40, 8336, 0), "without the object ptxas's words alone"
    (tmp_path / "paged_gather.o").touch()
    found = report.collect(tmp_path, tmp_path)["sm_90"][name]
    assert found == report.Kernel(40, 8336, 0, threads=256, warps=48, loads=1, bytes=16)


def test_a_kernel_that_grew_worse_is_named() -> None:
    now = report.Kernel(40, 0, 0, threads=256, warps=48, loads=4, bytes=64)
    before = {"warps": 48, "bytes": 64}

    def told(kernel: report.Kernel, recorded: dict[str, int]) -> list[str]:
        return report.complaints({"sm_90": {"gather": kernel}}, {"sm_90": {"gather": recorded}})

    assert told(now, before) == []
    assert told(now, before | {"warps": 40, "bytes": 32}) == []  # better
    (line,) = told(now, before | {"bytes": 128})
    assert line == "gather on sm_90 has 64 bytes under way, and had 128"
    (line,) = told(now, before | {"warps": 56})
    assert line == "gather on sm_90 has 48 warps at once, and had 56"
    assert told(report.Kernel(40, 0, 0), before) == []  # no tool was there to ask
    (line,) = told(report.Kernel(40, 0, 8, 256, 48, 4, 64), before)
    assert line == "gather on sm_90 spills 8 bytes"
    (line,) = report.complaints({"sm_90": {"gather": now}}, {"sm_90": {}})
    assert "gather on sm_90 is not recorded" in line
    (line,) = report.complaints({"sm_90": {}}, {"sm_90": {"gather": before}})
    assert "gather on sm_90 is recorded and not there" in line


def test_the_exit_status_is_that_of_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for architecture in report.ARCHITECTURES:
        words = PTXAS.replace("sm_90", architecture)
        (tmp_path / f"{architecture}.o.ptxas").write_text(words)
        (tmp_path / f"{architecture}.o").touch()
    listings = {"-ptx": PTX, "-sass": sass_of("LDG.E.128 R8, desc[UR4][R2.64]", "EXIT")}
    monkeypatch.setattr(sass, "listing", lambda folder, path, kind, *rest: listings[kind])
    monkeypatch.setattr(sass, "tool_folder", lambda: tmp_path)
    monkeypatch.setattr(report, "compiler", lambda: "13.0.88")
    monkeypatch.setattr(report, "RECORDED", tmp_path / "kernels.json")
    build = ["--build", str(tmp_path)]
    assert report.main([*build, "--record"]) == 0 == report.main(build)
    listings["-sass"] = sass_of("LDG.E R8, desc[UR4][R2.64]", "EXIT")
    assert report.main(build) == 1
    assert "on sm_90 has 4 bytes under way, and had 16" in capsys.readouterr().out
    monkeypatch.setattr(report, "compiler", lambda: "13.2.1")
    assert report.main(build) == 0
    assert "recorded with nvcc 13.0.88, this is 13.2.1" in capsys.readouterr().out


def test_the_recorded_table_follows_from_its_own_columns() -> None:
    recorded = json.loads(report.RECORDED.read_text(encoding="utf-8"))
    assert recorded.pop("nvcc")
    assert sorted(recorded) == sorted(report.ARCHITECTURES)
    for architecture, kernels in recorded.items():
        assert len(kernels) > 100
        for name, row in kernels.items():
            taken = row["threads"], row["registers"], row["shared"]
            assert row["warps"] == occupancy.warps_at_once(architecture, *taken) > 0, name
            assert row["spilled"] == 0 < row["loads"] <= row["bytes"], name
