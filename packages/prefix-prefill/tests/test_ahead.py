"""Does ``python -m prefix_prefill.compile`` say and make what a layer needs, with no GPU?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_reference.ahead import TARGETS
from kernel_reference.testing.forks import outcome_alone
from prefix_prefill.compile import LIMITS

# What is said of a layer, and how many kernels it needs.
LAYERS = {
    "": 4,
    "--sequences 1 2 3 16 255 256 --tokens 1 2 77 2048 --new-kv --page 64 --lse": 4,
    "--capacity 512": 2,
    "--window": 3,
    "--window 2048": 4,
    "--capacity 131072 512 --tokens 2048 --drafts": 0,
    "--cache e4m3 --scales heads --window --sinks --softcap --tokens 1": 2,
    "--cache e4m3 --tokens 2048 --sequences 1 16 --capacity 32768 --widen-bytes 1000000000": 4,
    "--page 1 --sequences 1 2 3 16 255 256 --tokens 1 2 5 77 2048": 4,
    "--levels 2 --tokens 1": 4,
    "--layout x-packed --cache e5m2 --tokens 1 --sequences 256 --alibi": 1,
    "--dtype float32 --target sm_80 --capacity 64 --sequences 1": 1,
}
DRY = """
import contextlib, io
from prefix_prefill import compile
for options, count in {layers!r}.items():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        compile.main(["--target", "sm_90", *options.split(), "--dry-run"])
    assert said.getvalue().endswith(f"{{count}} kernels to compile\\n"), (options, said.getvalue())
for options, error in (("--page 0", "k_cache must be"), ("--heads 5,2", "q must be of a multiple of the 2 kv heads")):
    wrong = io.StringIO()
    with contextlib.redirect_stderr(wrong):
        try:
            compile.main(["--target", "sm_90", *options.split()])
        except SystemExit as end:
            assert end.code == 2
    assert error in wrong.getvalue(), wrong.getvalue()
compile.main(["--target", "sm_90", "--heads", "8,1", "--head-size", "64", "--tokens", "1", "--capacity", "512"])
"""


def test_a_dry_run_names_a_layers_kernels_and_a_run_leaves_them_in_tritons_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    code, said = outcome_alone(DRY.format(layers=LAYERS), environment)
    assert code == 0, said
    assert [file.name for file in tmp_path.rglob("*.cubin")] == ["attend.cubin"], said


def test_every_target_has_its_limits() -> None:
    assert [*LIMITS] == [*TARGETS]


@pytest.mark.gpu
def test_a_call_on_the_gpu_compiles_nothing_that_was_compiled_before(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "prefix_prefill.compile", "--lse"], env=environment, check=True)
    made = {file.name for file in tmp_path.rglob("*") if file.is_dir()}
    call = """
        import torch
        from prefix_prefill import prefix_prefill
        for count, new in ((1, 1), (3, 1), (2, 100)):
            q = torch.randn(count * new, 32, 128, device="cuda").bfloat16()
            cache = torch.randn(64, 16, 8, 128, device="cuda").bfloat16()
            table = torch.zeros(count, 8192, dtype=torch.int32, device="cuda")
            bounds = torch.arange(count + 1, dtype=torch.int32, device="cuda") * new
            lengths = torch.full((count,), 1000, dtype=torch.int32, device="cuda")
            prefix_prefill(q, None, None, cache, cache, table, bounds, lengths, max_seqlen_q=new, return_lse=True)
        torch.cuda.synchronize()
        """
    code, said = outcome_alone(call, environment)
    assert code == 0, said
    kernels = {file.parent.name for file in tmp_path.rglob("*.cubin")}
    assert kernels <= made, "kernels were compiled again"
