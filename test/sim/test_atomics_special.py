"""Atomics out of the ordinary: rounding, NaN, exchanges of two elements, and counters of lanes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinygrad.runtime.autogen.amd.cdna.enum import DSOp, GLOBALOp
from tinygrad.runtime.autogen.amd.cdna.ins import DS, GLOBAL

import machine
from memory_bench import (
    ALL_LANES,
    NO_SADDR,
    SELECTIONS,
    aligned_buffer,
    lanes_of,
    random_bytes,
    random_words,
    vgprs,
)

OLD = 0xA5C3_0F1E
LDS_BYTES = 4096


@pytest.mark.parametrize("bits", [32, 64])
def test_float_sums_round_in_lane_order(bits):
    """1 + 64 times half a unit in the last place stays 1; the small ones first would give more."""
    dtype = np.float32 if bits == 32 else np.float64
    one, half = dtype(1), dtype(np.finfo(dtype).eps / 2)
    memory = aligned_buffer(np.array([one]))
    integer = np.dtype(dtype).str.replace("f", "u")
    raw = int(np.array(half).view(integer))
    address = memory.ctypes.data
    machine.run(
        [GLOBAL(GLOBALOp[f"GLOBAL_ATOMIC_ADD_F{bits}"], addr=vgprs(2), data=vgprs(8, bits // 32), saddr=NO_SADDR)],
        vgpr={2: address & 0xFFFFFFFF, 3: address >> 32, 8: raw & 0xFFFFFFFF, 9: raw >> 32},
        buffers=[memory],
    )
    assert memory.view(dtype)[0] == one


def test_bf16_pairs_keep_nan_and_infinity():
    values = np.array([0x7F80_FF80, 0x7FC0_0000, 0x7F7F_0001], np.uint32)  # inf, nan, largest; -inf, 0, denormal
    memory = aligned_buffer(values)
    address = memory.ctypes.data + 4 * np.minimum(np.arange(64), 2)
    machine.run(
        [GLOBAL(GLOBALOp.GLOBAL_ATOMIC_PK_ADD_BF16, addr=vgprs(2), data=vgprs(8), saddr=NO_SADDR)],
        vgpr={2: address & 0xFFFFFFFF, 3: address >> 32, 8: 0x7F7F_7F80},
        exec=7,
        waves=1,
        buffers=[memory],
    )
    halves = torch.from_numpy(memory.view(np.int16).copy()).view(torch.bfloat16).float()
    assert halves[1] == float("inf") and halves[0].isnan()
    assert halves[3].isnan() and halves[2] == float("inf")
    assert halves[5] == float("inf") and halves[4] == float("inf")


def test_float_minimum_and_nan():
    """A NaN as data is not smaller; a NaN in memory stays."""
    nan, one = 0x7FC0_0000, 0x3F80_0000
    case_memory = np.array([one, nan], np.uint32)
    batch = machine.run(
        [DS(DSOp.DS_MIN_F32, addr=vgprs(2), data0=vgprs(8))],
        vgpr={2: np.arange(64) * 4, 8: np.where(np.arange(64) == 0, nan, one)},
        exec=3,
        waves=1,
        lds=case_memory.view(np.uint8),
    )
    assert batch.lds[0, :8].view(np.uint32).tolist() == [one, nan]


@SELECTIONS
@pytest.mark.parametrize("stride64", ["", "ST64"])
@pytest.mark.parametrize("bits", [32, 64])
def test_exchange_of_two(bits, stride64, exec, order):
    size, words = bits // 8, bits // 32
    unit = size * (64 if stride64 else 1)
    content, data = random_bytes(25, 8192), random_words(26, 2 * words, 4, 64)
    address = np.tile(np.arange(64) // 2 * size, (4, 1))
    batch = machine.run(
        [
            DS(
                DSOp[f"DS_WRXCHG2{stride64}_RTN_B{bits}"],
                vdst=vgprs(16, 2 * words),
                addr=vgprs(2),
                data0=vgprs(8, words),
                data1=vgprs(12, words),
                offset0=1,
                offset1=2,
            )
        ],
        vgpr={
            2: address,
            **{8 + i: data[i] for i in range(words)},
            **{12 + i: data[words + i] for i in range(words)},
            **{16 + i: OLD for i in range(2 * words)},
        },
        exec=exec,
        order=order,
        groups=2,
        lds_bytes=8192,
        lds=content,
    )
    memory = np.stack([content, content])
    for wave in range(4):
        for lane in lanes_of(exec):
            spans = [
                slice(int(address[wave, lane]) + k * unit, int(address[wave, lane]) + k * unit + size) for k in (1, 2)
            ]
            old = np.concatenate([memory[wave // 2, span] for span in spans]).view(np.uint32)
            for i, span in enumerate(spans):
                memory[wave // 2, span] = np.ascontiguousarray(data[i * words :][:words, wave, lane]).view(np.uint8)
            np.testing.assert_array_equal(batch.vgpr[16 : 16 + 2 * words, wave, lane], old)
    np.testing.assert_array_equal(batch.lds, memory)
    if exec != ALL_LANES:
        assert (batch.vgpr[16, :, 0] == OLD).all()


@SELECTIONS
@pytest.mark.parametrize(("op", "sign"), [("DS_APPEND", 1), ("DS_CONSUME", -1)])
def test_append_and_consume(op, sign, exec, order):
    content = np.full(LDS_BYTES // 4, 1000, np.uint32)
    batch = machine.run(
        [DS(DSOp[op], vdst=vgprs(8), offset0=4)],
        vgpr={8: OLD},
        exec=exec,
        order=order,
        m0=64,
        groups=2,
        lds=content.view(np.uint8),
    )
    count = len(lanes_of(exec))
    for wave in range(4):
        expected = [1000 + sign * count * (wave % 2) if exec >> lane & 1 else OLD for lane in range(64)]
        assert batch.vgpr[8, wave].tolist() == expected
    assert batch.lds.view(np.uint32)[:, 17].tolist() == [1000 + 2 * sign * count] * 2
