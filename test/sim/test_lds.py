"""DS instructions against loops over bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.runtime.autogen.amd.cdna.enum import DSOp
from tinygrad.runtime.autogen.amd.cdna.ins import DS

import machine
from gfx942sim.errors import OutOfRange, SimulationError, UnknownInstruction
from memory_bench import (
    ALL_LANES,
    SELECTIONS,
    SOME_LANES,
    Notes,
    lanes_of,
    loaded_register,
    offsets,
    random_bytes,
    random_words,
    vgprs,
)

LDS_BYTES = 4096
OLD = 0xA5C3_0F1E

# Name: bytes, signed, half.
READS = {
    "U8": (1, False, ""),
    "I8": (1, True, ""),
    "U16": (2, False, ""),
    "I16": (2, True, ""),
    "U8_D16": (1, False, "low"),
    "U8_D16_HI": (1, False, "high"),
    "I8_D16": (1, True, "low"),
    "I8_D16_HI": (1, True, "high"),
    "U16_D16": (2, False, "low"),
    "U16_D16_HI": (2, False, "high"),
    "B32": (4, False, ""),
    "B64": (8, False, ""),
    "B96": (12, False, ""),
    "B128": (16, False, ""),
}
# Name: bytes, first bit of the register.
WRITES = {
    "B8": (1, 0),
    "B16": (2, 0),
    "B8_D16_HI": (1, 16),
    "B16_D16_HI": (2, 16),
    "B32": (4, 0),
    "B64": (8, 0),
    "B96": (12, 0),
    "B128": (16, 0),
}


def expected_read(batch, content: np.ndarray, at, exec: int, size: int, signed: bool, half: str) -> np.ndarray:
    words = np.full((max(1, size // 4), batch.waves, 64), OLD, np.uint32)
    for wave in range(batch.waves):
        for lane in lanes_of(exec):
            raw = content[at[wave, lane] : at[wave, lane] + size].tobytes()
            if size < 4:
                words[0, wave, lane] = loaded_register(raw, OLD, signed, half)
            else:
                words[:, wave, lane] = np.frombuffer(raw, np.uint32)
    return words


def read(name: str, address, offset: int, *, exec=ALL_LANES, order="lockstep", accumulator=0, observers=()):
    size, signed, half = READS[name]
    count, base = max(1, size // 4), 256 * accumulator
    content = random_bytes(1, LDS_BYTES)
    batch = machine.run(
        [
            DS(
                DSOp[f"DS_READ_{name}"],
                vdst=vgprs(8, count),
                addr=vgprs(2),
                acc=accumulator,
                **offsets(offset),
            )
        ],
        vgpr={2: address, **{base + 8 + i: OLD for i in range(count)}},
        exec=exec,
        order=order,
        groups=2,
        lds=content,
        observers=observers,
    )
    at = (np.asarray(address).astype(np.uint32) + np.uint32(offset)).astype(np.int64)
    expected = expected_read(batch, content, at, exec, size, signed, half)
    np.testing.assert_array_equal(batch.vgpr[base + 8 : base + 8 + count], expected)
    return batch


def write(name: str, address, offset: int, *, exec=ALL_LANES, order="lockstep", accumulator=0, observers=()):
    size, first_bit = WRITES[name]
    count, base = max(1, size // 4), 256 * accumulator
    content = random_bytes(2, LDS_BYTES)
    data = random_words(3, count, 4, 64)
    batch = machine.run(
        [
            DS(
                DSOp[f"DS_WRITE_{name}"],
                addr=vgprs(2),
                data0=vgprs(8, count),
                acc=accumulator,
                **offsets(offset),
            )
        ],
        vgpr={2: address, **{base + 8 + i: data[i] for i in range(count)}},
        exec=exec,
        order=order,
        groups=2,
        lds=content,
        observers=observers,
    )
    expected = np.stack([content, content])
    for wave in range(4):
        for lane in lanes_of(exec):
            raw = np.ascontiguousarray(data[:, wave, lane]).tobytes()[first_bit // 8 :][:size]
            at = (int(np.asarray(address)[wave, lane]) + offset) & 0xFFFFFFFF
            expected[wave // 2, at : at + size] = np.frombuffer(raw, np.uint8)
    np.testing.assert_array_equal(batch.lds[:, :LDS_BYTES], expected)
    return batch


def addresses(seed: int, size: int, unit: int, top: int = LDS_BYTES - 64) -> np.ndarray:
    """Random [4, 64] byte addresses, multiples of `unit`."""
    return np.random.default_rng(seed).integers(0, (top - size) // unit, (4, 64)) * unit


def distinct_addresses(seed: int, unit: int) -> np.ndarray:
    """Each wave of a work-group has its own slots of `unit` bytes."""
    rng = np.random.default_rng(seed)
    slots = np.concatenate([rng.permutation(128).reshape(2, 64) for _ in range(2)])
    return slots * unit


@SELECTIONS
@pytest.mark.parametrize("name", READS)
def test_read(name, exec, order):
    size = READS[name][0]
    unit = 4 if size == 12 else size
    read(name, addresses(4, size, unit), 48, exec=exec, order=order)


@SELECTIONS
@pytest.mark.parametrize("name", WRITES)
def test_write(name, exec, order):
    write(name, distinct_addresses(5, 16), 32, exec=exec, order=order)


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("exec", [ALL_LANES, SOME_LANES])
def test_read_unaligned(name, exec):
    read(name, addresses(6, READS[name][0], 1), 3, exec=exec)


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("exec", [ALL_LANES, SOME_LANES])
def test_write_unaligned(name, exec):
    write(name, distinct_addresses(7, 17), 1, exec=exec)


@pytest.mark.parametrize("alignment", [4, 8])
@pytest.mark.parametrize("name", ["B64", "B96", "B128"])
def test_wide_access_with_narrow_alignment(name, alignment):
    read(name, addresses(8, 16, alignment), alignment)
    write(name, distinct_addresses(9, 20 if alignment == 4 else 24), alignment)


@pytest.mark.parametrize("name", ["B32", "B64", "B128"])
def test_accumulator_registers(name):
    read(name, addresses(10, 16, 16), 0, accumulator=1, exec=SOME_LANES)
    write(name, distinct_addresses(11, 16), 0, accumulator=1, exec=SOME_LANES)


def test_of_two_lanes_at_one_address_the_last_wins():
    batch = write("B32", np.tile(np.arange(64) // 8 * 4, (4, 1)), 0)
    assert batch.lds[0, :4].view(np.uint32)[0] == random_words(3, 1, 4, 64)[0, 1, 7]


def test_address_wraps_so_a_negative_base_works():
    read("B32", addresses(12, 4, 4) - 64, 64)


def test_destination_may_be_the_address():
    content = random_bytes(1, LDS_BYTES)
    address = addresses(13, 8, 8)
    notes = Notes()
    batch = machine.run(
        [DS(DSOp.DS_READ_B64, vdst=vgprs(2, 2), addr=vgprs(2))],
        vgpr={2: address, 3: 0},
        groups=2,
        lds=content,
        observers=[notes],
    )
    np.testing.assert_array_equal(batch.vgpr[2], content.view(np.uint32)[address // 4])
    np.testing.assert_array_equal(batch.vgpr[3], content.view(np.uint32)[address // 4 + 1])
    np.testing.assert_array_equal(notes.seen[0][1], address)


@SELECTIONS
@pytest.mark.parametrize("stride64", ["", "ST64"])
@pytest.mark.parametrize("bits", [32, 64])
def test_read2(bits, stride64, exec, order):
    size = bits // 8
    unit, words = size * (64 if stride64 else 1), size // 4
    content, notes = random_bytes(14, 16384), Notes()
    address = addresses(15, 8, 8)
    batch = machine.run(
        [
            DS(
                DSOp[f"DS_READ2{stride64}_B{bits}"],
                vdst=vgprs(8, 2 * words),
                addr=vgprs(2),
                offset0=3,
                offset1=9,
            )
        ],
        vgpr={2: address, **{8 + i: OLD for i in range(2 * words)}},
        exec=exec,
        order=order,
        groups=2,
        lds_bytes=16384,
        lds=content,
        observers=[notes],
    )
    for i, offset in enumerate((3 * unit, 9 * unit)):
        expected = expected_read(batch, content, address + offset, exec, size, False, "")
        np.testing.assert_array_equal(batch.vgpr[8 + i * words : 8 + (i + 1) * words], expected)
    assert [note[3:] for note in notes.seen] == [(size, "read")] * len(notes.seen)
    assert len(notes.seen) == (2 if order == "lockstep" else 4)


@SELECTIONS
@pytest.mark.parametrize("stride64", ["", "ST64"])
@pytest.mark.parametrize("bits", [32, 64])
def test_write2(bits, stride64, exec, order):
    size = bits // 8
    unit, words = size * (64 if stride64 else 1), size // 4
    content, data = random_bytes(16, 16384), random_words(17, 2 * words, 4, 64)
    address = distinct_addresses(18, 8)
    batch = machine.run(
        [
            DS(
                DSOp[f"DS_WRITE2{stride64}_B{bits}"],
                addr=vgprs(2),
                data0=vgprs(8, words),
                data1=vgprs(12, words),
                offset0=0,
                offset1=16,
            )
        ],
        vgpr={
            2: address,
            **{8 + i: data[i] for i in range(words)},
            **{12 + i: data[words + i] for i in range(words)},
        },
        exec=exec,
        order=order,
        groups=2,
        lds_bytes=16384,
        lds=content,
    )
    expected = np.stack([content, content])
    sequence = [[wave] for wave in range(4)] if order == "forward" else [range(4)]
    for waves in sequence:
        for i in range(2):
            for wave in waves:
                for lane in lanes_of(exec):
                    at = int(address[wave, lane]) + 16 * i * unit
                    raw = np.ascontiguousarray(data[i * words : (i + 1) * words, wave, lane]).view(np.uint8)
                    expected[wave // 2, at : at + size] = raw
    np.testing.assert_array_equal(batch.lds, expected)


@SELECTIONS
def test_addtid(exec, order):
    content = random_bytes(19, LDS_BYTES)
    value = random_words(20, 4, 64)
    batch = machine.run(
        [
            DS(DSOp.DS_READ_ADDTID_B32, vdst=vgprs(8), offset0=16, offset1=1),
            DS(DSOp.DS_WRITE_ADDTID_B32, data0=vgprs(9), offset0=0, offset1=8),
        ],
        vgpr={8: OLD, 9: value},
        exec=exec,
        order=order,
        m0=0x7FFF_0000 | 256,
        groups=2,
        lds=content,
    )
    for wave in range(4):
        for lane in range(64):
            at = 256 + 256 + 16 + 4 * lane
            active = exec >> lane & 1
            assert batch.vgpr[8, wave, lane] == (content[at : at + 4].view(np.uint32)[0] if active else OLD)
    words = batch.lds[0, 256 + 2048 :][:256].view(np.uint32)
    for lane in range(64):
        original = content[256 + 2048 + 4 * lane :][:4].view(np.uint32)[0]
        assert words[lane] == (value[1, lane] if exec >> lane & 1 else original)


@pytest.mark.parametrize("op", ["DS_READ_B64", "DS_WRITE_B64"])
def test_out_of_range_is_an_error(op):
    address = np.tile(np.arange(64) * 8, (2, 1))
    address[1, 5] = LDS_BYTES - 4
    fields = {"vdst": vgprs(8, 2)} if "READ" in op else {"data0": vgprs(8, 2)}
    with pytest.raises(OutOfRange, match=r"LDS byte 0xffc by lane 5 of wave 1, work-group \(0, 0, 0\).* 4096 bytes"):
        machine.run([DS(DSOp[op], addr=vgprs(2), **fields)], vgpr={2: address, 8: 0, 9: 0})
    machine.run([DS(DSOp[op], addr=vgprs(2), **fields)], vgpr={2: address, 8: 0, 9: 0}, exec=ALL_LANES & ~(1 << 5))


def test_the_last_bytes_are_in_range():
    machine.run([DS(DSOp.DS_READ_B128, vdst=vgprs(8, 4), addr=vgprs(2))], vgpr={2: 84}, lds_bytes=100)
    with pytest.raises(OutOfRange):
        machine.run([DS(DSOp.DS_READ_B128, vdst=vgprs(8, 4), addr=vgprs(2))], vgpr={2: 85}, lds_bytes=100)


def test_no_active_lane_does_nothing():
    notes = Notes()
    batch = machine.run(
        [
            DS(DSOp.DS_READ_B32, vdst=vgprs(8), addr=vgprs(2)),
            DS(DSOp.DS_WRITE_B32, addr=vgprs(2), data0=vgprs(8)),
            DS(DSOp.DS_READ2_B32, vdst=vgprs(8, 2), addr=vgprs(2), offset1=1),
            DS(DSOp.DS_WRITE2_B32, addr=vgprs(2), data0=vgprs(8), data1=vgprs(9)),
            DS(DSOp.DS_ADD_RTN_U32, vdst=vgprs(8), addr=vgprs(2), data0=vgprs(9)),
            DS(DSOp.DS_WRXCHG2_RTN_B32, vdst=vgprs(8, 2), addr=vgprs(2), data0=vgprs(8), data1=vgprs(9)),
            DS(DSOp.DS_APPEND, vdst=vgprs(8)),
        ],
        vgpr={2: 0xFFFFFFF0, 8: OLD, 9: 1},
        exec=0,
        observers=[notes],
    )
    assert (batch.vgpr[8] == OLD).all() and not notes.seen


def test_observer_sees_addresses_inside_of_the_work_group():
    notes = Notes()
    address = distinct_addresses(21, 16)
    write("B64", address, 8, exec=SOME_LANES, observers=[notes])
    (what, seen, active, size, kind), *others = notes.seen
    assert (what, size, kind, others) == ("lds", 8, "write", [])
    np.testing.assert_array_equal(seen, address + 8)
    np.testing.assert_array_equal(active, np.tile([bool(SOME_LANES >> i & 1) for i in range(64)], (4, 1)))


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(READS)),
    exec=st.integers(0, ALL_LANES),
    seed=st.integers(0, 1000),
    offset=st.integers(0, 65535),
    unit=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_random_reads(name, exec, seed, offset, unit):
    offset %= LDS_BYTES - 64
    read(name, addresses(seed, 16, unit, LDS_BYTES - offset), offset, exec=exec)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(WRITES)),
    exec=st.integers(0, ALL_LANES),
    seed=st.integers(0, 1000),
    offset=st.integers(0, 1500),
    unit=st.sampled_from([16, 17, 18, 20]),
)
def test_random_writes(name, exec, seed, offset, unit):
    write(name, distinct_addresses(seed, unit), offset, exec=exec)


@pytest.mark.parametrize("op", ["DS_GWS_SEMA_V", "DS_CONDXCHG32_RTN_B64", "DS_READ_B64_TR_B16"])
def test_refused(op):
    with pytest.raises(UnknownInstruction, match=op.lower()):
        machine.run([DS(DSOp[op])])


def test_gds_is_refused():
    with pytest.raises(UnknownInstruction, match="GDS"):
        machine.run([DS(DSOp.DS_READ_B32, vdst=vgprs(8), addr=vgprs(2), gds=1)])


def test_nop():
    machine.run([DS(DSOp.DS_NOP)])


def test_misaligned_atomics_are_refused():
    with pytest.raises(SimulationError, match="multiple of 8"):
        machine.run([DS(DSOp.DS_ADD_U64, addr=vgprs(2), data0=vgprs(8, 2))], vgpr={2: 4, 8: 0, 9: 0})
