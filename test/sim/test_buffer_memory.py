"""MUBUF loads and stores against loops over bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.renderer.amd.dsl import src
from tinygrad.runtime.autogen.amd.cdna.enum import MUBUFOp
from tinygrad.runtime.autogen.amd.cdna.ins import MUBUF

import machine
from gfx942sim.errors import OutOfRange, UnknownInstruction
from memory_bench import (
    ALL_LANES,
    LOADS,
    SELECTIONS,
    SOME_LANES,
    STORES,
    Notes,
    aligned_buffer,
    expected_load,
    expected_store,
    lanes_of,
    random_bytes,
    random_words,
    sgprs,
    vgprs,
)

OLD = 0xA5C3_0F1E
SIZE = 8192
FLAGS = 0x0002_7000  # as the HIP headers of gfx9 set word 3


def descriptor(memory: np.ndarray, records: int | None = None, stride: int = 0, flags: int = FLAGS) -> dict[int, int]:
    """SGPRs 8 to 11."""
    start = memory.ctypes.data
    return {
        8: start & 0xFFFFFFFF,
        9: start >> 32 | stride << 16,
        10: memory.nbytes if records is None else records,
        11: flags,
    }


def access(name: str, registers: int = 1, **fields) -> MUBUF:
    """vdata is v[8..], vaddr v[2] (and v[3]), the descriptor s[8:11], soffset s12 unless given."""
    both = fields.get("offen") and fields.get("idxen")
    return MUBUF(
        MUBUFOp[f"BUFFER_{name}"],
        **{
            "vdata": vgprs(8, registers),
            "vaddr": vgprs(2, 2 if both else 1),
            "srsrc": sgprs(8, 4),
            "soffset": sgprs(12),
            **fields,
        },
    )


def registers_of(table: dict, name: str) -> int:
    return max(1, table[name][0] // 4)


def load(name, voffset, offset=0, soffset=(0, 0), *, exec=ALL_LANES, order="lockstep", observers=(), records=None):
    """A raw load with a VGPR offset; memory past `records` reads as 0, dword by dword."""
    count, size = registers_of(LOADS, name), LOADS[name][0]
    memory = aligned_buffer(random_bytes(1, SIZE))
    batch = machine.run(
        [access(f"LOAD_{name}", count, offen=1, offset=offset)],
        vgpr={2: voffset, **{8 + i: OLD for i in range(count)}},
        sgpr={**descriptor(memory, records), 12: soffset},
        exec=exec,
        order=order,
        buffers=[memory],
        observers=observers,
    )
    end = SIZE if records is None else records
    at = np.asarray(voffset) + offset + np.asarray(soffset)[:, None]
    readable, piece = np.zeros(SIZE + 16, np.uint8), min(size, 4)
    readable[:end] = memory[:end]
    where = np.where(at + piece <= end, at, SIZE)
    expected = expected_load(name, readable, where, exec, OLD)
    for i in range(1, count):  # a dword that the end cuts through is not read at all
        cut = at + 4 * i + 4 > end
        cut[:, [lane for lane in range(64) if not exec >> lane & 1]] = False
        expected[i][cut] = 0
    np.testing.assert_array_equal(batch.vgpr[8 : 8 + count], expected)
    return memory


def store(name, voffset, offset=0, soffset=(0, 0), *, exec=ALL_LANES, order="lockstep", observers=(), records=None):
    count, size = registers_of(STORES, name), STORES[name][0]
    content, data = random_bytes(2, SIZE), random_words(3, count, 2, 64)
    memory = aligned_buffer(content)
    machine.run(
        [access(f"STORE_{name}", count, offen=1, offset=offset)],
        vgpr={2: voffset, **{8 + i: data[i] for i in range(count)}},
        sgpr={**descriptor(memory, records), 12: soffset},
        exec=exec,
        order=order,
        buffers=[memory],
        observers=observers,
    )
    end = SIZE if records is None else records
    at = np.asarray(voffset) + offset + np.asarray(soffset)[:, None]
    expected, piece = content.copy(), min(size, 4)
    for wave in range(2):
        for lane in lanes_of(exec):
            raw = np.ascontiguousarray(data[:, wave, lane]).tobytes()[STORES[name][1] :][:size]
            for i in range(0, size, piece):
                start = int(at[wave, lane]) + i
                if start + piece <= end:
                    expected[start : start + piece] = np.frombuffer(raw[i : i + piece], np.uint8)
    np.testing.assert_array_equal(memory, expected)
    return memory


def anywhere(seed: int, unit: int, top: int = SIZE - 512) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, top // unit, (2, 64)) * unit


def apart(seed: int, unit: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(128).reshape(2, 64) * unit


@SELECTIONS
@pytest.mark.parametrize("name", LOADS)
def test_load(name, exec, order):
    unit = min(LOADS[name][0], 4) if LOADS[name][0] == 12 else LOADS[name][0]
    load(name, anywhere(4, unit), 48, (64, 256), exec=exec, order=order)


@SELECTIONS
@pytest.mark.parametrize("name", STORES)
def test_store(name, exec, order):
    store(name, apart(5, 16), 48, (64, 4096), exec=exec, order=order)


@pytest.mark.parametrize("exec", [ALL_LANES, SOME_LANES])
@pytest.mark.parametrize("name", ["DWORD", "DWORDX2", "DWORDX3", "DWORDX4"])
def test_less_alignment(name, exec):
    for unit in (1, 4, 8):
        load(name, anywhere(6, unit), 1 if unit == 1 else 4, exec=exec)
        store(name, apart(7, 16 + unit), 1 if unit == 1 else 4, exec=exec)


@SELECTIONS
@pytest.mark.parametrize("name", LOADS)
def test_loads_outside_of_the_records_give_zero(name, exec, order):
    """The end cuts through lanes: each dword counts by itself."""
    load(name, anywhere(8, 4), 12, (0, 64), exec=exec, order=order, records=4100)


@SELECTIONS
@pytest.mark.parametrize("name", STORES)
def test_stores_outside_of_the_records_are_dropped(name, exec, order):
    store(name, apart(9, 20), 4, (0, 1000), exec=exec, order=order, records=2002)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(LOADS)),
    exec=st.integers(0, ALL_LANES),
    seed=st.integers(0, 1000),
    offset=st.integers(0, 4095),
    records=st.integers(0, SIZE),
    unit=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_random_loads(name, exec, seed, offset, records, unit):
    load(name, anywhere(seed, unit, SIZE - 4096 - 64), offset, (0, 48), exec=exec, records=records)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(STORES)),
    exec=st.integers(0, ALL_LANES),
    seed=st.integers(0, 1000),
    offset=st.integers(0, 4095),
    records=st.integers(0, SIZE),
    unit=st.sampled_from([16, 17, 18, 20, 24]),
)
def test_random_stores(name, exec, seed, offset, records, unit):
    store(name, apart(seed, unit), offset, (48, 48), exec=exec, records=records)


def test_without_vgpr_and_with_constants():
    memory = aligned_buffer(random_bytes(10, 256))
    words = memory.view(np.uint32)
    for soffset, value in ((src[128 + 12], 12), (sgprs(12), 20), (src[124], 8)):  # constant, SGPR, M0
        batch = machine.run(
            [access("LOAD_DWORD", soffset=soffset, offset=4)],
            vgpr={2: 0xFFFFFFFF},
            sgpr={**descriptor(memory), 12: 20},
            m0=8,
            buffers=[memory],
        )
        assert (batch.vgpr[8] == words[(value + 4) // 4]).all()


@pytest.mark.parametrize("vgpr_offset", [0x8000_0000, 0xFFFF_FFFF, 0xFFFF_FFFC])
def test_a_huge_offset_is_outside_and_does_not_wrap(vgpr_offset):
    memory = aligned_buffer(random_bytes(11, 256))
    content = memory.copy()
    batch = machine.run(
        [access("LOAD_DWORD", offen=1, offset=16), access("STORE_DWORD", offen=1, offset=16)],
        vgpr={2: vgpr_offset},
        sgpr={**descriptor(memory), 12: 0},
        buffers=[memory],
    )
    assert (batch.vgpr[8] == 0).all()
    np.testing.assert_array_equal(memory, content)


def test_base_is_48_bits():
    memory = aligned_buffer(random_bytes(12, 64))
    batch = machine.run(
        [access("LOAD_DWORDX2", 2)], sgpr={**descriptor(memory, stride=0x3FFF), 12: 8}, buffers=[memory]
    )
    np.testing.assert_array_equal(batch.vgpr[8:10, 0, 0], memory[8:16].view(np.uint32))


@SELECTIONS
@pytest.mark.parametrize("offen", [0, 1])
def test_structured(offen, exec, order):
    """index * stride + offset; an index of at least the number of records is outside."""
    memory = aligned_buffer(random_bytes(13, 4096))
    index, inside = anywhere(14, 1, 60), anywhere(15, 4, 32)
    batch = machine.run(
        [access("LOAD_DWORDX2", 2, idxen=1, offen=offen, offset=8)],
        vgpr={2: index, 3: inside, 8: OLD, 9: OLD},
        sgpr={**descriptor(memory, records=50, stride=64), 12: 4},
        exec=exec,
        order=order,
        buffers=[memory],
    )
    for wave in range(2):
        for lane in range(64):
            at = int(index[wave, lane]) * 64 + 8 + 4 + (int(inside[wave, lane]) if offen else 0)
            value = memory[at : at + 8].view(np.uint32).tolist() if index[wave, lane] < 50 else [0, 0]
            active = exec >> lane & 1
            assert batch.vgpr[8:10, wave, lane].tolist() == (value if active else [OLD, OLD])


def test_index_without_a_stride_adds_nothing():
    memory = aligned_buffer(random_bytes(16, 64))
    batch = machine.run(
        [access("LOAD_DWORD", idxen=1)], vgpr={2: 1000}, sgpr={**descriptor(memory), 12: 4}, buffers=[memory]
    )
    assert (batch.vgpr[8] == memory[4:8].view(np.uint32)[0]).all()


@pytest.mark.parametrize(("word", "bit"), [(9, 31), (11, 23), (11, 30)])
def test_unusual_descriptors_are_refused(word, bit):
    memory = aligned_buffer(random_bytes(17, 64))
    sgpr = {**descriptor(memory), 12: 0}
    sgpr[word] |= 1 << bit
    with pytest.raises(UnknownInstruction, match="descriptor"):
        machine.run([access("LOAD_DWORD")], sgpr=sgpr, buffers=[memory])
    machine.run([access("LOAD_DWORD")], sgpr=sgpr, buffers=[memory], exec=0)


def test_one_row_past_the_end_of_the_tensor_behind_a_huge_descriptor():
    tensor = torch.arange(256, dtype=torch.float32).reshape(4, 64)
    offset = np.tile(np.arange(64) * 4, (2, 1))
    offset[1, 7] += 4 * 256
    run = {
        "vgpr": {2: offset, 8: OLD},
        "sgpr": {**descriptor(tensor.numpy(), records=0xFFFFFFFF), 12: 0},
        "buffers": [tensor],
    }
    with pytest.raises(OutOfRange) as caught:
        machine.run([access("LOAD_DWORD", offen=1)], **run)
    assert f"4-byte read at {tensor.data_ptr() + 4 * 256 + 28:#x} by lane 7" in str(caught.value)
    assert "28 bytes past the end of buffer 0 float32[4, 64]" in str(caught.value)
    with pytest.raises(OutOfRange, match="4-byte write"):
        machine.run([access("STORE_DWORD", offen=1)], **run)
    batch = machine.run([access("LOAD_DWORD", offen=1)], exec=ALL_LANES & ~(1 << 7), **run)
    assert batch.vgpr[8, 1, 6:9].tolist() == [np.float32(6).view(np.uint32), OLD, np.float32(8).view(np.uint32)]


@pytest.mark.parametrize("accumulator", [0, 1])
def test_accumulator_registers(accumulator):
    memory = aligned_buffer(random_bytes(18, 4096))
    content = memory.copy().view(np.uint32)
    at = apart(19, 16)
    base = 256 * accumulator
    batch = machine.run(
        [
            access("LOAD_DWORDX4", 4, offen=1, acc=accumulator),
            access("STORE_DWORDX2", 2, offen=1, acc=accumulator, offset=8),
        ],
        vgpr={2: at},
        sgpr={**descriptor(memory), 12: 0},
        buffers=[memory],
    )
    np.testing.assert_array_equal(batch.vgpr[base + 8 : base + 12], content[at // 4 + np.arange(4)[:, None, None]])
    np.testing.assert_array_equal(memory.view(np.uint32)[at // 4 + 3], content[at // 4 + 1])


def test_load_over_its_own_offset():
    memory = aligned_buffer(random_bytes(20, 2048))
    at = apart(21, 16)
    batch = machine.run(
        [access("LOAD_DWORDX2", 2, offen=1, vdata=vgprs(2, 2))],
        vgpr={2: at},
        sgpr={**descriptor(memory), 12: 0},
        buffers=[memory],
    )
    np.testing.assert_array_equal(batch.vgpr[2:4], memory.view(np.uint32)[at // 4 + np.arange(2)[:, None, None]])


@SELECTIONS
@pytest.mark.parametrize("name", ["UBYTE", "SBYTE", "USHORT", "SSHORT", "DWORD"])
def test_load_to_lds(name, exec, order):
    """Outside of the records a 0 is written."""
    content, notes = random_bytes(22, 4096), Notes()
    memory = aligned_buffer(random_bytes(23, SIZE))
    at = anywhere(24, 4)
    batch = machine.run(
        [access(f"LOAD_{name}", offen=1, offset=32, lds=1)],
        vgpr={2: at, 8: OLD},
        sgpr={**descriptor(memory, records=SIZE // 2), 12: 100},
        m0=np.array([512, 1024]),
        exec=exec,
        order=order,
        lds=content,
        buffers=[memory],
        observers=[notes],
    )
    source = at + 132
    readable = np.concatenate([memory[: SIZE // 2], np.zeros(SIZE, np.uint8)])
    words = expected_load(name, readable, source, exec, 0)[0]
    expected = content.copy()
    for wave in range(2):
        for lane in lanes_of(exec):
            start = (512, 1024)[wave] + 32 + 4 * lane
            expected[start : start + 4] = words[wave, lane : lane + 1].view(np.uint8)
    np.testing.assert_array_equal(batch.lds[0], expected)
    assert (batch.vgpr[8] == OLD).all()
    assert {(note[0], *note[3:]) for note in notes.seen} == {
        ("vmem", LOADS[name][0], "read"),
        ("lds", 4, "write"),
    }


def test_observers_see_the_lanes_inside_of_the_records():
    notes, at = Notes(), apart(25, 16)
    memory = load("DWORDX2", at, 16, exec=SOME_LANES, observers=[notes], records=1000)
    what, address, active, size, kind = notes.seen[0]
    assert (what, size, kind, len(notes.seen)) == ("vmem", 8, "read", 1)
    lanes = np.array([bool(SOME_LANES >> i & 1) for i in range(64)])
    np.testing.assert_array_equal(active, lanes & (at + 16 + 4 <= 1000))
    np.testing.assert_array_equal(address[active], (memory.ctypes.data + at + 16)[active])
    notes = Notes()
    store("SHORT", at, 16, observers=[notes], records=0)
    assert notes.seen == []


def test_expected_store_and_the_loop_here_agree():
    """Two independent loops: a store without an end is what the shared helper expects, too."""
    at = apart(26, 16)
    memory = store("DWORDX4", at)
    expected = expected_store("DWORDX4", random_bytes(2, SIZE), at, ALL_LANES, random_words(3, 4, 2, 64))
    np.testing.assert_array_equal(memory, expected)


@pytest.mark.parametrize("name", ["WBL2", "INV"])
def test_cache_operations_do_nothing(name):
    machine.run([MUBUF(MUBUFOp[f"BUFFER_{name}"])])


@pytest.mark.parametrize("name", ["LOAD_FORMAT_X", "STORE_FORMAT_XY", "LOAD_FORMAT_D16_HI_X"])
def test_formats_are_refused(name):
    with pytest.raises(UnknownInstruction, match="format"):
        machine.run([access(name, 2 if name.endswith("Y") else 1)])


def test_wide_loads_to_lds_are_refused():
    with pytest.raises(UnknownInstruction, match="LDS"):
        machine.run([access("LOAD_DWORDX4", 4, lds=1)])
