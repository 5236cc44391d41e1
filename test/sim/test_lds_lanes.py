"""DS instructions that move data between lanes, against loops that follow the pseudo-code."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad.runtime.autogen.amd.cdna.enum import DSOp
from tinygrad.runtime.autogen.amd.cdna.ins import DS
from tinygrad.runtime.autogen.amd.cdna.str_pcode import PCODE

import machine
from gfx942sim.lds_lanes import swizzle_source
from memory_bench import SELECTIONS, offsets, random_words, vgprs

OLD = 0xA5C3_0F1E


@SELECTIONS
@pytest.mark.parametrize("op", ["DS_BPERMUTE_B32", "DS_PERMUTE_B32"])
@pytest.mark.parametrize("accumulator", [0, 1])
def test_permutes(op, accumulator, exec, order):
    address, data = random_words(22, 4, 64), random_words(23, 4, 64)
    base = 256 * accumulator
    batch = machine.run(
        [DS(DSOp[op], vdst=vgprs(8), addr=vgprs(2), data0=vgprs(3), acc=accumulator, offset0=20, offset1=1)],
        vgpr={2: address, base + 3: data, base + 8: OLD},
        exec=exec,
        order=order,
        groups=2,
    )
    for wave in range(4):
        sent = [0] * 64
        lane_of = [((int(a) + 276) % 2**32) // 4 % 64 for a in address[wave]]
        for lane in range(64):
            if op == "DS_PERMUTE_B32" and exec >> lane & 1:
                sent[lane_of[lane]] = data[wave, lane]
            if op == "DS_BPERMUTE_B32" and exec >> lane_of[lane] & 1:
                sent[lane] = data[wave, lane_of[lane]]
        expected = [sent[lane] if exec >> lane & 1 else OLD for lane in range(64)]
        assert batch.vgpr[base + 8, wave].tolist() == expected


def swizzle_by_the_guide(offset: int) -> list[int]:
    """The source lane of every lane, for the modes with a formula in the ISA guide."""
    lanes = []
    for i in range(64):
        if offset >= 0xC000:
            step, mask = offset >> 5 & 31, offset & 31
            step = -step if offset & 0x400 else step
            lanes.append((i & 0x20) + ((i & mask) | ((i + step) & ~mask & 31)))
        elif offset & 0x8000:
            lanes.append(i // 4 * 4 + [offset & 3, offset >> 2 & 3, offset >> 4 & 3, offset >> 6 & 3][i % 4])
        else:
            lanes.append((((i % 32 & offset & 31) | (offset >> 5 & 31)) ^ (offset >> 10 & 31)) + i // 32 * 32)
    return lanes


@SELECTIONS
@pytest.mark.parametrize("offset", [0x041F, 0x401F, 0x0018, 0x03E0, 0x801B, 0x80B1, 0xC0A0, 0xC4A3, 0xC7E0])
def test_swizzle(offset, exec, order):
    data = random_words(24, 4, 64)
    batch = machine.run(
        [DS(DSOp.DS_SWIZZLE_B32, vdst=vgprs(8), addr=vgprs(2), **offsets(offset))],
        vgpr={2: data, 8: OLD},
        exec=exec,
        order=order,
        groups=2,
    )
    source = swizzle_by_the_guide(offset)
    for lane in range(64):
        value = data[:, source[lane]] if exec >> source[lane] & 1 else np.zeros(4)
        np.testing.assert_array_equal(batch.vgpr[8, :, lane], value if exec >> lane & 1 else np.full(4, OLD))


def test_swizzle_for_fourier_transforms_is_the_table_of_the_pseudo_code():
    text = PCODE[DSOp.DS_SWIZZLE_B32]
    checked = 0
    for line in text.splitlines():
        if "{" in line:
            mask, numbers = line.split(":")
            table = [int(n, 16) - 1 for n in numbers.strip(" {}").split(",")]
            assert swizzle_source(0xE000 | int(mask, 16)).tolist() == table + [n + 32 for n in table]
            checked += 1
    assert checked == 2
    assert swizzle_source(0xE01F).tolist() == list(range(64))
