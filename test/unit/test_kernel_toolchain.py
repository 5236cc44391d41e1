"""Which FlyDSL may compile our kernels, and that its caches can tell our kernels apart."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_dflash_rocm.kernels.paged_attention import toolchain
from sglang_dflash_rocm.kernels.paged_attention.contract import PagedAttentionContract
from sglang_dflash_rocm.testing.gfx942 import HARDWARE
from sglang_dflash_rocm.testing.paged_cases import PagedCase

CONTRACT = PagedAttentionContract(q_heads=16, kv_heads=2, qk_dim=192, v_dim=128)


@pytest.mark.parametrize("version", ["0.3.1", "0.4.2", "0.5.0"])
def test_versions_that_were_checked(version):
    toolchain.check_flydsl(version)


@pytest.mark.parametrize("version", ["0.2.9", "0.6.0", "1.0"])
def test_other_versions_are_refused_with_the_fix(version):
    with pytest.raises(toolchain.UnsupportedFlyDSL, match=f"flydsl {version} is installed.*pip install"):
        toolchain.check_flydsl(version)


def test_the_installed_one_is_fine():
    toolchain.check_flydsl()


def test_every_field_of_a_contract_is_in_its_identity():
    other = dict(q_heads=32, kv_heads=1, qk_dim=128, v_dim=64, page_size=16, q_rows=2, window=5, sinks=True)
    other |= dict(causal=False, kv_dtype="fp8_fnuz", layout="vectorized_5d", split=True, sinks_dtype="bf16")
    assert set(other) == {field.name for field in dataclasses.fields(CONTRACT)}
    names = {toolchain.identity(dataclasses.replace(CONTRACT, **{key: value})) for key, value in other.items()}
    assert len(names | {toolchain.identity(CONTRACT)}) == len(other) + 1


def test_the_identity_is_a_scalar_in_the_closure_of_what_flydsl_compiles():
    from sglang_dflash_rocm.kernels.paged_attention import decode, reduce

    for module in (decode, reduce):
        function = module.build(dataclasses.replace(CONTRACT, split=True)).func
        kernel = next(
            c.cell_contents
            for c in function.__closure__
            if hasattr(c.cell_contents, "launch") or callable(c.cell_contents)
        )
        cells = [c.cell_contents for c in _innermost(kernel).__closure__]
        assert any(isinstance(cell, str) and "split=True" in cell for cell in cells), module


def _innermost(kernel):
    for name in ("_func", "func", "__wrapped__"):
        if hasattr(kernel, name):
            return _innermost(getattr(kernel, name))
    return kernel


@pytest.mark.skipif(HARDWARE, reason="looks at the code objects")
def test_two_contracts_are_two_code_objects():
    sizes = set()
    for rows in (1, 4):
        (launch,) = PagedCase(dataclasses.replace(CONTRACT, q_rows=rows), [20]).check()
        sizes.add(launch.resources.code)
    assert len(sizes) == 2
