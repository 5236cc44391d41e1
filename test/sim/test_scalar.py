"""The scalar ALU against plain Python integers, one value per wave, for all waves and for a part of them."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import VCC, s
from tinygrad.renderer.amd.dsl import Reg as Register
from tinygrad.runtime.autogen.amd.cdna.enum import SOP1Op, SOP2Op, SOPCOp, SOPKOp, SOPPOp
from tinygrad.runtime.autogen.amd.cdna.ins import SOP1, SOP2, SOPC, SOPK, SOPP

import machine
from gfx942sim.errors import OutOfRange, UnknownInstruction
from gfx942sim.state import EXEC, words_to_lanes

GROUPS, WAVES = 8, 8
COUNT = GROUPS * WAVES
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
M0 = Register(124, 1)
EDGES = [0, 1, 2, 3, 31, 32, 0x7FFFFFFF, 0x80000000, 0x80000001, M32, M32 - 1, 0x00FF00FF, 0x8000, 0x7FFF, 0x80, 0xFFFF]


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def first(bits) -> int:
    """Index of the first true element, or -1."""
    return next((i for i, bit in enumerate(bits) if bit), -1)


def bits_of(value: int, width: int) -> list[int]:
    return [value >> i & 1 for i in range(width)]


def number(bits) -> int:
    return sum(bit << i for i, bit in enumerate(bits))


def run_length(value: int, width: int) -> int:
    top = bits_of(value, width)[::-1]
    return first(bit != top[0] for bit in top)


def field(value: int, where: int, width: int, is_signed: bool) -> int:
    offset, size = where & (width - 1), where >> 16 & 0x7F
    size = min(size, width)
    shifted = (signed(value, width) if is_signed else value) >> offset
    part = shifted & ((1 << size) - 1)
    return signed(part, size) if is_signed and size else part


# name -> function of the source that gives (result, SCC or None for unchanged)
def nonzero(result: int, mask: int) -> tuple[int, int]:
    return result, int(result & mask != 0)


UNARY = {
    "mov_b32": lambda a: (a, None),
    "mov_b64": lambda a: (a, None),
    "not_b32": lambda a: nonzero(~a, M32),
    "not_b64": lambda a: nonzero(~a, M64),
    "wqm_b32": lambda a: nonzero(number(int(a >> (i & 60) & 15 != 0) for i in range(32)), M32),
    "wqm_b64": lambda a: nonzero(number(int(a >> (i & 60) & 15 != 0) for i in range(64)), M64),
    "quadmask_b32": lambda a: nonzero(number(int(a >> 4 * i & 15 != 0) for i in range(8)), M32),
    "quadmask_b64": lambda a: nonzero(number(int(a >> 4 * i & 15 != 0) for i in range(16)), M64),
    "brev_b32": lambda a: (number(bits_of(a, 32)[::-1]), None),
    "brev_b64": lambda a: (number(bits_of(a, 64)[::-1]), None),
    "bcnt0_i32_b32": lambda a: nonzero(32 - a.bit_count(), M32),
    "bcnt0_i32_b64": lambda a: nonzero(64 - a.bit_count(), M32),
    "bcnt1_i32_b32": lambda a: nonzero(a.bit_count(), M32),
    "bcnt1_i32_b64": lambda a: nonzero(a.bit_count(), M32),
    "ff0_i32_b32": lambda a: (first(bit == 0 for bit in bits_of(a, 32)), None),
    "ff0_i32_b64": lambda a: (first(bit == 0 for bit in bits_of(a, 64)), None),
    "ff1_i32_b32": lambda a: (first(bits_of(a, 32)), None),
    "ff1_i32_b64": lambda a: (first(bits_of(a, 64)), None),
    "flbit_i32_b32": lambda a: (first(bits_of(a, 32)[::-1]), None),
    "flbit_i32_b64": lambda a: (first(bits_of(a, 64)[::-1]), None),
    "flbit_i32": lambda a: (run_length(a, 32), None),
    "flbit_i32_i64": lambda a: (run_length(a, 64), None),
    "sext_i32_i8": lambda a: (signed(a & 0xFF, 8), None),
    "sext_i32_i16": lambda a: (signed(a & 0xFFFF, 16), None),
    "abs_i32": lambda a: nonzero(abs(signed(a, 32)), M32),
    "bitreplicate_b64_b32": lambda a: (number(bit for bit in bits_of(a, 32) for _ in range(2)), None),
}


def overflows(value: int) -> int:
    return int(not -(1 << 31) <= value < 1 << 31)


def add_signed(a: int, b: int) -> tuple[int, int]:
    total = signed(a, 32) + signed(b, 32)
    return total, overflows(total)


def sub_signed(a: int, b: int) -> tuple[int, int]:
    total = signed(a, 32) - signed(b, 32)
    return total, overflows(total)


def choose(is_first: bool, a: int, b: int) -> tuple[int, int]:
    return (a if is_first else b), int(is_first)


LOGIC = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
    "andn1": lambda a, b: ~a & b,
    "orn1": lambda a, b: ~a | b,
}

# name -> function of both sources and SCC that gives (result, SCC or None)
BINARY = {
    "add_u32": lambda a, b, c: (a + b, a + b >> 32),
    "addc_u32": lambda a, b, c: (a + b + c, a + b + c >> 32),
    "sub_u32": lambda a, b, c: (a - b, int(b > a)),
    "subb_u32": lambda a, b, c: (a - b - c, int(b + c > a)),
    "add_i32": lambda a, b, c: add_signed(a, b),
    "sub_i32": lambda a, b, c: sub_signed(a, b),
    "min_i32": lambda a, b, c: choose(signed(a, 32) < signed(b, 32), a, b),
    "min_u32": lambda a, b, c: choose(a < b, a, b),
    "max_i32": lambda a, b, c: choose(signed(a, 32) >= signed(b, 32), a, b),
    "max_u32": lambda a, b, c: choose(a >= b, a, b),
    "cselect_b32": lambda a, b, c: (a if c else b, None),
    "cselect_b64": lambda a, b, c: (a if c else b, None),
    "lshl_b32": lambda a, b, c: nonzero(a << (b & 31), M32),
    "lshl_b64": lambda a, b, c: nonzero(a << (b & 63), M64),
    "lshr_b32": lambda a, b, c: nonzero(a >> (b & 31), M32),
    "lshr_b64": lambda a, b, c: nonzero(a >> (b & 63), M64),
    "ashr_i32": lambda a, b, c: nonzero(signed(a, 32) >> (b & 31), M32),
    "ashr_i64": lambda a, b, c: nonzero(signed(a, 64) >> (b & 63), M64),
    "bfm_b32": lambda a, b, c: (((1 << (a & 31)) - 1) << (b & 31), None),
    "bfm_b64": lambda a, b, c: (((1 << (a & 63)) - 1) << (b & 63), None),
    "mul_i32": lambda a, b, c: (a * b, None),
    "mul_hi_u32": lambda a, b, c: (a * b >> 32, None),
    "mul_hi_i32": lambda a, b, c: (signed(a, 32) * signed(b, 32) >> 32, None),
    "bfe_u32": lambda a, b, c: nonzero(field(a, b, 32, False), M32),
    "bfe_i32": lambda a, b, c: nonzero(field(a, b, 32, True), M32),
    "bfe_u64": lambda a, b, c: nonzero(field(a, b, 64, False), M64),
    "bfe_i64": lambda a, b, c: nonzero(field(a, b, 64, True), M64),
    "absdiff_i32": lambda a, b, c: nonzero(abs(signed((a - b) & M32, 32)), M32),
    "pack_ll_b32_b16": lambda a, b, c: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
    "pack_lh_b32_b16": lambda a, b, c: (a & 0xFFFF | (b >> 16) << 16, None),
    "pack_hh_b32_b16": lambda a, b, c: (a >> 16 | (b >> 16) << 16, None),
    **{f"lshl{n}_add_u32": lambda a, b, c, n=n: ((a << n) + b, int((a << n) + b > M32)) for n in (1, 2, 3, 4)},
    **{
        f"{name}_b{width}": lambda a, b, c, f=f, m=mask: nonzero(f(a, b), m)
        for name, f in LOGIC.items()
        if name not in ("andn1", "orn1")
        for width, mask in ((32, M32), (64, M64))
    },
}


def operands(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """64-bit a, 64-bit b and SCC per wave: random ones, and edge values in both words."""
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 1 << 64, COUNT, np.uint64)
    b = rng.integers(0, 1 << 64, COUNT, np.uint64)
    edge = np.array(EDGES, np.uint64)
    a[: len(EDGES)] = edge | edge[::-1] << np.uint64(32)
    b[: len(EDGES)] = np.roll(edge, seed % 7)
    a[16:20] = [0, M64, 1 << 63, (1 << 63) - 1]
    # Bit fields and shifts want small numbers too.
    b[20:40] = rng.integers(0, 64, 20).astype(np.uint64) | rng.integers(0, 80, 20).astype(np.uint64) << np.uint64(16)
    b[40:44] = a[40:44]
    return a, b, rng.integers(0, 2, COUNT).astype(np.uint32)


def words(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (value & np.uint64(M32)).astype(np.uint32), (value >> np.uint64(32)).astype(np.uint32)


def register(number_: int, count: int):
    return s[number_ : number_ + count - 1] if count > 1 else s[number_]


def run_on(instruction, a, b, scc, part: bool):
    """Run one instruction; with `part`, only for the waves whose SCC is 1."""
    skip = [SOPP(SOPPOp.S_CBRANCH_SCC0, simm16=instruction.size() // 4)] if part else []
    registers = dict(zip((4, 5, 6, 7, 8, 9), (*words(a), *words(b), 0x11111111, 0x22222222), strict=True))
    return machine.run([*skip, instruction], sgpr=registers, scc=scc, waves=WAVES, groups=GROUPS)


def check(batch, expected, scc, part, destination: int, width: int, before=0x2222222211111111) -> None:
    got = batch.sgpr[destination].astype(object)
    if width == 64:
        got = got + batch.sgpr[destination + 1].astype(object) * (1 << 32)
    for wave in range(COUNT):
        runs = not part or scc[wave]
        result, new_scc = expected(wave)
        assert got[wave] == (result if runs else before) & (M64 if width == 64 else M32), f"wave {wave}"
        assert batch.scc[wave] == (new_scc if runs and new_scc is not None else scc[wave]), f"SCC of wave {wave}"


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize("name", UNARY)
def test_one_source(name, part):
    a, b, scc = operands(len(name))
    op = SOP1Op[f"S_{name.upper()}"]
    sizes = SOP1(op).op_regs
    batch = run_on(SOP1(op, register(8, sizes["sdst"]), register(4, sizes["ssrc0"])), a, b, scc, part)
    wide = sizes["ssrc0"] == 2
    check(batch, lambda w: UNARY[name](int(a[w]) & (M64 if wide else M32)), scc, part, 8, 32 * sizes["sdst"])


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize("name", BINARY)
def test_two_sources(name, part):
    a, b, scc = operands(len(name))
    op = SOP2Op[f"S_{name.upper()}"]
    sizes = SOP2(op).op_regs
    instruction = SOP2(op, register(8, sizes["sdst"]), register(4, sizes["ssrc0"]), register(6, sizes["ssrc1"]))
    batch = run_on(instruction, a, b, scc, part)
    masks = [M64 if sizes[name] == 2 else M32 for name in ("ssrc0", "ssrc1")]

    def expected(wave):
        return BINARY[name](int(a[wave]) & masks[0], int(b[wave]) & masks[1], int(scc[wave]))

    check(batch, expected, scc, part, 8, 32 * sizes["sdst"])


def test_destination_may_be_a_source():
    a, b, scc = operands(3)
    batch = run_on(SOP2(SOP2Op.S_ADDC_U32, s[4], s[4], s[4]), a, b, scc, False)
    assert (batch.sgpr[4] == ((a & np.uint64(M32)) * np.uint64(2) + scc).astype(np.uint32)).all()
    batch = run_on(SOP2(SOP2Op.S_LSHL_B64, s[4:5], s[4:5], s[4]), a, b, scc, False)
    wanted = [int(x) << (int(x) & 63) & M64 for x in a]
    assert [int(low) | int(high) << 32 for low, high in zip(batch.sgpr[4], batch.sgpr[5], strict=True)] == wanted


@pytest.mark.parametrize(
    "instruction, wanted",
    [
        (SOP1(SOP1Op.S_MOV_B32, s[8], 0x89ABCDEF), 0x89ABCDEF),
        (SOP1(SOP1Op.S_MOV_B64, s[8:9], 0x89ABCDEF), 0x89ABCDEF),  # zero-extended
        (SOP1(SOP1Op.S_MOV_B64, s[8:9], -3), M64 - 2),
        (SOP1(SOP1Op.S_MOV_B64, s[8:9], 1.0), 0x3FF0000000000000),
        (SOP1(SOP1Op.S_MOV_B32, s[8], 1.0), 0x3F800000),
        (SOP2(SOP2Op.S_ASHR_I64, s[8:9], 0x89ABCDEF, 8), 0xFFFFFFFFFF89ABCD),  # sign-extended
        (SOP2(SOP2Op.S_LSHR_B64, s[8:9], 0x89ABCDEF, 8), 0x0089ABCD),
        (SOP2(SOP2Op.S_AND_B64, s[8:9], -1, 0x89ABCDEF), 0x89ABCDEF),
        (SOP2(SOP2Op.S_ADD_U32, s[8], 64, 0x7FFFFFFF), 0x8000003F),
        (SOP2(SOP2Op.S_BFE_I64, s[8:9], -16, 0x100002), M64 - 3),
    ],
)
def test_constants(instruction, wanted):
    batch = machine.run([instruction], sgpr={8: 0, 9: 0})
    assert int(batch.sgpr[8, 1]) | int(batch.sgpr[9, 1]) << 32 == wanted


COMPARE = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize(
    "relation, kind", [*((r, k) for r in COMPARE for k in ("i32", "u32")), ("eq", "u64"), ("lg", "u64")]
)
def test_compare(relation, kind, part):
    a, b, scc = operands(5)
    count, mask = (2, M64) if kind == "u64" else (1, M32)
    op = SOPCOp[f"S_CMP_{relation}_{kind}".upper()]
    batch = run_on(SOPC(op, register(4, count), register(6, count)), a, b, scc, part)
    pairs = [(int(x) & mask, int(y) & mask) for x, y in zip(a, b, strict=True)]
    if kind == "i32":
        pairs = [(signed(x, 32), signed(y, 32)) for x, y in pairs]
    wanted = [int(COMPARE[relation](x, y)) if c or not part else 0 for (x, y), c in zip(pairs, scc, strict=True)]
    assert batch.scc.tolist() == wanted


@pytest.mark.parametrize("relation", COMPARE)
@pytest.mark.parametrize("immediate", [0, 5, 0x7FFF, 0x8000, 0xFFFF])
def test_compare_with_constant(relation, immediate):
    a, b, scc = operands(9)
    a[:6] = [0, 5, 0x7FFF, 0x8000, 0xFFFF, 0xFFFF8000]
    low = [int(x) & M32 for x in a]
    batch = run_on(SOPK(SOPKOp[f"S_CMPK_{relation.upper()}_U32"], s[4], immediate), a, b, scc, False)
    assert batch.scc.tolist() == [int(COMPARE[relation](x, immediate)) for x in low]
    batch = run_on(SOPK(SOPKOp[f"S_CMPK_{relation.upper()}_I32"], s[4], immediate), a, b, scc, False)
    assert batch.scc.tolist() == [int(COMPARE[relation](signed(x, 32), signed(immediate, 16))) for x in low]


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("width", [32, 64])
def test_test_bit(width, wanted):
    a, b, scc = operands(2)
    op = SOPCOp[f"S_BITCMP{wanted}_B{width}"]
    batch = run_on(SOPC(op, register(4, width // 32), s[6]), a, b, scc, False)
    bits = [int(x) >> (int(y) & width - 1) & 1 for x, y in zip(a, b, strict=True)]
    assert batch.scc.tolist() == [int(bit == wanted) for bit in bits]


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("width", [32, 64])
def test_set_bit(width, value):
    a, b, scc = operands(4)
    op = SOP1Op[f"S_BITSET{value}_B{width}"]
    batch = run_on(SOP1(op, register(4, width // 32), s[6]), a, b, scc, False)
    for wave in range(COUNT):
        bit = 1 << (int(b[wave]) & width - 1)
        wanted = int(a[wave]) | bit if value else int(a[wave]) & ~bit
        got = int(batch.sgpr[4, wave]) | int(batch.sgpr[5, wave]) << 32
        assert got == (wanted if width == 64 else wanted & M32 | (int(a[wave]) >> 32) << 32)


@pytest.mark.parametrize("immediate", [0, 1, 0x7FFF, 0x8000, 0xFFFF])
def test_constant_and_destination(immediate):
    a, b, scc = operands(6)
    low, k = [int(x) & M32 for x in a], signed(immediate, 16)
    batch = run_on(SOPK(SOPKOp.S_MOVK_I32, s[4], immediate), a, b, scc, False)
    assert (batch.sgpr[4] == np.uint32(k & M32)).all()
    batch = run_on(SOPK(SOPKOp.S_CMOVK_I32, s[4], immediate), a, b, scc, False)
    assert batch.sgpr[4].tolist() == [k & M32 if c else x for x, c in zip(low, scc, strict=True)]
    batch = run_on(SOPK(SOPKOp.S_ADDK_I32, s[4], immediate), a, b, scc, False)
    assert batch.sgpr[4].tolist() == [x + k & M32 for x in low]
    assert batch.scc.tolist() == [overflows(signed(x, 32) + k) for x in low]
    batch = run_on(SOPK(SOPKOp.S_MULK_I32, s[4], immediate), a, b, scc, False)
    assert batch.sgpr[4].tolist() == [x * k & M32 for x in low]
    assert batch.scc.tolist() == scc.tolist()


@pytest.mark.parametrize("width", [32, 64])
def test_conditional_move(width):
    a, b, scc = operands(8)
    op = SOP1Op[f"S_CMOV_B{width}"]
    batch = run_on(SOP1(op, register(6, width // 32), register(4, width // 32)), a, b, scc, False)
    for i, (new, old) in enumerate(zip(words(a), words(b), strict=True)):
        moved = scc.astype(bool) & (i < width // 32)
        assert (batch.sgpr[6 + i] == np.where(moved, new, old)).all()
    assert (batch.scc == scc).all()


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize("name", [*(f"{name}_saveexec" for name in LOGIC), "andn1_wrexec", "andn2_wrexec"])
def test_exec_logic(name, part):
    a, b, scc = operands(11)
    before = 0x00FF00FF12345678
    function, kind = name.split("_")
    # Moves the value of EXEC last, so that the skipped waves keep theirs too.
    skip = [SOPP(SOPPOp.S_CBRANCH_SCC0, simm16=1)] if part else []
    code = [*skip, SOP1(SOP1Op[f"S_{name.upper()}_B64"], s[8:9], s[4:5])]
    low, high = words(a)
    batch = machine.run(code, sgpr={4: low, 5: high, 8: 1, 9: 2}, exec=before, scc=scc, waves=WAVES, groups=GROUPS)
    for wave in range(COUNT):
        if part and not scc[wave]:
            wanted, saved, new_scc = before, 2 << 32 | 1, 0
        else:
            wanted = LOGIC[function](int(a[wave]), before) & M64
            saved, new_scc = (before if kind == "saveexec" else wanted), int(wanted != 0)
        assert int(batch.sgpr[EXEC, wave]) | int(batch.sgpr[EXEC + 1, wave]) << 32 == wanted
        assert int(batch.sgpr[8, wave]) | int(batch.sgpr[9, wave]) << 32 == saved
        assert batch.scc[wave] == new_scc
    assert (batch.exec == words_to_lanes(batch.sgpr[EXEC], batch.sgpr[EXEC + 1])).all()


def test_vcc_is_a_register_pair():
    batch = machine.run([SOP1(SOP1Op.S_MOV_B64, VCC, s[4:5])], sgpr={4: 7, 5: 9})
    assert (batch.sgpr[106] == 7).all() and (batch.sgpr[107] == 9).all()


@pytest.mark.parametrize("width", [32, 64])
def test_relative_moves(width):
    count = width // 32
    values = {10 + i: [100 + i, 200 + i] for i in range(8)}
    code = [
        SOP1(SOP1Op.S_MOV_B32, M0, s[4]),
        SOP1(SOP1Op[f"S_MOVRELS_B{width}"], register(0, count), register(10, count)),
        SOP1(SOP1Op[f"S_MOVRELD_B{width}"], register(10, count), register(20, count)),
    ]
    batch = machine.run(code, sgpr={4: [2, 4], 20: [1, 2], 21: [3, 4], **values})
    for i in range(count):
        assert batch.sgpr[i].tolist() == [102 + i, 204 + i]
        assert batch.sgpr[12 + i, 0] == [1, 3][i] and batch.sgpr[14 + i, 1] == [2, 4][i]
    assert batch.sgpr[14, 0] == 104 and batch.sgpr[12, 1] == 202
    with pytest.raises(OutOfRange, match="M0 leads to"):
        machine.run(code, sgpr={4: [2, 98]})


@pytest.mark.parametrize("op", [SOP1Op.S_CBRANCH_JOIN, SOP1Op.S_RFE_B64, SOP1Op.S_SET_GPR_IDX_IDX])
def test_unknown(op):
    with pytest.raises(UnknownInstruction, match="not implemented"):
        machine.run([SOP1(op)])
