"""SCRATCH loads and stores: one private array per lane."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import src
from tinygrad.runtime.autogen.amd.cdna.enum import SCRATCHOp
from tinygrad.runtime.autogen.amd.cdna.ins import SCRATCH

import machine
from gfx942sim.errors import OutOfRange, UnknownInstruction
from memory_bench import (
    ALL_LANES,
    LOADS,
    NO_SADDR,
    SELECTIONS,
    STORES,
    Notes,
    expected_load,
    expected_store,
    lanes_of,
    random_words,
    sgprs,
    vgprs,
)

OLD = 0xA5C3_0F1E
BYTES = 88
# Which of SGPR, VGPR the address is made of.
FORMS = [(False, False), (True, False), (False, True), (True, True)]


def access(name: str, registers: int, form: tuple[bool, bool], offset: int, accumulator: int = 0, saddr=None):
    field = "vdst" if name.startswith("LOAD") else "data"
    return SCRATCH(
        SCRATCHOp[f"SCRATCH_{name}"],
        addr=vgprs(2),
        saddr=(saddr or sgprs(6)) if form[0] else NO_SADDR,
        sve=int(form[1]),
        offset=offset & 0x1FFF,
        acc=accumulator,
        **{field: vgprs(8, registers)},
    )


def fill() -> tuple[list, dict, np.ndarray]:
    """Instructions and registers that fill all of the scratch memory, and its content, uint8 [2, 64, BYTES]."""
    words = random_words(1, BYTES // 4, 2, 64)
    stores, vgpr = [], {}
    for i in range(BYTES // 4):
        stores.append(SCRATCH(SCRATCHOp.SCRATCH_STORE_DWORD, data=vgprs(100 + i), saddr=NO_SADDR, offset=4 * i))
        vgpr[100 + i] = words[i]
    return stores, vgpr, np.ascontiguousarray(words.transpose(1, 2, 0)).view(np.uint8)


def place(form: tuple[bool, bool]):
    """(SGPR 6, VGPR 2, the sum of those in use [2, 64])."""
    rng = np.random.default_rng(2)
    scalar = np.array([16, 32])
    vector = rng.integers(0, 24, (2, 64))
    return scalar, vector, np.zeros((2, 64), np.int64) + scalar[:, None] * form[0] + vector * form[1]


@SELECTIONS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOADS)
def test_load(name, form, exec, order):
    count = max(1, LOADS[name][0] // 4)
    stores, vgpr, content = fill()
    scalar, vector, total = place(form)
    notes = Notes()
    machine_arguments = {
        "vgpr": {**vgpr, 2: vector, **{8 + i: OLD for i in range(count)}},
        "sgpr": {6: scalar},
        "order": order,
        "scratch": BYTES,
    }
    batch = machine.run(
        [*stores, access(f"LOAD_{name}", count, form, -4 if form[0] else 4)], observers=[notes], **machine_arguments
    )
    at = total + (-4 if form[0] else 4)
    flat = content.reshape(-1)
    lane_start = np.arange(128).reshape(2, 64) * BYTES
    np.testing.assert_array_equal(batch.vgpr[8 : 8 + count], expected_load(name, flat, lane_start + at, ALL_LANES, OLD))
    what, address, active, size, kind = notes.seen[-1]
    assert (what, size, kind) == ("vmem", LOADS[name][0], "scratch_read")
    assert active.all()
    np.testing.assert_array_equal(address, at if order == "lockstep" else at[1:])


@SELECTIONS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STORES)
def test_store(name, form, exec, order):
    count = max(1, STORES[name][0] // 4)
    data = random_words(3, count, 2, 64)
    scalar, vector, total = place(form)
    notes = Notes()
    batch = machine.run(
        [access(f"STORE_{name}", count, form, 8)],
        vgpr={2: vector, **{8 + i: data[i] for i in range(count)}},
        sgpr={6: scalar},
        exec=exec,
        order=order,
        scratch=BYTES,
        observers=[notes],
    )
    stride = batch.scratch.shape[2]
    before = np.full(128 * stride, batch.scratch[0, 0, -1], np.uint8)
    at = np.arange(128).reshape(2, 64) * stride + total + 8
    np.testing.assert_array_equal(batch.scratch.reshape(-1), expected_store(name, before, at, exec, data))
    assert notes.seen[0][3:] == (STORES[name][0], "scratch_write")
    assert notes.seen[0][2][0].tolist() == [lane in lanes_of(exec) for lane in range(64)]


def test_masked_load_keeps_inactive_lanes():
    stores, vgpr, content = fill()
    batch = machine.run(
        [*stores, access("LOAD_DWORD", 1, (False, True), 0)],
        vgpr={**vgpr, 2: np.where(np.arange(64) == 5, 8, 10_000), 8: OLD},
        exec=1 << 5,
        scratch=BYTES,
    )
    expected = np.full((2, 64), OLD, np.uint32)
    expected[:, 5] = content.view(np.uint32)[:, 5, 2]
    np.testing.assert_array_equal(batch.vgpr[8], expected)


def test_m0_as_the_address():
    stores, vgpr, content = fill()
    batch = machine.run(
        [*stores, access("LOAD_DWORD", 1, (True, False), 4, saddr=src[124])], vgpr=vgpr, m0=8, scratch=BYTES
    )
    np.testing.assert_array_equal(batch.vgpr[8], content.view(np.uint32)[..., 3])


def test_accumulator_registers():
    data = random_words(4, 2, 2, 64)
    batch = machine.run(
        [
            access("STORE_DWORDX2", 2, (False, False), 8, accumulator=1),
            access("LOAD_DWORD", 1, (False, False), 12, accumulator=1),
        ],
        vgpr={256 + 8: data[0], 256 + 9: data[1]},
        scratch=BYTES,
    )
    np.testing.assert_array_equal(batch.vgpr[256 + 8], data[1])


@pytest.mark.parametrize("at", [-4, BYTES - 3, BYTES, 1 << 31])
@pytest.mark.parametrize("name", ["LOAD_DWORD", "STORE_DWORD"])
def test_out_of_range(name, at):
    offset = -4 if at < 0 else 0
    address = np.zeros((2, 64), np.int64)
    address[1, 9] = max(at, 0)
    address[:, :9] += 4
    address[0] += 4
    address[1, 10:] += 4
    run = {"vgpr": {2: address, 8: 0}, "scratch": BYTES}
    with pytest.raises(OutOfRange, match=rf"scratch byte {at} by lane 9 of wave 1.* a lane has {BYTES} bytes"):
        machine.run([access(name, 1, (False, True), offset)], **run)
    machine.run([access(name, 1, (False, True), offset)], exec=ALL_LANES & ~(1 << 9), **run)


def test_a_kernel_without_scratch():
    with pytest.raises(OutOfRange, match="a lane has 0 bytes"):
        machine.run([access("STORE_DWORD", 1, (False, False), 0)], vgpr={8: 0})


def test_unwritten_scratch_is_not_zero():
    batch = machine.run([access("LOAD_DWORD", 1, (False, False), 0)], scratch=BYTES)
    assert (batch.vgpr[8] == 0xC1C1C1C1).all()


def test_refused():
    with pytest.raises(UnknownInstruction, match="SADDR"):
        machine.run([access("LOAD_DWORD", 1, (True, False), 0, saddr=src[126])], scratch=BYTES)
