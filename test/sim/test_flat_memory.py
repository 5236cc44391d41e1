"""FLAT and GLOBAL loads and stores against loops over bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.renderer.amd.dsl import src
from tinygrad.runtime.autogen.amd.cdna.enum import FLATOp, GLOBALOp
from tinygrad.runtime.autogen.amd.cdna.ins import FLAT, GLOBAL

import machine
from gfx942sim.buffers import BufferRegistry
from gfx942sim.errors import OutOfRange, UnknownInstruction
from memory_bench import (
    ALL_LANES,
    LOADS,
    NO_SADDR,
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
SIZE = 16384
FORMS = ("vgpr", "sgpr", "flat")


def addressed(form: str, name: str, address: np.ndarray, offset: int, registers: int, accumulator: int = 0):
    """(instruction, VGPRs, SGPRs) for an access at `address` + offset. In the "sgpr" form the base differs per wave."""
    load = name.startswith("LOAD")
    fields = {("vdst" if load else "data"): vgprs(8, registers), "acc": accumulator, "offset": offset & 0x1FFF}
    vgpr = {2: address & 0xFFFFFFFF, 3: address >> 32}
    sgpr = {}
    if form == "flat":
        return FLAT(FLATOp[f"FLAT_{name}"], addr=vgprs(2, 2), **fields), vgpr, sgpr
    if form == "vgpr":
        return GLOBAL(GLOBALOp[f"GLOBAL_{name}"], addr=vgprs(2), saddr=NO_SADDR, **fields), vgpr, sgpr
    base = address.min(axis=1)
    vgpr = {2: address - base[:, None]}
    sgpr = {4: base & 0xFFFFFFFF, 5: base >> 32}
    return GLOBAL(GLOBALOp[f"GLOBAL_{name}"], addr=vgprs(2), saddr=sgprs(4, 2), **fields), vgpr, sgpr


def load(name, at, offset, form="vgpr", *, exec=ALL_LANES, order="lockstep", accumulator=0, observers=()):
    """Load from byte `at` [2, 64] of a random buffer and compare."""
    count, base = max(1, LOADS[name][0] // 4), 8 + 256 * accumulator
    memory = aligned_buffer(random_bytes(1, SIZE))
    address = memory.ctypes.data + np.asarray(at) - offset
    instruction, vgpr, sgpr = addressed(form, f"LOAD_{name}", address, offset, count, accumulator)
    batch = machine.run(
        [instruction],
        vgpr={**vgpr, **{base + i: OLD for i in range(count)}},
        sgpr=sgpr,
        exec=exec,
        order=order,
        buffers=[memory],
        observers=observers,
    )
    np.testing.assert_array_equal(batch.vgpr[base : base + count], expected_load(name, memory, at, exec, OLD))
    return memory


def store(name, at, offset, form="vgpr", *, exec=ALL_LANES, order="lockstep", accumulator=0, observers=()):
    """Store random registers to byte `at` [2, 64] of a random buffer and compare."""
    count, base = max(1, STORES[name][0] // 4), 8 + 256 * accumulator
    content = random_bytes(2, SIZE)
    memory, data = aligned_buffer(content), random_words(3, count, 2, 64)
    address = memory.ctypes.data + np.asarray(at) - offset
    instruction, vgpr, sgpr = addressed(form, f"STORE_{name}", address, offset, count, accumulator)
    machine.run(
        [instruction],
        vgpr={**vgpr, **{base + i: data[i] for i in range(count)}},
        sgpr=sgpr,
        exec=exec,
        order=order,
        buffers=[memory],
        observers=observers,
    )
    np.testing.assert_array_equal(memory, expected_store(name, content, at, exec, data))
    return memory


def anywhere(seed: int, unit: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, (SIZE - 16) // unit, (2, 64)) * unit


def apart(seed: int, unit: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(128).reshape(2, 64) * unit


@SELECTIONS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOADS)
def test_load(name, form, exec, order):
    size = LOADS[name][0]
    load(name, anywhere(4, 4 if size == 12 else size), 0 if form == "flat" else -64, form, exec=exec, order=order)


@SELECTIONS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STORES)
def test_store(name, form, exec, order):
    store(name, apart(5, 16), 4095, form, exec=exec, order=order)


@pytest.mark.parametrize("exec", [ALL_LANES, SOME_LANES])
@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["USHORT", "SHORT_D16_HI", "DWORD", "DWORDX2", "DWORDX3", "DWORDX4"])
def test_load_with_less_alignment(name, unit, exec):
    load(name, anywhere(6, unit), 5, exec=exec)


@pytest.mark.parametrize("exec", [ALL_LANES, SOME_LANES])
@pytest.mark.parametrize("unit", [17, 18, 20, 24])
@pytest.mark.parametrize("name", ["SHORT", "SHORT_D16_HI", "DWORD", "DWORDX2", "DWORDX3", "DWORDX4"])
def test_store_with_less_alignment(name, unit, exec):
    store(name, apart(7, unit), -5, exec=exec)


@pytest.mark.parametrize("form", FORMS)
def test_accumulator_registers(form):
    load("DWORDX4", anywhere(8, 16), 0, form, accumulator=1, exec=SOME_LANES)
    store("DWORDX4", apart(9, 16), 0, form, accumulator=1, exec=SOME_LANES)


@pytest.mark.parametrize("offset", [-4096, -1, 4095])
def test_signed_offsets_of_global(offset):
    load("DWORD", anywhere(10, 4), offset)
    load("DWORD", anywhere(10, 4), offset, "sgpr")


def test_offset_of_flat_is_unsigned():
    load("DWORD", anywhere(11, 4), 4095, "flat")


def test_vgpr_offset_with_a_base_is_unsigned():
    memory = aligned_buffer(random_bytes(12, 64))
    base = memory.ctypes.data - 0xFFFF_FFF0
    batch = machine.run(
        [GLOBAL(GLOBALOp.GLOBAL_LOAD_DWORD, vdst=vgprs(8), addr=vgprs(2), saddr=sgprs(4, 2))],
        vgpr={2: 0xFFFF_FFF0},
        sgpr={4: base & 0xFFFFFFFF, 5: base >> 32},
        buffers=[memory],
    )
    assert (batch.vgpr[8] == memory[:4].view(np.uint32)[0]).all()


def test_of_two_lanes_at_one_address_the_last_wins():
    at = np.zeros((2, 64), np.int64)
    memory = store("DWORDX2", at, 0)
    assert memory[:8].view(np.uint32).tolist() == random_words(3, 2, 2, 64)[:, 1, 63].tolist()


def test_load_over_its_own_address():
    memory = aligned_buffer(random_bytes(13, 2048))
    address = memory.ctypes.data + np.arange(128).reshape(2, 64) * 16
    notes = Notes()
    batch = machine.run(
        [GLOBAL(GLOBALOp.GLOBAL_LOAD_DWORDX4, vdst=vgprs(2, 4), addr=vgprs(2), saddr=NO_SADDR)],
        vgpr={2: address & 0xFFFFFFFF, 3: address >> 32},
        buffers=[memory],
        observers=[notes],
    )
    words = memory.view(np.uint32).reshape(2, 64, 4)
    np.testing.assert_array_equal(batch.vgpr[2:6], words.transpose(2, 0, 1))
    np.testing.assert_array_equal(notes.seen[0][1], address)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(LOADS)),
    form=st.sampled_from(FORMS),
    exec=st.integers(0, ALL_LANES),
    seed=st.integers(0, 1000),
    offset=st.integers(-4096, 4095),
    unit=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_random_loads(name, form, exec, seed, offset, unit):
    load(name, anywhere(seed, unit), abs(offset) % 4096 if form == "flat" else offset, form, exec=exec)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(STORES)),
    form=st.sampled_from(FORMS),
    exec=st.integers(0, ALL_LANES),
    seed=st.integers(0, 1000),
    offset=st.integers(-4096, 4095),
    unit=st.sampled_from([16, 17, 18, 20, 24]),
)
def test_random_stores(name, form, exec, seed, offset, unit):
    store(name, apart(seed, unit), abs(offset) % 4096 if form == "flat" else offset, form, exec=exec)


# Range


def row_load(tensor: torch.Tensor, row: int, bad_lane: int, exec: int = ALL_LANES, form: str = "vgpr", extra=()):
    """All lanes read row 0 of a [rows, 64] float tensor, except for one lane of wave 1."""
    address = np.tile(tensor.data_ptr() + np.arange(64) * 4, (2, 1)).astype(np.int64)
    address[1, bad_lane] += row * 256
    instruction, vgpr, sgpr = addressed(form, "LOAD_DWORD", address, 0, 1)
    return machine.run([instruction], vgpr={**vgpr, 8: OLD}, sgpr=sgpr, exec=exec, buffers=[tensor, *extra])


@pytest.mark.parametrize("form", FORMS)
def test_one_row_past_the_end_names_address_lane_and_buffer(form):
    tensor = torch.arange(256, dtype=torch.float32).reshape(4, 64)
    row_load(tensor, 3, 7, form=form)
    bad = tensor.data_ptr() + 4 * 256 + 7 * 4
    with pytest.raises(OutOfRange) as caught:
        row_load(tensor, 4, 7, form=form)
    text = str(caught.value)
    assert f"4-byte read at {bad:#x} by lane 7" in text
    assert "28 bytes past the end of buffer 0 float32[4, 64]" in text
    assert ("apertures" in text) == (form == "flat")


def test_a_slice_ends_where_it_ends():
    storage = torch.zeros(8, 64)
    with pytest.raises(OutOfRange, match="past the end of buffer 0"):
        row_load(storage[:4], 4, 0)


def test_an_inactive_lane_may_point_anywhere():
    tensor = torch.arange(256, dtype=torch.float32).reshape(4, 64)
    batch = row_load(tensor, 1 << 20, 7, exec=ALL_LANES & ~(1 << 7))
    assert (batch.vgpr[8, :, 7] == OLD).all()
    assert batch.vgpr[8, 1, 8] == np.float32(8).view(np.uint32)


def test_lanes_in_different_buffers():
    first, second = torch.arange(64, dtype=torch.float32), torch.arange(64, dtype=torch.float32) + 100
    address = np.stack([t.data_ptr() + np.arange(64) * 4 for t in (first, second)]).astype(np.int64)
    instruction, vgpr, sgpr = addressed("vgpr", "LOAD_DWORD", address, 0, 1)
    batch = machine.run([instruction], vgpr=vgpr, sgpr=sgpr, buffers=[second, first])
    expected = torch.stack([first, second]).numpy()
    np.testing.assert_array_equal(batch.vgpr[8].view(np.float32), expected)
    address[1, 63] += 4
    instruction, vgpr, sgpr = addressed("vgpr", "LOAD_DWORD", address, 0, 1)
    with pytest.raises(OutOfRange, match="lane 63"):
        machine.run([instruction], vgpr=vgpr, sgpr=sgpr, buffers=[second, first])


def test_an_access_may_not_bridge_two_buffers():
    memory = aligned_buffer(random_bytes(14, 64))
    address = np.full((2, 64), memory.ctypes.data + 28)
    instruction, vgpr, sgpr = addressed("vgpr", "LOAD_DWORDX2", address, 0, 2)
    with pytest.raises(OutOfRange, match="8-byte read.* crosses its end"):
        machine.run([instruction], vgpr=vgpr, sgpr=sgpr, buffers=[memory[:32], memory[33:]])
    machine.run([instruction], vgpr=vgpr, sgpr=sgpr, buffers=[memory[:32], memory[16:48], memory[20:30]])


@pytest.mark.parametrize("exec", [ALL_LANES, SOME_LANES])
def test_a_store_out_of_range_is_an_error_and_null_too(exec):
    for address in (0, 8, -8, 1 << 62):
        instruction, vgpr, sgpr = addressed("vgpr", "STORE_DWORD", np.full((2, 64), address), 0, 1)
        with pytest.raises(OutOfRange, match="4-byte write"):
            machine.run([instruction], vgpr=vgpr, sgpr=sgpr, exec=exec, buffers=[np.zeros(4)])
        with pytest.raises(OutOfRange, match="no buffer is registered"):
            machine.run([instruction], vgpr=vgpr, sgpr=sgpr, exec=exec)
        machine.run([instruction], vgpr=vgpr, sgpr=sgpr, exec=0)


def test_the_registry_forgets_what_is_removed():
    registry, memory = BufferRegistry(), aligned_buffer(random_bytes(15, 64))
    start, lanes = memory.ctypes.data, np.ones((1, 64), bool)
    address = np.full((1, 64), start)
    with registry.temporarily([(start, 64, "for a while")]):
        assert registry.check(address, lanes, 16, "read") == (start, start + 16)
    with pytest.raises(OutOfRange, match="no buffer"):
        registry.check(address, lanes, 4, "read")
    registry.add(memory)
    registry.check(address, lanes, 64, "read")
    registry.remove_range(start)
    with pytest.raises(OutOfRange, match="no buffer"):
        registry.check(address, lanes, 4, "read")


# Loads to LDS


@SELECTIONS
@pytest.mark.parametrize("name", ["UBYTE", "SBYTE", "USHORT", "SSHORT", "DWORD"])
@pytest.mark.parametrize("form", ["vgpr", "sgpr"])
def test_load_to_lds(name, form, exec, order):
    content, notes = random_bytes(15, 4096), Notes()
    memory = aligned_buffer(random_bytes(16, SIZE))
    at = anywhere(17, 4)
    address = memory.ctypes.data + at - 32
    m0 = np.array([0x1_0000 | 512, 1024], np.uint32)
    instruction, vgpr, sgpr = addressed(form, f"LOAD_{name}", address, 32, 1)
    fields = {"saddr": NO_SADDR} if form == "vgpr" else {"saddr": sgprs(4, 2)}
    instruction = GLOBAL(GLOBALOp[f"GLOBAL_LOAD_LDS_{name}"], addr=vgprs(2), offset=32, **fields)
    batch = machine.run(
        [instruction],
        vgpr={**vgpr, 0: OLD},
        sgpr=sgpr,
        m0=m0,
        exec=exec,
        order=order,
        lds=content,
        buffers=[memory],
        observers=[notes],
    )
    words = expected_load(name, memory, at, exec, 0)[0]
    expected = content.copy()
    for wave in range(2):
        for lane in lanes_of(exec):
            start = (512, 1024)[wave] + 32 + 4 * lane
            expected[start : start + 4] = words[wave, lane : lane + 1].view(np.uint8)
    np.testing.assert_array_equal(batch.lds[0], expected)
    assert (batch.vgpr[0] == OLD).all()
    size = LOADS[name][0]
    assert {(note[0], *note[3:]) for note in notes.seen} == {("vmem", size, "read"), ("lds", 4, "write")}
    if order == "lockstep":
        lds_address = np.array([512, 1024])[:, None] + 32 + 4 * np.arange(64)
        np.testing.assert_array_equal(next(note for note in notes.seen if note[0] == "lds")[1], lds_address)


def test_load_past_the_end_of_lds():
    memory = aligned_buffer(random_bytes(18, 256))
    instruction = GLOBAL(GLOBALOp.GLOBAL_LOAD_LDS_DWORD, addr=vgprs(2), saddr=sgprs(4, 2))
    start = memory.ctypes.data
    with pytest.raises(OutOfRange, match="LDS byte 0x200 by lane 63"):
        machine.run(
            [instruction],
            vgpr={2: 0},
            sgpr={4: start & 0xFFFFFFFF, 5: start >> 32},
            m0=512 - 63 * 4,
            lds_bytes=512,
            buffers=[memory],
        )


# Observers, and what is refused


@pytest.mark.parametrize("form", FORMS)
def test_observers(form):
    notes, at = Notes(), apart(19, 16)
    memory = load("DWORDX2", at, 16, form, exec=SOME_LANES, observers=[notes])
    what, address, active, size, kind = notes.seen[0]
    assert (what, size, kind, len(notes.seen)) == ("vmem", 8, "read", 1)
    lanes = lanes_of(SOME_LANES)
    np.testing.assert_array_equal(address[:, lanes], memory.ctypes.data + at[:, lanes])
    np.testing.assert_array_equal(active, np.tile([bool(SOME_LANES >> i & 1) for i in range(64)], (2, 1)))
    notes = Notes()
    store("BYTE", at, 16, form, observers=[notes])
    assert [(note[0], *note[3:]) for note in notes.seen] == [("vmem", 1, "write")]


def test_refused():
    for instruction in (
        GLOBAL(GLOBALOp.GLOBAL_LOAD_LDS_DWORDX4, addr=vgprs(2), saddr=NO_SADDR),
        GLOBAL(GLOBALOp.GLOBAL_LOAD_DWORD, vdst=vgprs(8), addr=vgprs(2, 2), saddr=src[124]),
    ):
        with pytest.raises(UnknownInstruction):
            machine.run([instruction])
