"""Atomics of LDS, global, FLAT and buffer instructions against one lane after another in Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinygrad.runtime.autogen.amd.cdna.enum import DSOp, FLATOp, GLOBALOp, MUBUFOp
from tinygrad.runtime.autogen.amd.cdna.ins import DS, FLAT, GLOBAL, MUBUF

import machine
from gfx942sim.errors import OutOfRange, SimulationError, UnknownInstruction
from memory_bench import (
    ALL_LANES,
    NO_SADDR,
    SELECTIONS,
    SOME_LANES,
    Notes,
    aligned_buffer,
    lanes_of,
    random_words,
    sgprs,
    vgprs,
)

OLD = 0xA5C3_0F1E
SLOTS = 40


def wrapped(function):
    """An operation on Python integers, modulo 2**bits."""
    return lambda bits: lambda old, *data: function(old, *data) % (1 << bits)


def signed(bits: int, value: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def by_sign(function):
    return lambda bits: lambda old, data: function(signed(bits, old), signed(bits, data)) % (1 << bits)


INTEGERS = {
    "add": wrapped(lambda old, data: old + data),
    "sub": wrapped(lambda old, data: old - data),
    "rsub": wrapped(lambda old, data: data - old),
    "inc": wrapped(lambda old, data: 0 if old >= data else old + 1),
    "dec": wrapped(lambda old, data: data if old == 0 or old > data else old - 1),
    "umin": wrapped(min),
    "umax": wrapped(max),
    "smin": by_sign(min),
    "smax": by_sign(max),
    "and": wrapped(lambda old, data: old & data),
    "or": wrapped(lambda old, data: old | data),
    "xor": wrapped(lambda old, data: old ^ data),
    "swap": wrapped(lambda old, data: data),
    "mskor": wrapped(lambda old, data, second: old & ~data | second),
    "cmpst": wrapped(lambda old, data, second: second if old == data else old),
    "cmpswap": wrapped(lambda old, data, second: data if old == second else old),
    "wrap": wrapped(lambda old, data, second: old - data if old >= data else old + second),
}


def float_operation(dtype, function):
    integer = {np.float32: np.uint32, np.float64: np.uint64}[dtype]

    def operation(bits):
        def apply(old, *data):
            values = [np.array(x, integer).view(dtype)[()] for x in (old, *data)]
            with np.errstate(all="ignore"):
                return int(np.asarray(function(*values), dtype).view(integer))

        return apply

    return operation


def add_pairs(dtype: torch.dtype):
    """Both halves added in `dtype`, by torch."""

    def apply(old, data):
        halves = [
            torch.tensor([x & 0xFFFF, x >> 16], dtype=torch.int32).to(torch.int16).view(dtype) for x in (old, data)
        ]
        low, high = (halves[0] + halves[1]).view(torch.int16).to(torch.int32).tolist()
        return (low & 0xFFFF) | (high & 0xFFFF) << 16

    return lambda bits: apply


def smaller(old, data):
    return data if data < old else old


def larger(old, data):
    return data if data > old else old


F32 = {
    "add_f32": float_operation(np.float32, lambda old, data: old + data),
    "min_f32": float_operation(np.float32, smaller),
    "max_f32": float_operation(np.float32, larger),
    "cmpst_f32": float_operation(np.float32, lambda old, data, second: second if old == data else old),
}
F64 = {
    "add_f64": float_operation(np.float64, lambda old, data: old + data),
    "min_f64": float_operation(np.float64, smaller),
    "max_f64": float_operation(np.float64, larger),
    "cmpst_f64": float_operation(np.float64, lambda old, data, second: second if old == data else old),
}
PAIRS = {"pk_add_f16": add_pairs(torch.float16), "pk_add_bf16": add_pairs(torch.bfloat16)}

# Mnemonic part -> (bits, operands, reference).
LDS_CASES = {
    **{
        f"{name}_{kind}{bits}": (bits, operands, INTEGERS[key])
        for bits in (32, 64)
        for name, kind, key, operands in (
            *((n, "u", n, 1) for n in ("add", "sub", "rsub", "inc", "dec")),
            *((n, "b", n, 1) for n in ("and", "or", "xor")),
            *((n, "b", n, 2) for n in ("mskor", "cmpst")),
            ("min", "i", "smin", 1),
            ("max", "i", "smax", 1),
            ("min", "u", "umin", 1),
            ("max", "u", "umax", 1),
        )
    },
    **{name: (32, 2 if "cmpst" in name else 1, reference) for name, reference in F32.items()},
    **{name: (64, 2 if "cmpst" in name else 1, reference) for name, reference in F64.items()},
    **{name: (32, 1, reference) for name, reference in PAIRS.items()},
}
LDS_RETURNING_ONLY = {
    "wrxchg_b32": (32, 1, INTEGERS["swap"]),
    "wrxchg_b64": (64, 1, INTEGERS["swap"]),
    "wrap_b32": (32, 2, INTEGERS["wrap"]),
}
_VMEM_INTEGERS = ("swap", "cmpswap", "add", "sub", "smin", "umin", "smax", "umax", "and", "or", "xor", "inc", "dec")
VMEM_CASES = {
    **{name: (32, 2 if name == "cmpswap" else 1, INTEGERS[name]) for name in _VMEM_INTEGERS},
    **{f"{name}_x2": (64, 2 if name == "cmpswap" else 1, INTEGERS[name]) for name in _VMEM_INTEGERS},
    "add_f32": (32, 1, F32["add_f32"]),
    "pk_add_f16": (32, 1, PAIRS["pk_add_f16"]),
    "pk_add_bf16": (32, 1, PAIRS["pk_add_bf16"]),
    "add_f64": (64, 1, F64["add_f64"]),
    "min_f64": (64, 1, F64["min_f64"]),
    "max_f64": (64, 1, F64["max_f64"]),
}


class Case:
    """Random memory of `SLOTS` elements, a slot and data for every lane, and what must come out.

    distinct: every lane has its own slot, otherwise many share one.
    """

    def __init__(self, name: str, bits: int, operands: int, reference, exec: int, seed: int, distinct: bool):
        self.bits, self.exec, self.size, self.words = bits, exec, bits // 8, bits // 32
        rng = np.random.default_rng(seed)
        self.slot = rng.permutation(128).reshape(2, 64) if distinct else rng.integers(0, SLOTS, (2, 64))
        count = 128 if distinct else SLOTS
        self.memory = self._values(rng, name, (count,))
        self.data = [self._values(rng, name, (2, 64)) for _ in range(operands)]
        if "cmps" in name:  # Some comparisons must succeed.
            compared = self.data[1 if "swap" in name else 0]
            equal = rng.random((2, 64)) < 0.5
            compared[equal] = self.memory[self.slot[equal]]
        apply = reference(bits)
        self.after, self.old = self.memory.copy(), np.zeros((2, 64), np.uint64)
        for wave in range(2):
            for lane in lanes_of(exec):
                slot = self.slot[wave, lane]
                self.old[wave, lane] = self.after[slot]
                operands_here = [int(operand[wave, lane]) for operand in self.data]
                self.after[slot] = apply(int(self.after[slot]), *operands_here)

    def _values(self, rng, name: str, shape) -> np.ndarray:
        integer = np.uint32 if self.bits == 32 else np.uint64
        if name.endswith(("f32", "f64")):
            values = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape)
            return values.astype(np.float32 if self.bits == 32 else np.float64).view(integer)
        if name.startswith("pk_add"):
            values = torch.from_numpy(rng.standard_normal((*shape, 2)) * 2.0 ** rng.integers(-4, 4, (*shape, 2)))
            halves = values.to(torch.bfloat16 if "bf16" in name else torch.float16).view(torch.int16).numpy()
            return np.ascontiguousarray(halves).view(np.uint32)[..., 0]
        if name.startswith(("inc", "dec", "wrap")):
            return rng.integers(0, 5, shape).astype(integer)
        return rng.integers(0, np.iinfo(integer).max, shape, integer, endpoint=True)

    def registers(self, first: int, step: int) -> dict[int, np.ndarray]:
        """VGPR contents of the operands: operand k begins at register first + k * step."""
        return {
            first + k * step + i: (operand.astype(np.uint64) >> np.uint64(32 * i)).astype(np.uint32)
            for k, operand in enumerate(self.data)
            for i in range(self.words)
        }

    def check_returned(self, batch, register: int, before: dict[int, object]) -> None:
        for i in range(self.words):
            old = (self.old >> np.uint64(32 * i)).astype(np.uint32)
            active = [bool(self.exec >> lane & 1) for lane in range(64)]
            np.testing.assert_array_equal(batch.vgpr[register + i], np.where(active, old, before[register + i]))

    def check_memory(self, raw: np.ndarray) -> None:
        np.testing.assert_array_equal(raw.view(self.after.dtype), self.after)


def run_lds(name: str, case: Case, returns: bool, order: str = "lockstep", accumulator: int = 0, observers=()):
    operation, kind = name.rsplit("_", 1)
    op = DSOp[f"DS_{operation}{'_rtn' if returns else ''}_{kind}".upper()]
    fields = {f"data{k}": vgprs(8 + 4 * k, case.words) for k in range(len(case.data))}
    if returns:
        fields["vdst"] = vgprs(20, case.words)
    base = 256 * accumulator
    vgpr = {2: case.slot * case.size, base + 20: OLD, base + 21: OLD, **case.registers(base + 8, 4)}
    batch = machine.run(
        [DS(op, addr=vgprs(2), offset0=16, acc=accumulator, **fields)],
        vgpr=vgpr,
        exec=case.exec,
        order=order,
        lds=np.concatenate([np.zeros(16, np.uint8), case.memory.view(np.uint8)]),
        observers=observers,
    )
    case.check_memory(batch.lds[0, 16 : 16 + case.memory.nbytes])
    if returns:
        case.check_returned(batch, base + 20, vgpr)
    else:
        assert (batch.vgpr[base + 20] == OLD).all()
    return batch


def run_vmem(family: str, name: str, case: Case, returns: bool, order: str = "lockstep", accumulator=0, observers=()):
    memory = aligned_buffer(case.memory)
    start = memory.ctypes.data
    data = vgprs(8, case.words * len(case.data))
    base, sc0 = 256 * accumulator, int(returns)
    vgpr = {base + 20: OLD, base + 21: OLD, **case.registers(base + 8, case.words)}
    sgpr, result = {}, base + 20
    if family == "BUFFER":
        op = MUBUFOp[f"BUFFER_ATOMIC_{name.upper()}"]
        instruction = MUBUF(
            op, vdata=data, vaddr=vgprs(2), srsrc=sgprs(8, 4), soffset=sgprs(12), offen=1, sc0=sc0, acc=accumulator
        )
        vgpr[2] = case.slot * case.size
        sgpr = {8: start & 0xFFFFFFFF, 9: start >> 32, 10: memory.nbytes, 11: 0x27000, 12: 0}
        result = base + 8
    else:
        address = start + case.slot * case.size
        vgpr |= {2: address & 0xFFFFFFFF, 3: address >> 32}
        fields = {"vdst": vgprs(20, case.words)} if returns else {}
        if family == "GLOBAL":
            op = GLOBALOp[f"GLOBAL_ATOMIC_{name.upper()}"]
            fields |= {"saddr": NO_SADDR, "addr": vgprs(2)}
        else:
            op = FLATOp[f"FLAT_ATOMIC_{name.upper()}"]
            fields |= {"addr": vgprs(2, 2)}
        instruction = {"GLOBAL": GLOBAL, "FLAT": FLAT}[family](op, data=data, sc0=sc0, acc=accumulator, **fields)
    batch = machine.run(
        [instruction],
        vgpr=vgpr,
        sgpr=sgpr,
        exec=case.exec,
        order=order,
        buffers=[memory],
        observers=observers,
    )
    case.check_memory(memory)
    if returns:
        case.check_returned(batch, result, vgpr)
    return batch


@pytest.mark.parametrize("distinct", [True, False], ids=["distinct", "shared"])
@pytest.mark.parametrize("returns", [False, True], ids=["", "rtn"])
@pytest.mark.parametrize("name", LDS_CASES)
def test_lds(name, returns, distinct):
    for seed, exec in enumerate((ALL_LANES, SOME_LANES)):
        run_lds(name, Case(name, *LDS_CASES[name], exec, seed, distinct), returns)


@pytest.mark.parametrize("distinct", [True, False], ids=["distinct", "shared"])
@pytest.mark.parametrize("name", LDS_RETURNING_ONLY)
def test_lds_that_always_return(name, distinct):
    run_lds(name, Case(name, *LDS_RETURNING_ONLY[name], SOME_LANES, 2, distinct), True)


@pytest.mark.parametrize(
    ("family", "name"),
    [(f, n) for f in ("GLOBAL", "FLAT", "BUFFER") for n in VMEM_CASES if (f, n) != ("BUFFER", "pk_add_bf16")],
)
def test_vmem(family, name):
    for seed, (exec, returns, distinct) in enumerate(
        [(ALL_LANES, True, False), (SOME_LANES, True, False), (SOME_LANES, True, True), (ALL_LANES, False, False)]
    ):
        run_vmem(family, name, Case(name, *VMEM_CASES[name], exec, seed, distinct), returns)


@SELECTIONS
@pytest.mark.parametrize("accumulator", [0, 1])
def test_wave_selections(exec, order, accumulator):
    case = Case("sub_u64", *LDS_CASES["sub_u64"], exec, 3, False)
    run_lds("sub_u64", case, True, order, accumulator)
    for family in ("GLOBAL", "FLAT", "BUFFER"):
        case = Case("cmpswap_x2", *VMEM_CASES["cmpswap_x2"], exec, 4, False)
        run_vmem(family, "cmpswap_x2", case, True, order, accumulator)


def test_two_groups_have_their_own_lds():
    batch = machine.run(
        [DS(DSOp.DS_ADD_RTN_U32, vdst=vgprs(9), addr=vgprs(2), data0=vgprs(8))],
        vgpr={2: 0, 8: 1},
        groups=3,
        lds=np.zeros(4096, np.uint8),
    )
    assert batch.lds.view(np.uint32)[:, 0].tolist() == [128] * 3
    np.testing.assert_array_equal(batch.vgpr[9], np.tile(np.arange(128).reshape(2, 64), (3, 1)))


def test_observers():
    notes = Notes()
    case = Case("add_u32", *LDS_CASES["add_u32"], SOME_LANES, 5, False)
    run_lds("add_u32", case, False, observers=[notes])
    what, address, active, size, kind = notes.seen[0]
    assert (what, size, kind) == ("lds", 4, "atomic")
    np.testing.assert_array_equal(address, case.slot * 4 + 16)
    np.testing.assert_array_equal(active, np.tile([bool(SOME_LANES >> i & 1) for i in range(64)], (2, 1)))
    notes = Notes()
    case = Case("add_x2", *VMEM_CASES["add_x2"], ALL_LANES, 6, False)
    run_vmem("GLOBAL", "add_x2", case, False, observers=[notes])
    assert [(note[0], *note[3:]) for note in notes.seen] == [("vmem", 8, "atomic")]


def global_add(address: int, exec: int = ALL_LANES, buffers=()):
    return machine.run(
        [GLOBAL(GLOBALOp.GLOBAL_ATOMIC_ADD, addr=vgprs(2), data=vgprs(8), saddr=NO_SADDR)],
        vgpr={2: address & 0xFFFFFFFF, 3: address >> 32, 8: 1},
        exec=exec,
        buffers=buffers,
    )


def test_out_of_range_and_misaligned():
    memory = aligned_buffer(random_words(7, 4))
    with pytest.raises(OutOfRange, match="4-byte atomic at .* 0 bytes past the end of buffer 0"):
        global_add(memory.ctypes.data + 16, buffers=[memory])
    with pytest.raises(SimulationError, match="multiple of 4"):
        global_add(memory.ctypes.data + 2, buffers=[memory])
    global_add(memory.ctypes.data + 16, exec=0, buffers=[memory])


def test_buffer_atomic_outside_of_the_records_returns_zero():
    memory = aligned_buffer(np.arange(8, dtype=np.uint32))
    start = memory.ctypes.data
    batch = machine.run(
        [
            MUBUF(
                MUBUFOp.BUFFER_ATOMIC_ADD,
                vdata=vgprs(8),
                vaddr=vgprs(2),
                srsrc=sgprs(8, 4),
                soffset=sgprs(12),
                offen=1,
                sc0=1,
            )
        ],
        vgpr={2: np.arange(64) * 4, 8: 100},
        sgpr={8: start & 0xFFFFFFFF, 9: start >> 32, 10: 16, 11: 0x27000, 12: 0},
        waves=1,
        buffers=[memory],
    )
    assert memory.view(np.uint32).tolist() == [100, 101, 102, 103, 4, 5, 6, 7]
    assert batch.vgpr[8, 0].tolist() == [0, 1, 2, 3] + [0] * 60


def test_gfx950_only_is_refused():
    with pytest.raises(UnknownInstruction, match="pk_add_bf16"):
        machine.run([MUBUF(MUBUFOp.BUFFER_ATOMIC_PK_ADD_BF16, vdata=vgprs(8), vaddr=vgprs(2), srsrc=sgprs(8, 4))])
