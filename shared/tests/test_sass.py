"""Uniform registers that are read before anything was written to them, and registers spilled in loops."""

from __future__ import annotations

from kernel_reference.testing.sass import spills_in_loops, unwritten_reads

LOOP_SKIPPED = """
        /*0000*/                   ULDC UR8, c[0x0][0x228] ;
        /*0010*/              @P5 BRA `(.L_x_3) ;
        /*0020*/                   USHF.R.U32.HI UR6, URZ, 0x4, UR8 ;
        /*0030*/                   UIADD3 UR4, UP0, UR6, 0x40, URZ ;
        /*0040*/                   HGMMA.64x32x16.F32.BF16 R56, R24, gdesc[UR2].tnspB, R56 ;
.L_x_3:
        /*0050*/                   UIADD3 UR6, UP0, UR6, 0x40, URZ ;
        /*0060*/                   EXIT ;
"""


def test_what_is_written_on_one_way_only_is_not_written() -> None:
    found = unwritten_reads(LOOP_SKIPPED)
    assert found == [
        # Of two descriptors the first does not count: the operand comes from registers.
        "UR5 at 0x0040: HGMMA.64x32x16.F32.BF16 R56, R24, gdesc[UR2].tnspB, R56",
        "UR6 at 0x0050: UIADD3 UR6, UP0, UR6, 0x40, URZ",
    ]


def test_what_every_way_writes_is_written() -> None:
    wide = LOOP_SKIPPED.replace("ULDC UR8", "ULDC.64 UR4").replace("URZ, 0x4, UR8", "URZ, 0x4, UR4")
    before = wide.replace("              @P5 BRA", "                   UMOV UR6, URZ ;\n        /*0018*/  @P5 BRA")
    assert unwritten_reads(before) == []


def test_a_way_round_a_loop_brings_what_it_wrote() -> None:
    loop = """
        /*0000*/                   S2UR UR5, SR_CTAID.X ;
.L_x_1:
        /*0010*/                   R2UR P0, UR7, R3 ;
        /*0020*/                   UIADD3.64 UR10, UR6, UR4, URZ ;
        /*0030*/                   UMOV UR6, UR10 ;
        /*0040*/                   BRA !UP1, `(.L_x_1) ;
        /*0050*/                   EXIT ;
"""
    assert [line.partition(" at")[0] for line in unwritten_reads(loop)] == ["UR4, UR6"]


def test_a_call_writes_what_its_function_writes() -> None:
    called = """
        /*0000*/                   MOV R4, 0x20 ;
        /*0010*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64) ;
        /*0020*/                   UIMAD UR4, UR51, UR50, URZ ;
        /*0030*/                   EXIT ;
$__internal_0_$__cuda_sm20_div_s64:
        /*0040*/                   ULDC.64 UR50, c[0x0][0x228] ;
        /*0050*/                   RET.REL.NODEC R4 `(kernel) ;
"""
    assert unwritten_reads(called) == []
    assert unwritten_reads(called.replace("UR50, c", "UR48, c")) == ["UR50, UR51 at 0x0020: UIMAD UR4, UR51, UR50, URZ"]


def test_code_that_branches_by_a_table_is_left_alone() -> None:
    assert unwritten_reads(LOOP_SKIPPED.replace("EXIT", "BRX R2 -0x260")) == []
    assert unwritten_reads("") == []


# A tile's beginning and end spill; its loop of steps waits in a spin that stands behind everything.
TILES = """
        /*0000*/                   BRX R2 -0x340                     (*"BRANCH_TARGETS .L_x_0,.L_x_1"*);
.L_x_0:
        /*0010*/                   EXIT ;
.L_x_1:
        /*0020*/                   STL [R1+0x4], R2 ;
.L_x_2:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR21+0x28650], R16 ;
        /*0040*/              @!P0 BRA `(.L_x_4) ;
.L_x_3:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40], R24 ;
        /*0060*/              @!P1 BRA `(.L_x_2) ;
        /*0070*/                   LDL R2, [R1+0x4] ;
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR40], R88 ;
        /*0090*/              @!P2 BRA `(.L_x_1) ;
        /*00a0*/                   EXIT ;
.L_x_4:
        /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR21+0x28650], R16 ;
        /*00c0*/              @!P0 BRA `(.L_x_4) ;
        /*00d0*/                   BRA `(.L_x_3) ;
"""


def test_what_is_spilled_once_a_tile_is_not_spilled_in_the_loop_over_its_steps() -> None:
    assert spills_in_loops(TILES) == 0


def test_what_is_spilled_in_a_loop_of_products_is_counted_wherever_it_stands() -> None:
    step = TILES.replace(
        "/*0060*/              @!P1", "/*0058*/  LDL.64 R4, [R1] ;\n        /*0060*/              @!P1"
    )
    assert spills_in_loops(step) == 1
    spin = step.replace("/*00d0*/  ", "/*00c8*/  STL [R1], R4 ;\n        /*00d0*/  ")
    assert spills_in_loops(spin) == 2


def test_code_without_loops_spills_in_none() -> None:
    assert spills_in_loops("") == spills_in_loops(TILES.replace("BRA", "NOP")) == 0
