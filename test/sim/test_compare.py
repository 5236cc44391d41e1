"""Compares: where the result goes, EXEC, operand modifiers. The relations themselves are in test_vector_pcode.py."""

from __future__ import annotations

import numpy as np
import pytest

import machine
from assembler import Assembled, assemble
from gfx942sim.errors import UnknownInstruction

X = np.resize(np.array([0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 2.5], np.float32), (2, 64))
Y = np.array([0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 2.5], np.float32)[np.arange(128) // 8 % 8]
Y = Y.reshape(2, 64)
SOME = 0xFF00_0FF0_1234_8001
ON = (SOME >> np.arange(64).astype(object) & 1).astype(bool)


def run(*lines, **options):
    vgpr = {3: X.view(np.uint32), 4: Y.view(np.uint32), 5: 0}
    return machine.run([assemble(line) for line in lines], vgpr=vgpr, **options)


def lanes(batch, register):
    return batch.read_lane_mask(slice(None), register)


@pytest.mark.parametrize("exec_mask,on", [((1 << 64) - 1, True), (SOME, ON)])
def test_destinations(exec_mask, on):
    """VOPC writes VCC, VOP3 any pair; lanes that are off give 0 and the rest of the state stays."""
    before = (1 << 64) - 1
    batch = run("v_cmp_lt_f32 vcc, v3, v4", exec=exec_mask, vcc=before)
    assert np.array_equal(lanes(batch, 106), (X < Y) & on)
    batch = run("v_cmp_nge_f32 s[8:9], v3, v4", exec=exec_mask, vcc=before)
    assert np.array_equal(lanes(batch, 8), ~(X >= Y) & on)
    assert lanes(batch, 106).all() and np.array_equal(lanes(batch, 126), np.broadcast_to(on, (2, 64)))


def test_cmpx_sets_exec_and_the_destination():
    batch = run("v_cmpx_gt_f32 s[8:9], v3, 1.0", "v_mov_b32 v5, 7", exec=SOME)
    expected = (X > 1) & ON
    for register in (8, 126):
        assert np.array_equal(lanes(batch, register), expected)
    assert np.array_equal(batch.exec, expected)
    assert np.array_equal(batch.vgpr[5], np.where(expected, 7, 0))


def test_cmpx_to_exec_itself():
    batch = run("v_cmpx_le_f32 exec, v3, v4", "v_mov_b32 v5, 7")
    assert np.array_equal(batch.vgpr[5], np.where(X <= Y, 7, 0))


def test_float_modifiers():
    batch = run("v_cmp_eq_f32 s[8:9], -v3, |v4|")
    assert np.array_equal(lanes(batch, 8), -X == np.abs(Y))
    batch = run("v_cmp_class_f32 s[8:9], -v3, 0x4", "v_cmp_class_f32 s[10:11], |v3|, 64")
    assert np.array_equal(lanes(batch, 8), X == np.inf)
    assert np.array_equal(lanes(batch, 10), X == 0)


def test_scalar_operands_broadcast():
    """All operands scalar: one result for all active lanes of a wave."""
    batch = run("v_cmp_lt_u32 s[8:9], s3, 5", sgpr={3: [4, 5]}, exec=SOME)
    assert np.array_equal(lanes(batch, 8), np.stack([ON, ON & False]))
    batch = run("v_cmp_t_u32 s[8:9], s3, 5", "v_cmp_f_u32 s[10:11], s3, 5", sgpr={3: 0}, exec=SOME)
    assert np.array_equal(lanes(batch, 8), np.stack([ON, ON])) and not lanes(batch, 10).any()


def test_pairs_and_halves():
    low, high = np.arange(128).reshape(2, 64), np.where(np.arange(64) % 2, 0xFFFFFFFF, 0)
    batch = machine.run(
        [assemble("v_cmp_lt_i64 s[8:9], v[2:3], s[4:5]"), assemble("v_cmp_lt_u64 s[10:11], v[2:3], s[4:5]")],
        vgpr={2: low, 3: high},
        sgpr={4: 7, 5: 0},
    )
    assert np.array_equal(lanes(batch, 8), (low < 7) | (high != 0))
    assert np.array_equal(lanes(batch, 10), (low < 7) & (high == 0))
    batch = machine.run([assemble("v_cmp_gt_i16 vcc, v2, v3")], vgpr={2: 0x12348000, 3: 0xFFFF7FFF})
    assert not lanes(batch, 106).any()


def test_flushed_denormals_compare_equal_to_zero():
    tiny = [assemble("v_cmp_eq_f32 vcc, 0, v2"), assemble("v_cmp_class_f32 s[8:9], v2, s4")]
    for rsrc1, equal in ((0xF << 16, False), (0, True)):
        batch = machine.run(tiny, vgpr={2: 1}, sgpr={4: 0x80}, rsrc1=rsrc1)
        assert (lanes(batch, 106) == equal).all()
        assert lanes(batch, 8).all(), "the class of a denormal does not depend on the mode"


def test_clamp_is_refused():
    code = bytearray(assemble("v_cmp_lt_f32 s[8:9], v3, v4").to_bytes())
    code[1] |= 0x80
    with pytest.raises(UnknownInstruction):
        machine.run([Assembled(bytes(code))], vgpr={3: 0, 4: 0})
