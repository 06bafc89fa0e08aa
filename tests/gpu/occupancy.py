"""How many warps of a kernel one multiprocessor holds, from what a block takes."""

from __future__ import annotations

from dataclasses import dataclass

WARP_THREADS = 32
BLOCK_WARPS_UNIT = 4  # a multiprocessor has four parts, each with a quarter of the registers


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor of an architecture has.

    From the CUDA C++ Programming Guide's table "Technical Specifications per Compute Capability";
    the units of allocation are those of NVIDIA's occupancy calculator.
    """

    warps: int
    blocks: int
    shared_bytes: int  # the largest division between shared memory and the first cache
    registers: int = 65536
    registers_unit: int = 256  # of one warp
    shared_unit: int = 128
    shared_reserved: int = 1024  # of each block, by the system


ARCHITECTURES = {
    "sm_80": Multiprocessor(warps=64, blocks=32, shared_bytes=164 * 1024),
    "sm_87": Multiprocessor(warps=48, blocks=16, shared_bytes=164 * 1024),
    "sm_90": Multiprocessor(warps=64, blocks=32, shared_bytes=228 * 1024),
}


def rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def blocks_at_once(architecture: str, threads: int, registers: int, shared: int) -> int:
    """Blocks that one multiprocessor holds.

    Parameters
    ----------
    architecture : one of ARCHITECTURES.
    threads : of a block.
    registers : of a thread.
    shared : bytes of a block, static and dynamic.

    Raises
    ------
    ValueError : threads and registers are not above 0.
    """
    if threads < 1 or registers < 1:
        raise ValueError(
            f"occupancy: threads and registers must be above 0, got {threads} and {registers}"
        )
    has = ARCHITECTURES[architecture]
    warps = -(-threads // WARP_THREADS)
    of_a_warp = rounded_up(registers * WARP_THREADS, has.registers_unit)
    register_warps = has.registers // of_a_warp // BLOCK_WARPS_UNIT * BLOCK_WARPS_UNIT
    of_a_block = rounded_up(shared + has.shared_reserved, has.shared_unit)
    return min(
        has.blocks, has.warps // warps, register_warps // warps, has.shared_bytes // of_a_block
    )


def warps_at_once(architecture: str, threads: int, registers: int, shared: int) -> int:
    """Warps that one multiprocessor holds; parameters as of blocks_at_once."""
    warps = -(-threads // WARP_THREADS)
    return blocks_at_once(architecture, threads, registers, shared) * warps
