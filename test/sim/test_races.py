"""The LDS race check against planted races, and against a slow check that keeps every access."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tinygrad.runtime.autogen.amd.cdna.enum import DSOp, SOPPOp
from tinygrad.runtime.autogen.amd.cdna.ins import DS, SOPP

import machine
from gfx942sim.decode import Instruction
from gfx942sim.races import LdsRace, LdsRaces, RaceCheck

LANE = np.arange(64)
ALL = slice(None)
FIRST, SECOND, THIRD = (Instruction(a, 8, f"ds_test_{a}", "DS", DS(DSOp.DS_READ_B32)) for a in (0x10, 0x20, 0x30))


def batch_of(waves: int = 2, groups: int = 1, lds_bytes: int = 4096):
    return machine.run([], waves=waves, groups=groups, lds_bytes=lds_bytes)


class Bench:
    """Calls the observer as the LDS module does. `access` takes an address per wave (broadcast to its lanes)."""

    def __init__(self, **sizes):
        self.batch, self.check = batch_of(**sizes), RaceCheck(None, "bench")

    def access(self, waves, instruction, address, kind, size=4, lanes=None):
        selection = waves if isinstance(waves, slice) else np.asarray(waves)
        count = self.batch.waves if isinstance(waves, slice) else len(waves)
        address = np.asarray(address, np.int64)
        address = np.broadcast_to(address if address.ndim == 2 else address.reshape(-1, 1), (count, 64))
        active = np.broadcast_to(np.ones(64, bool) if lanes is None else np.isin(LANE, lanes), (count, 64))
        self.check.lds(self.batch, selection, instruction, address, active, size, kind)

    def kinds(self):
        return [(r.kind, r.first_address, r.second_address) for r in self.check.found()]


def per_lane(*starts, size=4):
    """Each wave writes or reads 64 neighbours from its start."""
    return np.stack([start + size * LANE for start in starts])


@pytest.mark.parametrize(
    "first, second, name",
    [
        ("write", "read", "RAW"),
        ("read", "write", "WAR"),
        ("write", "write", "WAW"),
        ("atomic", "read", "RAW"),
        ("read", "atomic", "WAR"),
        ("atomic", "write", "WAW"),
        ("write", "atomic", "WAW"),
        ("read", "read", None),
        ("atomic", "atomic", None),
    ],
)
class TestTwoWaves:
    def test_same_bytes(self, first, second, name):
        bench = Bench()
        bench.access([0], FIRST, 128, first, lanes=[3])
        bench.access([1], SECOND, 128, second, lanes=[5])
        expected = LdsRace(name, 0x10, "ds_test_16", 0x20, "ds_test_32", 128, (0, 0, 0), 0, 1)
        assert bench.check.found() == ([expected] if name else [])

    def test_barrier_in_between(self, first, second, name):
        bench = Bench()
        bench.access([0], FIRST, 128, first)
        bench.check.barrier(bench.batch, np.array([0]))
        bench.access([1], SECOND, 128, second, lanes=[0])
        assert bench.kinds() == []

    def test_same_wave(self, first, second, name):
        bench = Bench()
        bench.access([1], FIRST, 128, first)
        bench.access([1], SECOND, 128, second)
        assert bench.kinds() == []

    def test_other_bytes(self, first, second, name):
        bench = Bench()
        bench.access([0], FIRST, per_lane(0), first)
        bench.access([1], SECOND, per_lane(256), second)
        assert bench.kinds() == []

    def test_other_work_group(self, first, second, name):
        bench = Bench(waves=2, groups=2)
        bench.access([0], FIRST, 128, first)
        bench.access([3], SECOND, 128, second)
        assert bench.kinds() == []

    def test_bytes_of_one_dword(self, first, second, name):
        """The halves of a dword are apart; a byte of the other half, after that, is not."""
        bench = Bench()
        bench.access([0], FIRST, 128, first, size=2, lanes=[0])
        bench.access([1], SECOND, 130, second, size=2, lanes=[0])
        assert bench.kinds() == []
        bench.access([1], THIRD, 129, second, size=1, lanes=[0])
        assert bench.kinds() == ([(name, 0x10, 0x30)] if name else [])

    def test_wide_then_narrow(self, first, second, name):
        """What was kept by dword is still known when a byte access makes the record finer."""
        bench = Bench()
        bench.access([0], FIRST, 128, first, size=16, lanes=[0])
        bench.access([1], SECOND, 144, second, size=1, lanes=[0])
        bench.access([1], SECOND, 127, second, size=1, lanes=[0])
        assert bench.kinds() == []
        bench.access([1], THIRD, 143, second, size=1, lanes=[0])
        assert bench.kinds() == ([(name, 0x10, 0x30)] if name else [])

    def test_inactive_lanes_touch_nothing(self, first, second, name):
        bench = Bench()
        bench.access([0], FIRST, per_lane(0), first, lanes=range(32))
        bench.access([1], SECOND, per_lane(0), second, lanes=range(32, 64))
        assert bench.kinds() == []

    def test_other_batch(self, first, second, name):
        bench = Bench()
        bench.access([0], FIRST, 128, first)
        bench.batch = batch_of()
        bench.access([1], SECOND, 128, second, lanes=[0])
        assert bench.kinds() == []


@pytest.mark.parametrize("groups", [1, 3])
def test_waves_in_step_write_the_same_byte(groups):
    bench = Bench(waves=2, groups=groups)
    bench.access(ALL, FIRST, 64, "write", lanes=[0])
    assert bench.kinds() == [("WAW", 0x10, 0x10)]
    assert {bench.check.found()[0].first_wave, bench.check.found()[0].second_wave} == {0, 1}


def test_lanes_of_one_wave_may_write_the_same_byte():
    bench = Bench(waves=2)
    bench.access(ALL, FIRST, np.array([64, 128]), "write")
    assert bench.kinds() == []


def test_all_groups_race_in_step():
    bench = Bench(waves=4, groups=3)
    own = np.tile(per_lane(0, 256, 512, 768), (3, 1))
    bench.access(ALL, FIRST, own, "write")
    bench.access(ALL, SECOND, own, "read")
    assert bench.kinds() == []
    bench.access(ALL, THIRD, (own + 256) % 1024, "read")
    assert bench.kinds() == [("RAW", 0x10, 0x30)]
    race = bench.check.found()[0]
    assert race.first_wave == (race.second_wave + 1) % 4


def test_a_group_that_differs():
    """Groups that did the same are told apart when one of them goes another way."""
    bench = Bench(waves=2, groups=3)
    bench.access(ALL, FIRST, np.tile(per_lane(0, 256), (3, 1)), "write")
    bench.check.barrier(bench.batch, np.array([0, 2]))
    bench.access([0, 1, 4, 5], SECOND, np.tile(per_lane(256, 0), (2, 1)), "read")
    assert bench.kinds() == []
    bench.access([2], THIRD, per_lane(256), "read")
    assert bench.kinds() == [("RAW", 0x10, 0x30)]
    assert bench.check.found()[0].workgroup == (1, 0, 0)


def test_a_group_that_goes_on_alone():
    """What it does from then on is not held against the groups that did the same before."""
    bench = Bench(waves=2, groups=2)
    bench.access([0, 2], FIRST, 0, "write")
    bench.access([0], SECOND, 512, "write")
    bench.access([3], THIRD, 512, "read")
    assert bench.kinds() == []
    bench.access([1], THIRD, 512, "read")
    assert bench.kinds() == [("RAW", 0x20, 0x30)]


def test_groups_with_different_lanes():
    bench = Bench(waves=2, groups=2)
    active = np.zeros((2, 64), bool)
    active[[0, 1], [0, 1]] = True
    bench.check.lds(bench.batch, np.array([0, 2]), FIRST, per_lane(0, 0).astype(np.int64), active, 4, "write")
    bench.access([3], SECOND, 0, "read", lanes=[0])
    assert bench.kinds() == []
    bench.access([3], THIRD, 4, "read", lanes=[0])
    assert bench.kinds() == [("RAW", 0x10, 0x30)]


def test_groups_with_different_addresses():
    bench = Bench(waves=2, groups=2)
    bench.access([0, 2], FIRST, np.array([0, 512]), "write", lanes=[0])
    bench.access([1, 3], SECOND, np.array([512, 0]), "read", lanes=[0])
    assert bench.kinds() == []
    bench.access([1, 3], THIRD, np.array([1024, 512]), "read", lanes=[0])
    assert [(r.kind, r.workgroup, r.offset) for r in bench.check.found()] == [("RAW", (1, 0, 0), 512)]


def test_sixteen_waves():
    bench = Bench(waves=16, groups=2)
    own = np.tile(per_lane(*(256 * w for w in range(16)), size=4), (2, 1))
    bench.access(ALL, FIRST, own, "read")
    bench.access([14], SECOND, own[15:16], "write")
    race = bench.check.found()[0]
    assert (race.kind, race.first_wave, race.second_wave) == ("WAR", 15, 14)


def test_one_wave_never_races():
    bench = Bench(waves=1, groups=4)
    bench.access(ALL, FIRST, 0, "write")
    bench.access(ALL, SECOND, 0, "read")
    assert bench.kinds() == []


def test_found_is_once_per_pair():
    bench = Bench()
    for offset in (0, 4, 8):
        bench.access([0], FIRST, offset, "write")
        bench.access([1], SECOND, offset, "read")
    assert bench.kinds() == [("RAW", 0x10, 0x20)]


def test_error_lists_races():
    bench = Bench()
    bench.access([0], FIRST, 20, "write")
    bench.access([1], SECOND, 20, "read")
    error = LdsRaces("kernel", bench.check.found())
    assert error.races == bench.check.found()
    assert "kernel: 1 LDS race" in str(error) and "RAW: ds_test_16 at 0x10 by wave 0, then ds_test_32" in str(error)


class Slow:
    """Keeps every access to every byte."""

    NAMES = {
        ("write", "read"): "RAW",
        ("atomic", "read"): "RAW",
        ("read", "write"): "WAR",
        ("read", "atomic"): "WAR",
    }

    def __init__(self):
        self.seen, self.racing = {}, set()

    def access(self, group, wave, byte, address, kind):
        past = self.seen.setdefault((group, byte), {})
        for (other, earlier), at in past.items():
            writes = earlier != "read" or kind != "read"
            if other != wave and writes and (earlier, kind) != ("atomic", "atomic"):
                self.racing.add((self.NAMES.get((earlier, kind), "WAW"), at, address))
        past[wave, kind] = address

    def barrier(self, groups):
        self.seen = {key: value for key, value in self.seen.items() if key[0] not in groups}


@pytest.mark.parametrize("seed", range(12))
def test_random_accesses(seed):
    """Random mixtures of uniform and divergent accesses of all sizes, groups and kinds; few enough bytes to collide.

    The slow check sees an instruction's waves one after the other, so writes that collide inside one step are compared
    by their instruction only.
    """
    rng = np.random.default_rng(seed)
    waves, groups = (2, 3) if seed % 2 else (5, 4)
    bench, slow = Bench(waves=waves, groups=groups, lds_bytes=8192), Slow()
    batch = bench.batch
    for step in range(40):
        if rng.random() < 0.3:
            released = np.flatnonzero(rng.random(groups) < 0.7)
            bench.check.barrier(batch, released)
            slow.barrier(set(released.tolist()))
        instruction = Instruction(8 * step, 8, f"ds_{step}", "DS", FIRST.raw)
        kind, size = str(rng.choice(["read", "read", "write", "atomic"])), int(rng.choice([4, 4, 8, 16, 2, 1]))
        chosen = np.flatnonzero(np.tile(rng.random(waves) < 0.5, groups))
        if rng.random() < 0.3:
            chosen = np.flatnonzero(rng.random(waves * groups) < 0.3)
        if chosen.size == 0:
            continue
        # Mostly each wave of a group at a place of its own, sometimes one that differs from group to group.
        place = batch.wave_in_group[chosen] * 256 + int(rng.integers(0, 8)) * 128
        if rng.random() < 0.3:
            place = place + batch.group_of[chosen] * 64
        address = (place // size * size)[:, None] + size * np.arange(64) % 256
        lanes = np.flatnonzero(rng.random(64) < 0.1)
        bench.access(chosen, instruction, address, kind, size=size, lanes=lanes)
        for row, lane, byte in itertools.product(range(len(chosen)), lanes, range(size)):
            wave = int(chosen[row])
            at = int(address[row, lane]) + byte
            slow.access(int(batch.group_of[wave]), int(batch.wave_in_group[wave]), at, 8 * step, kind)
    assert slow.racing, "the seed makes no race"
    assert set(bench.kinds()) == slow.racing


class Lds:
    """Stands in for the LDS module: makes an s_nop an access, so that the scheduler's orders decide who goes first."""

    def __init__(self, check, accesses):
        self.check, self.accesses = check, accesses

    def begin(self, batch):
        pass

    def before(self, batch, waves, instruction):
        if instruction.mnemonic == "s_nop":
            kind, address = self.accesses[instruction.raw.simm16]
            address = np.broadcast_to(address(batch.wave_in_group[waves])[:, None], batch.exec[waves].shape)
            self.check.lds(batch, waves, instruction, address.astype(np.int64), batch.exec[waves], 4, kind)


@pytest.mark.parametrize("order", ["lockstep", "forward", "reverse", "random"])
@pytest.mark.parametrize("with_barrier", [False, True])
def test_every_order_finds_it(order, with_barrier):
    """Each wave writes its own dword and reads its neighbour's."""
    check = RaceCheck(None, "bench")
    lds = Lds(check, [("write", lambda wave: 4 * wave), ("read", lambda wave: 4 * ((wave + 1) % 4))])
    barrier = [SOPP(SOPPOp.S_BARRIER, 0)] if with_barrier else []
    code = [SOPP(SOPPOp.S_NOP, 0), *barrier, SOPP(SOPPOp.S_NOP, 1), *barrier, SOPP(SOPPOp.S_NOP, 0)]
    machine.run(code, waves=4, groups=3, observers=[check], order=order, seed=1, register_check=lds)
    pairs = {frozenset((r.first_address, r.second_address)) for r in check.found()}
    last = 4 * (len(code) - 1)
    read = 4 * code.index(code[1 + with_barrier])
    assert pairs == (set() if with_barrier else {frozenset((0, read)), frozenset((read, last))})
