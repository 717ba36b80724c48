"""Kernels wait before they touch memory: the readers of PTX and machine code on small programs; the CUDA extension."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_order import Launch, faults, faults_alone
from ptx_order import ptx_order
from sass_code import disassembled, read_code
from sass_order import BEGIN_CALLS, READ_INPUTS_EARLY, faults_of

import torch_moe_ops

LIBRARY = Path(torch_moe_ops.__file__).parent / "_C_cuda.abi3.so"
WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"


def ptx(*body: str) -> str:
    """A kernel of three pointers, which %rd1 to %rd3 hold, and a number in %r1."""
    lines = "\n\t".join(body)
    return f"""
.version 8.7
.target sm_90a
	// .globl	some_kernel
.visible .entry some_kernel(
	.param .u64 .ptr .global .align 1 some_kernel_param_0,
	.param .u64 .ptr .global .align 1 some_kernel_param_1,
	.param .u64 .ptr .global .align 1 some_kernel_param_2,
	.param .u32 some_kernel_param_3
)
.reqntid 128
{{
	.reg .pred 	%p<13>;
	.loc	1 21 0                          // some.py:21:0
$L__func_begin0:
	ld.param.b64 	%rd1, [some_kernel_param_0];
	ld.param.b64 	%rd2, [some_kernel_param_1];
	ld.param.b64 	%rd3, [some_kernel_param_2];
	ld.param.b32 	%r1, [some_kernel_param_3];
	{lines}
	ret;
$L__func_end0:
}}
	.section	.debug_abbrev
	{{
.b8 1
	}}
"""


def early(*body: str) -> list[tuple[str, set[int]]]:
    """(kind, parameters) of what touches memory, or ends, before the wait."""
    return [
        (step.kind, set(step.pointers))
        for step in ptx_order(ptx(*body)).of("load", "store", "prefetch", "trigger", "end")
    ]


def test_nothing_is_found_behind_a_wait() -> None:
    assert early(WAIT, "ld.global.b32 %r2, [%rd1];", "st.global.b32 [%rd2], %r2;") == []


@pytest.mark.parametrize(
    ("load", "parameter"),
    [
        ("ld.global.b32 %r2, [%rd1];", 0),
        ("ld.global.v2.b32 {%r2, %r3}, [ %rd2 + 16 ];", 1),
        ("mad.wide.s32 %rd4, %r1, 4, %rd3; ld.global.cg.b32 { %r2 }, [ %rd4 + 0 ];", 2),
        ("cvta.to.global.u64 %rd4, %rd2; add.s64 %rd5, %rd4, 512; @%p1 ld.global.nc.b32 %r2, [%rd5];", 1),
        ("mov.b64 {%r4, %r5}, %rd3; mov.b64 %rd6, {%r4, %r5}; ld.b32 %r2, [%rd6];", 2),
        ("{ .reg .b32 low; cp.async.ca.shared.global [%r7], [%rd2], 4; }", 1),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%rd1], 64, [%r8];", 0),
        ("cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%rd2, {%r1}], [%r8];", 1),
        ("ld.global.b64 %rd9, [%rd1]; ld.global.b32 %r2, [%rd9];", -1),
        ("selp.b64 %rd9, %rd1, %rd2, %p1; ld.global.b32 %r2, [%rd9];", None),
    ],
)
def test_early_loads_and_where_their_addresses_come_from(load: str, parameter: int | None) -> None:
    kind, parameters = early(load, WAIT)[-1]
    assert kind == "load"
    assert parameters == ({0, 1} if parameter is None else {parameter})


@pytest.mark.parametrize(
    "store",
    [
        "st.global.b32 [%rd1], %r1;",
        "atom.global.add.u32 %r2, [%rd1], 1;",
        "red.release.gpu.global.add.s32 [%rd1], 1;",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r7], 64;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r7], 64;",
    ],
)
def test_early_stores(store: str) -> None:
    assert early(store, WAIT) == [("store", {0})]


@pytest.mark.parametrize(
    "harmless",
    [
        "ld.shared.b32 %r2, [%r7];",
        "st.shared::cta.b32 [%r7], %r2;",
        "atom.shared.add.u32 %r2, [%r7], 1;",
        "redux.sync.add.s32 %r2, %r3, -1;",
        "cp.async.wait_group 0;",
        "mbarrier.init.shared.b64 [%r7], 1;",
    ],
)
def test_what_is_not_global_memory(harmless: str) -> None:
    assert early(harmless, WAIT) == []


def test_a_prefetch_is_told_from_a_load() -> None:
    assert early("cp.async.bulk.prefetch.L2.global [%rd3], %r4; mov.b32 %r5, 0;", WAIT) == [("prefetch", {2})]
    assert not faults_alone(ptx_order(ptx("prefetch.global.L2 [%rd3];", WAIT)))


def test_a_trigger_without_a_wait() -> None:
    order = ptx_order(ptx(TRIGGER))
    assert faults_alone(order) == ["ends without having waited: ret"]


def test_every_path_has_to_wait() -> None:
    around = ["@%p1 bra $L__BB0_1;", WAIT, "$L__BB0_1:", "ld.global.b32 %r2, [%rd1];"]
    assert early(*around) == [("load", {0}), ("end", {-1})]
    assert early("@%p1 ret;", WAIT) == [("end", {-1})]
    assert early("@%p1 griddepcontrol.wait;") == [("end", {-1})]
    assert early("bra.uni $L__BB0_2;", "$L__BB0_1:", "ld.global.b32 %r2, [%rd1];", "$L__BB0_2:", WAIT) == []
    twice = ["{ again: @!%p1 bra.uni again; }", "{ again: @%p2 bra again; }"]  # each its own label
    assert early(*twice, WAIT) == []
    table = ["brx.idx %r1, $L_table;", "$L_table: .branchtargets $L_a, $L_b;", "$L_a:", WAIT, "bra.uni $L_c;", "$L_b:"]
    assert early(*table, "ld.global.b32 %r2, [%rd3];", WAIT, "$L_c:") == [("load", {2})]


def launch(name: str, memory: str, *body: str) -> Launch:
    """memory: a letter for what each parameter points to."""
    return Launch(name, ptx_order(ptx(*body)), memory)


def test_what_may_be_read_early_depends_on_the_kernel_in_front() -> None:
    load = "ld.global.cg.b32 %r2, [%rd1];"
    makes_b = launch("front", "xyb", WAIT, TRIGGER, "st.global.b32 [%rd3], %r1;")
    reads_a, reads_b = launch("behind", "ayz", load, WAIT), launch("behind", "byz", load, WAIT)
    assert not faults([makes_b, reads_a])
    assert any("which front writes" in fault for fault in faults([makes_b, reads_b]))
    assert not faults([makes_b, launch("between", "xyz", WAIT, TRIGGER), reads_b])
    assert any("any kernel may just be writing" in fault for fault in faults([reads_a]))
    hasty = launch("hasty", "xyz", TRIGGER, WAIT)
    assert any("hasty lets it begin before it has waited" in fault for fault in faults([hasty, reads_a]))
    wild = launch("wild", "xyz", WAIT, "ld.global.b64 %rd9, [%rd1];", "st.global.b32 [%rd9], %r1;")
    assert any("which wild writes" in fault for fault in faults([wild, reads_a]))
    cached = launch("behind", "ayz", "ld.global.b32 %r2, [%rd1];", WAIT)
    assert any("stale" in fault for fault in faults([makes_b, cached]))


_MANGLED = "_ZN4moeq4sm9011some_kernelEvNS0_4ArgsE"
_SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   SYNCS.EXCH.64 URZ, [UR4], UR6 ;
        /*0020*/                   {first} ;
        /*0030*/                   ACQBULK ;
        /*0040*/                   LDG.E R44, desc[UR18][R44.64] ;
.L_x_0:
        /*0050*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("first", "text"),
    [
        ("PREEXIT", ""),
        ("CCTL.E.PF2 [R2.64]", ""),
        ("LDS R2, [R3]", ""),
        ("@P0 BRA `(.L_x_0)", "ends without having waited"),
        ("BRA.DIV UR4, `(.L_x_0)", "ends without having waited"),
        ("@P0 EXIT", "ends without having waited"),
        ("@!P2 LDG.E R44, desc[UR18][R44.64]", "reads before it waits"),
        ("LDGSTS.E [R5], desc[UR18][R44.64]", "reads before it waits"),
        ("UTMALDG.5D [UR8], [UR4]", "reads before it waits"),
        ("UBLKCP.S.G [UR8], [UR10], UR4", "reads before it waits"),
        ("STG.E desc[UR18][R2.64], R3", "writes before it waits"),
        ("REDG.E.ADD.STRONG.GPU desc[UR18][R2.64], R3", "writes before it waits"),
    ],
)
def test_machine_code(first: str, text: str) -> None:
    found = faults_of(_MANGLED, _SASS.format(first=first))
    assert [fault.partition(":")[0] for fault in found] == ([text] if text else [])


def test_inputs_of_a_call_are_read_early_past_the_l1() -> None:
    past, through = "LDG.E.128.STRONG.GPU R44, desc[UR18][R44.64]", "LDG.E.128 R44, desc[UR18][R44.64]"
    for kernel in READ_INPUTS_EARLY:
        name = _MANGLED.replace("11some_kernel", f"{len(kernel)}{kernel}")
        assert not faults_of(name, _SASS.format(first=past))
        assert faults_of(name, _SASS.format(first=through)) == [f"reads before it waits: {through}"]
        assert faults_of(name, _SASS.format(first="STG.E desc[UR18][R2.64], R3"))
        assert faults_of(name, _SASS.format(first="@P0 EXIT"))
    assert faults_of(_MANGLED, _SASS.format(first=past)) == [f"reads before it waits: {past}"]


def test_the_first_launch_of_a_call_triggers_after_its_wait() -> None:
    for kernel in BEGIN_CALLS:
        name = _MANGLED.replace("11some_kernel", f"{len(kernel)}{kernel}")
        assert faults_of(name, _SASS.format(first="PREEXIT")) == ["lets others begin before it waits: PREEXIT"]
        behind = _SASS.format(first="NOP").replace(
            "ACQBULK ;", "ACQBULK ;\n        /*0038*/                   PREEXIT ;"
        )
        assert "PREEXIT" in [step.name for step in read_code(behind)[0]] and not faults_of(name, behind)


def test_a_call_of_arithmetic_returns_to_where_it_was() -> None:
    """Not to a call behind the wait: then loads there would be early ones."""
    division = "$__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath"
    sass = f"""
        /*0000*/                   CALL.REL.NOINC `({division}) ;
        /*0010*/                   ACQBULK ;
        /*0020*/                   CALL.REL.NOINC `({division}) ;
        /*0030*/                   LDG.E R44, desc[UR18][R44.64] ;
        /*0040*/                   EXIT ;
{division}:
        /*0050*/                   RET.REL.NODEC R2 `(some_kernel) ;
"""
    assert not faults_of(_MANGLED, sass)
    assert faults_of(_MANGLED, sass.replace("ACQBULK", "NOP"))
    unknown = sass.replace(division, "$some_function")
    assert any(fault.startswith("reads before it waits") for fault in faults_of(_MANGLED, unknown))


def test_kernels_that_are_launched_normally() -> None:
    name = _MANGLED.replace("11some_kernel", "13decode_kernel")
    assert not faults_of(name, "/*0000*/ LDG.E R44, desc[UR18][R44.64] ;\n/*0010*/ EXIT ;\n")
    assert faults_of(name, _SASS.format(first="NOP")) == ["is launched normally, yet has ACQBULK"]
    assert faults_of(_MANGLED, "/*0000*/ EXIT ;\n") == ["ends without having waited: EXIT"]


@pytest.mark.slow
def test_the_built_extension(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="CUDA's binary utilities come with Triton")
    if not LIBRARY.exists():
        pytest.skip("the CUDA extension is not built")
    every = list(disassembled(LIBRARY, tmp_path))
    kernels = [(name, sass) for name, sass in every if "4sm90" in name]
    for kernel in (*BEGIN_CALLS, *READ_INPUTS_EARLY):  # a kernel of another name would be judged by other rules
        assert any(f"{len(kernel)}{kernel}" in name for name, _ in kernels), kernel
    # Of any architecture: those whose code waits are launched dependent.
    words = [(name, sass) for name, sass in every if "words_kernel" in name and "ACQBULK" in sass]
    assert words
    kernels += words
    for name, sass in kernels:
        assert not faults_of(name, sass), name
