"""Planted races in hand-written instructions: found in every order, with both places; and what is no race."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import v
from tinygrad.runtime.autogen.amd.cdna.enum import DSOp, SOPPOp
from tinygrad.runtime.autogen.amd.cdna.ins import DS, SOPP

from gfx942sim.races import LdsRaces, RaceCheck
from machine import run

LANE = np.arange(64)
BARRIER = SOPP(SOPPOp.S_BARRIER, simm16=0)
ORDERS = ["lockstep", "forward", "reverse", "random"]
# v0: each wave's own dwords. v1: those of the other wave.
OWN = np.stack([4 * LANE, 256 + 4 * LANE])
OTHER = OWN[::-1]


def write(address, op=DSOp.DS_WRITE_B32, data=v[2]):
    return DS(op, vdst=v[0], addr=address, data0=data, data1=v[0])


def read(address, op=DSOp.DS_READ_B32):
    return DS(op, vdst=v[3], addr=address, data0=v[0], data1=v[0])


def add(address):
    return DS(DSOp.DS_ADD_U32, vdst=v[0], addr=address, data0=v[2], data1=v[0])


def races(instructions, order="lockstep", vgpr=None, waves=2, groups=1):
    check = RaceCheck(None, "bench")
    run(
        instructions,
        vgpr=vgpr or {0: OWN, 1: OTHER, 2: 7},
        waves=waves,
        groups=groups,
        observers=[check],
        order=order,
        seed=1,
    )
    return check.found()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "first, second, pair",
    [
        (write(v[0]), read(v[1]), {"ds_write_b32", "ds_read_b32"}),
        (read(v[0]), write(v[1]), {"ds_write_b32", "ds_read_b32"}),
        (write(v[0]), write(v[1]), {"ds_write_b32"}),
        (add(v[0]), read(v[1]), {"ds_add_u32", "ds_read_b32"}),
        (write(v[0]), add(v[1]), {"ds_add_u32", "ds_write_b32"}),
    ],
    ids=["write-read", "read-write", "write-write", "atomic-read", "write-atomic"],
)
def test_without_a_barrier_both_places_are_named(first, second, pair, order):
    found = races([first, second], order)
    assert found, order
    assert {found[0].first_mnemonic, found[0].second_mnemonic} == pair
    assert {found[0].first_address, found[0].second_address} == {0, 8}
    assert found[0].first_wave != found[0].second_wave
    assert races([first, BARRIER, second], order) == []


@pytest.mark.parametrize("order", ORDERS)
def test_kinds_follow_the_order_of_the_accesses(order):
    kinds = {race.kind for race in races([write(v[0]), read(v[1])], order)}
    # In step both waves write, then both read; one wave after the other, the second overwrites what the first read.
    assert kinds == ({"RAW"} if order == "lockstep" else {"RAW", "WAR"} if order != "random" else kinds)
    assert kinds <= {"RAW", "WAR"}


@pytest.mark.parametrize(
    "instructions, vgpr",
    [
        ([write(v[0]), read(v[0]), write(v[0])], None),
        ([read(v[1]), read(v[0])], None),
        ([add(v[0]), add(v[1])], None),
        # Neighbouring bytes of one dword.
        ([write(v[0], DSOp.DS_WRITE_B8)], {0: np.stack([4 * LANE, 4 * LANE + 1]), 2: 7}),
        ([write(v[0], DSOp.DS_WRITE_B16)], {0: np.stack([4 * LANE, 4 * LANE + 2]), 2: 7}),
    ],
    ids=["own", "reads", "atomics", "bytes", "halves"],
)
def test_what_is_no_race(instructions, vgpr):
    assert [race for order in ORDERS for race in races(instructions, order, vgpr)] == []


def test_one_byte_of_two_waves_is_a_race_even_when_they_run_in_step():
    same = {0: np.stack([4 * LANE, 4 * LANE]), 2: 7}
    assert [race.kind for race in races([write(v[0])], vgpr=same)] == ["WAW"]
    narrow = races([write(v[0], DSOp.DS_WRITE_B8), read(v[0])], vgpr={0: np.stack([4 * LANE, 4 * LANE + 1]), 2: 7})
    assert {(race.kind, race.byte % 4) for race in narrow} == {("RAW", 1)}


def test_dwords_before_a_narrow_access_are_remembered():
    """The shadow changes from dwords to bytes on the way."""
    vgpr = {0: OWN, 1: OTHER + 3, 2: 7}
    found = races([write(v[0]), read(v[1], DSOp.DS_READ_U8)], vgpr=vgpr)
    assert [(race.kind, race.byte % 4) for race in found] == [("RAW", 3)]


def test_wide_accesses_count_with_all_their_bytes():
    vgpr = {0: np.stack([16 * LANE, 16 * LANE + 1024]), 1: np.stack([16 * LANE + 1024 + 12, 16 * LANE + 12]), 2: 7}
    found = races([write(v[0], DSOp.DS_WRITE_B128, v[2:5]), read(v[1])], vgpr=vgpr)
    assert [(race.kind, race.byte % 16) for race in found] == [("RAW", 12)]


def test_work_groups_do_not_race_with_each_other():
    same = np.broadcast_to(4 * LANE, (4, 64))
    assert races([write(v[0]), read(v[0])], vgpr={0: same, 2: 7}, waves=1, groups=4) == []
    both = np.concatenate([OWN, OWN])
    assert races([write(v[0]), read(v[0])], vgpr={0: both, 2: 7}, groups=2) == []


def test_a_barrier_of_one_work_group_does_not_clear_another():
    """Three waves each; the race of the last work-group is found although others were released before it."""
    own = np.concatenate([np.stack([256 * w + 4 * LANE for w in range(3)])] * 2)
    other = np.concatenate([own[:3], own[3:][[1, 2, 0]]])
    found = races([write(v[0]), read(v[1])], vgpr={0: own, 1: other, 2: 7}, waves=3, groups=2)
    assert {race.workgroup for race in found} == {(1, 0, 0)}


def test_the_message_says_where():
    found = races([write(v[0]), read(v[1])])
    text = str(LdsRaces("bench", found))
    assert "bench: 1 LDS race(s)" in text and "ds_write_b32 at 0x0" in text and "ds_read_b32 at 0x8" in text
