"""Counting by hand what CostCounter counts, and by hand what CostReport makes of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from tinygrad.renderer.amd.dsl import s, v
from tinygrad.runtime.autogen.amd.cdna import ins

from gfx942sim.buffers import BufferRegistry
from gfx942sim.code_object import Resources
from gfx942sim.cost import UNREGISTERED, CostCounter
from gfx942sim.cost_model import MI300X, instruction_class, lds_clocks, mfma_clocks, valu_clocks, workgroups_per_cu
from gfx942sim.cost_report import BadCostReport, CostReport
from gfx942sim.decode import decode

LANES = np.arange(64)
ALL = np.ones((1, 64), bool)
RESOURCES = Resources(
    vgpr=128, agpr=0, sgpr=16, vgpr_spills=0, sgpr_spills=0, scratch=0, lds=0, kernarg=16, code=256
)  # fmt: skip


def one(raw) -> object:
    return decode(raw.to_bytes() + bytes(24), 0)


LOAD = one(ins.global_load_dword(vdst=v[0], addr=v[2], saddr=s[0:1]))
SCRATCH = one(ins.scratch_load_dword(vdst=v[0], addr=v[2], saddr=s[0]))
DS = one(ins.ds_read_b32(vdst=v[0], addr=v[1]))


def report_of(counter=None, program=(), ran=1, total=1, threads=64, resources=RESOURCES, dynamic_lds=0) -> CostReport:
    """The report after executing `program`: pairs (instruction, wave-instructions)."""
    steps = {i: SimpleNamespace(instruction=one(raw)) for i, (raw, _) in enumerate(program)}
    fake = SimpleNamespace(kernel="k", steps=steps)
    counts = {i: count for i, (_, count) in enumerate(program)}
    return (counter or CostCounter()).report(fake, counts, resources, threads, dynamic_lds, ran, total)


@pytest.mark.parametrize(
    "what, address, size, clocks",
    [
        ("one dword after the other", 4 * LANES, 4, 2),
        ("stride of 2 dwords", 8 * LANES, 4, 4),
        ("stride of 4 dwords", 16 * LANES, 4, 8),
        ("stride of 3 dwords", 12 * LANES, 4, 2),
        ("stride of 32 dwords: all in one bank", 128 * LANES, 4, 64),
        ("stride of 33 dwords: padded", 132 * LANES, 4, 2),
        ("all lanes the same dword", 0 * LANES + 256, 4, 2),
        ("two dwords of one bank", LANES % 2 * 128, 4, 4),
        ("bytes of the same dwords", LANES, 1, 2),
        ("halves of the same dwords", 2 * LANES, 2, 2),
        ("8 bytes in a row", 8 * LANES, 8, 4),
        ("8 bytes, stride of 128", 128 * LANES, 8, 64),
        ("16 bytes in a row", 16 * LANES, 16, 8),
        ("16 bytes, stride of 32: each second slot", 32 * LANES, 16, 16),
        ("16 bytes, stride of 128", 128 * LANES, 16, 64),
        ("12 bytes in a row", 12 * LANES, 12, 8),
    ],
)
def test_lds_clocks_of_access_patterns(what, address, size, clocks):
    assert lds_clocks(address[None], ALL, size) == clocks
    assert lds_clocks(np.stack([address, address + 4096]), np.ones((2, 64), bool), size) == 2 * clocks


def test_lds_clocks_of_inactive_lanes_and_atomics():
    off = np.zeros((1, 64), bool)
    worst = (128 * LANES)[None]
    assert lds_clocks(worst, off, 4) == 2
    some = off.copy()
    some[0, :8] = True
    assert lds_clocks(worst, some, 4) == 8 + 1
    same = np.zeros((1, 64), np.int64)
    assert lds_clocks(same, ALL, 4, atomic=True) == 64
    assert lds_clocks((4 * LANES)[None], ALL, 4, atomic=True) == 2


def test_lds_figures():
    counter = CostCounter()
    counter.lds(None, None, DS, (128 * LANES)[None], ALL, 4, "read")
    half = ALL & (LANES < 32)
    counter.lds(None, None, DS, (16 * LANES)[None], half, 16, "write")
    counter.lds(None, None, DS, (4 * LANES)[None], half, 4, "atomic")
    swizzle = ins.ds_swizzle_b32(vdst=v[0], addr=v[1])
    report = report_of(counter, [(ins.ds_read_b32(vdst=v[0], addr=v[1]), 1), (swizzle, 3)])
    assert report.count("lds") == 4
    assert report.count("lds_read_bytes") == 256 + 128
    assert report.count("lds_written_bytes") == 512 + 128
    assert report.count("lds_clocks") == 64 + 8 + 2 + 3 * 2
    assert report.count("lds_clocks_without_conflicts") == 2 + 8 + 2 + 3 * 2
    assert report.count("lds_crossbar") == 3


def batch_with(**ranges) -> SimpleNamespace:
    registry = BufferRegistry()
    for label, (start, size) in ranges.items():
        registry.add_range(start, size, label)
    return SimpleNamespace(registry=registry)


def test_bytes_and_cache_lines():
    batch, counter = batch_with(x=(0x10000, 8192), y=(0x20000, 4096)), CostCounter()
    row = (0x10000 + 4 * LANES)[None]
    for _ in range(3):  # 256 bytes in a row: two lines, each time the same
        counter.vmem(batch, slice(None), LOAD, row, ALL, 4, "read")
    counter.vmem(batch, slice(None), LOAD, row[:, ::-1], ALL, 4, "read")
    counter.vmem(batch, slice(None), LOAD, (0x10000 + 128 * LANES)[None], ALL & (LANES < 10), 4, "read")
    counter.vmem(batch, slice(None), LOAD, (0x20000 + 16 * LANES)[None], ALL, 16, "write")
    counter.vmem(batch, slice(None), LOAD, 0 * row, ALL & False, 4, "read")
    report = report_of(counter)
    assert report.count("vmem_accesses") == 7
    assert report.count("vmem_read_bytes") == 4 * 256 + 40
    assert report.count("vmem_written_bytes") == 1024
    assert report.count("vmem_read_lines") == 4 * 2 + 10
    assert report.count("vmem_written_lines") == 8
    assert report.count("hbm_read_lines") == 10
    assert report.count("hbm_written_lines") == 8
    assert report.buffers == {
        "x": {"read_bytes": 4 * 256 + 40, "read_lines": 10},
        "y": {"written_bytes": 1024, "written_lines": 8},
    }
    assert report.hbm_bytes() == 18 * 128


def test_lines_of_scattered_and_straddling_accesses():
    rng = np.random.default_rng(0)
    batch, counter = batch_with(x=(0, 1 << 20)), CostCounter()
    address = rng.integers(0, 1 << 14, (5, 64)) * 4 + 2  # some 4-byte accesses cross a line
    active = rng.random((5, 64)) < 0.7
    counter.vmem(batch, slice(None), LOAD, address, active, 4, "read")
    per_wave, launch = 0, set()
    for wave in range(5):
        lines = {(a + byte) // 128 for a in address[wave][active[wave]].tolist() for byte in (0, 3)}
        per_wave += len(lines)
        launch |= lines
    report = report_of(counter)
    assert (report.count("vmem_read_lines"), report.count("hbm_read_lines")) == (per_wave, len(launch))
    assert report.buffers["x"]["read_lines"] == len(launch)


def test_accesses_of_one_instruction_to_several_buffers():
    """A line that two buffers share counts for both, once for the launch; of overlapping ones the later start wins."""
    batch = batch_with(whole=(0x1000, 1024), view=(0x1000 + 192, 64), other=(0x9000, 64))
    counter = CostCounter()
    address = np.full((1, 64), 0x1000)
    address[0, 1:4] = 0x1000 + 192, 0x1000 + 256, 0x9000
    address[0, 4] = 0x5000
    counter.vmem(batch, slice(None), LOAD, address, ALL & (LANES < 5), 4, "read")
    counter.vmem(batch, slice(None), LOAD, (0x1000 + 128 + 4 * LANES)[None], ALL & (LANES < 32), 4, "read")
    report = report_of(counter)
    assert {label: b["read_bytes"] for label, b in report.buffers.items()} == {
        "whole": 4 * 2 + 16 * 4,
        "view": 4 + 16 * 4,
        "other": 4,
        UNREGISTERED: 4,
    }
    assert report.buffers["whole"]["read_lines"] == 3
    assert report.count("hbm_read_lines") == 5  # 0x1000, 0x1080 (two labels), 0x1100, 0x9000, 0x5000


def test_atomics_and_scratch():
    batch, counter = batch_with(x=(0, 4096)), CostCounter()
    counter.vmem(batch, slice(None), LOAD, (0 * LANES)[None], ALL, 4, "atomic")
    counter.vmem(batch, slice(None), SCRATCH, (4 * LANES)[None], ALL, 4, "read")
    counter.vmem(batch, slice(None), SCRATCH, (4 * LANES)[None], ALL & (LANES == 0), 16, "write")
    report = report_of(counter)
    assert (report.count("vmem_atomics"), report.count("vmem_atomic_bytes")) == (1, 256)
    assert (report.count("hbm_read_lines"), report.count("hbm_written_lines")) == (1, 1)
    assert (report.count("scratch_read_bytes"), report.count("scratch_written_bytes")) == (256, 16)
    assert report.buffers == {"x": {"atomic_bytes": 256, "read_lines": 1, "written_lines": 1}}


MIX = [
    (ins.v_mfma_f32_16x16x16_bf16(v[4:7], v[0:1], v[2:3], v[4:7]), 10),
    (ins.v_mfma_f32_32x32x8_bf16(v[4:19], v[0:1], v[2:3], v[4:19]), 4),
    (ins.v_add_f32_e32(v[0], v[1], v[2]), 100),
    (ins.v_exp_f32_e32(v[0], v[1]), 7),
    (ins.v_mul_lo_u32(v[0], v[1], v[2]), 3),
    (ins.v_fma_f64_e64(v[0:1], v[2:3], v[4:5], v[6:7]), 2),
    (ins.s_add_u32(s[0], s[1], s[2]), 20),
    (ins.s_load_dword(sdata=s[0], sbase=s[2:3]), 5),
    (ins.s_waitcnt(simm16=0), 9),
    (ins.s_barrier(), 6),
    (ins.s_cbranch_scc0(simm16=0), 8),
    (ins.s_endpgm(), 4),
]


def test_instruction_classes_and_clocks():
    report = report_of(program=MIX)
    expected = {"mfma": 14, "valu": 112, "salu": 20, "smem": 5, "wait": 9, "barrier": 6, "control": 12}
    assert {name: report.count(name) for name in expected} == expected
    assert report.count("instructions") == sum(expected.values())
    assert report.count("mfma_clocks") == 10 * 16 + 4 * 32
    assert report.count("valu_clocks") == 102 * 4 + 10 * 16
    assert report.count("valu_quarter_rate") == 10
    assert report.mnemonics["v_add_f32"] == 100


def test_classes_of_memory_instructions():
    assert [instruction_class(i) for i in (LOAD, SCRATCH, DS)] == ["vmem", "scratch", "lds"]
    buffer = one(ins.buffer_load_dword(vdata=v[0], vaddr=v[1], srsrc=s[0:3], soffset=s[4]))
    assert instruction_class(buffer) == "vmem"


@pytest.mark.parametrize(
    "name, clocks",
    [
        ("v_mfma_f32_16x16x32_fp8_bf8", 16),
        ("v_mfma_f32_32x32x16_fp8_fp8", 32),
        ("v_mfma_f32_4x4x1_16b_f32", 8),
        ("v_mfma_f32_16x16x4_f32", 32),
        ("v_mfma_f32_32x32x2_f32", 64),
        ("v_mfma_f64_16x16x4_f64", 32),
        ("v_smfmac_f32_16x16x32_bf16", 16),
    ],
)
def test_mfma_clocks(name, clocks):
    assert mfma_clocks(name) == clocks


def test_peak_rates_of_the_data_sheet():
    """Dense peaks of an MI300X in TFLOP/s follow from shapes and clocks."""
    from gfx942sim.mfma_shapes import matrix_instruction

    machine = MI300X()
    peaks = {
        "v_mfma_f32_32x32x8_bf16": 1307.4,
        "v_mfma_f32_16x16x16_f16": 1307.4,
        "v_mfma_f32_16x16x32_fp8_fp8": 2614.9,
        "v_mfma_i32_32x32x16_i8": 2614.9,
        "v_mfma_f32_16x16x8_xf32": 653.7,
        "v_mfma_f32_32x32x2_f32": 163.4,
        "v_mfma_f64_16x16x4_f64": 163.4,
    }
    for name, peak in peaks.items():
        shape = matrix_instruction(name)
        rate = 2 * shape.multiplications / shape.clocks * machine.compute_units * machine.simds_per_cu * machine.clock
        assert rate / 1e12 == pytest.approx(peak, rel=2e-3), name


@pytest.mark.parametrize("name, clocks", [("v_add_f32", 4), ("v_rcp_f64", 16), ("v_mad_u64_u32", 16), ("v_add_f64", 4)])
def test_valu_clocks(name, clocks):
    assert valu_clocks(name) == clocks


def test_scaling_to_waves_and_grid():
    report = report_of(program=MIX, ran=2, total=100, threads=256)
    assert report.waves_per_workgroup == 4
    assert report.per_workgroup("valu") == 56
    assert report.per_wave("valu") == 14
    assert report.grid("valu") == 5600


def test_bounds():
    """Two waves per work-group, 608 work-groups: two per CU, so each SIMD gets one wave."""
    program = [(ins.v_add_f32_e32(v[0], v[1], v[2]), 2 * 2100), (MIX[0][0], 2 * 2100)]
    counter = CostCounter()
    address = (128 * LANES)[None]
    counter.vmem(batch_with(x=(0, 1 << 20)), slice(None), LOAD, address, ALL, 4, "read")
    for _ in range(2):
        counter.lds(None, None, DS, address, ALL, 4, "read")
    bounds = report_of(counter, program, ran=1, total=608, threads=128).bounds()
    assert bounds.valu == pytest.approx(2100 * 4 / 2.1e9 * 1e6)
    assert bounds.mfma == pytest.approx(16.0)
    assert bounds.lds == pytest.approx(2 * 128 / 2100)
    assert bounds.hbm == pytest.approx(608 * 64 * 128 / 5.3e12 * 1e6)
    assert (bounds.largest, bounds.bound) == ("mfma", bounds.mfma)
    assert bounds.quantised == pytest.approx(bounds.mfma)
    assert bounds.rounds == 1


def test_whole_workgroups_on_the_busiest_cu():
    """305 work-groups of four waves: one CU gets two, which take twice as long as one."""
    program = [(MIX[0][0], 4 * 2100)]
    bounds = report_of(program=program, total=305, threads=256).bounds()
    assert bounds.mfma == pytest.approx(16 * 305 / 304)
    assert bounds.quantised == pytest.approx(32)
    # 128 VGPRs: 4 waves per SIMD, so 4 work-groups per CU.
    assert report_of(program=program, total=304 * 4, threads=256).bounds().rounds == 1
    assert report_of(program=program, total=304 * 4 + 1, threads=256).bounds().rounds == 2


@pytest.mark.parametrize(
    "vgpr, threads, lds, groups",
    [(128, 256, 0, 4), (264, 256, 0, 1), (8, 64, 0, 32), (128, 64, 20000, 3), (32, 1024, 65536, 1), (512, 1024, 0, 1)],
)
def test_workgroups_per_cu(vgpr, threads, lds, groups):
    resources = Resources(vgpr, 0, 16, 0, 0, 0, 0, 16, 256)
    assert workgroups_per_cu(resources, threads, lds) == groups


def test_round_trip_and_text(tmp_path):
    counter = CostCounter()
    counter.vmem(batch_with(kv=(0, 1 << 20)), slice(None), LOAD, (128 * LANES)[None], ALL, 4, "read")
    counter.barrier(None, np.arange(3))
    report = report_of(counter, MIX, ran=2, total=10)
    report.save(tmp_path / "a.json")
    assert CostReport.load(tmp_path / "a.json") == report
    assert report.count("barrier_releases") == 3
    text = str(report)
    assert "2 of 10 work-groups" in text and "not a timing" in text
    assert "kv (grid): read_bytes 1,280, read_lines 320" in text


def test_an_empty_launch_has_a_report():
    text = str(report_of(ran=0, total=1))
    assert "bound 0.00" in text


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": "other"}, "format"),
        ({"kernel": 3}, "kernel is not of type str"),
        ({"counted": {"valu": "many"}}, "not an integer"),
        ({"buffers": {"x": 3}}, "not an integer"),
        ({"waves_per_workgroup": 0}, "at least 1"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_damaged_reports_are_refused(change, message):
    data = json.loads(report_of(program=MIX).to_json()) | change
    with pytest.raises(BadCostReport, match=message):
        CostReport.from_json(json.dumps(data))
    del data["counted"]
    with pytest.raises(BadCostReport):
        CostReport.from_json(json.dumps(data))
