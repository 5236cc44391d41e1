"""Runs a few hand-written instructions on a batch of two waves: the bench that the instruction tests stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tinygrad.renderer.amd.dsl import Inst
from tinygrad.runtime.autogen.amd.cdna.enum import SOPPOp
from tinygrad.runtime.autogen.amd.cdna.ins import SOPP

from gfx942sim.buffers import BufferRegistry
from gfx942sim.code_object import Descriptor
from gfx942sim.scheduler import Scheduler
from gfx942sim.state import EXEC, M0, VCC, Batch, words_to_lanes
from gfx942sim.translate import Program

# rsrc1 as HIP and Triton set it: denormals of all widths are kept.
KEEP_DENORMALS = 0xF << 16


def run(
    instructions: Sequence[Inst],
    *,
    vgpr: Mapping[int, object] | None = None,
    sgpr: Mapping[int, object] | None = None,
    exec: int = (1 << 64) - 1,
    vcc: int = 0,
    scc: int = 0,
    m0: int = 0,
    waves: int = 2,
    groups: int = 1,
    lds_bytes: int = 4096,
    lds: np.ndarray | None = None,
    scratch: int = 0,
    buffers: Sequence[object] = (),
    observers: Sequence[object] = (),
    order: str = "lockstep",
    seed: int = 0,
    rsrc1: int = KEEP_DENORMALS,
    register_check=None,
) -> Batch:
    """Encode `instructions`, append s_endpgm, run, and return the batch afterwards.

    vgpr: register number (AGPR n is 256 + n) -> uint32 values, broadcast to [waves, 64]. sgpr: number -> uint32 values,
    broadcast to [waves]. lds: uint8 [lds_bytes], the initial content for every work-group. buffers: arrays that may be
    accessed. waves is per work-group.
    """
    code = b"".join(i.to_bytes() for i in [*instructions, SOPP(SOPPOp.S_ENDPGM, simm16=0)]) + bytes(64)
    descriptor = Descriptor(
        entry=0,
        lds=lds_bytes,
        scratch=scratch,
        kernarg=0,
        rsrc1=rsrc1,
        rsrc2=0,
        rsrc3=0,
        properties=0,
        preload_dwords=0,
        preload_offset=0,
    )
    registry = BufferRegistry()
    for i, value in enumerate(buffers):
        registry.add(value, f"buffer {i}")
    batch = Batch(
        descriptor,
        image_base=0,
        agprs=True,
        workgroups=[(g, 0, 0) for g in range(groups)],
        block=(64 * waves, 1, 1),
        lds_bytes=lds_bytes,
        kernarg=b"",
        kernarg_address=0,
        registry=registry,
        observers=observers,
    )
    for register, values in (vgpr or {}).items():
        batch.vgpr[register] = np.broadcast_to(np.asarray(values).astype(np.uint32), (batch.waves, 64))
    for register, values in (sgpr or {}).items():
        batch.sgpr[register] = np.asarray(values).astype(np.uint32)
    for register, value in ((VCC, vcc), (EXEC, exec)):
        batch.sgpr[register], batch.sgpr[register + 1] = value & 0xFFFFFFFF, value >> 32
    batch.sgpr[M0] = m0
    batch.scc[:] = scc
    batch.exec = words_to_lanes(batch.sgpr[EXEC], batch.sgpr[EXEC + 1])
    if lds is not None:
        batch.lds[:, : len(lds)] = lds
    Scheduler(Program(code, "bench", descriptor), batch, order, seed, {}, 10_000_000, register_check).run()
    return batch
