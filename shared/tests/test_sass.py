"""Uniform registers that are read before anything was written to them."""

from __future__ import annotations

from kernel_reference.testing.sass import unwritten_reads

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


def test_code_that_branches_by_a_table_is_left_alone() -> None:
    assert unwritten_reads(LOOP_SKIPPED.replace("EXIT", "BRX R2 -0x260")) == []
    assert unwritten_reads("") == []
