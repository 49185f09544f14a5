"""What passes ask of a GPU, counted on a CUDA device that computes nothing (tests/fake_cuda)."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.launching import ROOT

KERNEL = "cuda torch.bfloat16 3 True"  # of contiguous [L, H, D]
VARLEN = [*[KERNEL] * 3, *["cuda torch.int32 1 True"] * 2]


@pytest.fixture(scope="module")
def cases(python, tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None or torch.version.cuda or torch.version.hip:
        pytest.skip("the device needs g++, and a torch that has no GPU's device")
    guard = tmp_path_factory.mktemp("device") / "guard.so"
    home = Path(torch.__file__).parent
    command = [compiler, "-shared", "-fPIC", "-std=c++20", f"-I{home}/include", ROOT / "tests/fake_cuda/guard.cpp"]
    link = ["-o", guard, f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
    subprocess.run([*command, *link], check=True)
    done = python("-m", "tests.fake_cuda", guard, guard.parent, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_layer_calls_varlen_once(cases):
    """Again where checkpointing computes it again. Partial RoPE leaves the query's heads in another order."""
    for name, case in cases.items():
        layers = 24 if "0.5B" in name else 1 if "qwen3_5" in name else 2
        again = 2 if "checkpointing" in name or "0.5B" in name and "groups" in name else 1
        wanted = VARLEN if "qwen3_5" not in name else [KERNEL.replace("True", "False"), *VARLEN[1:]]
        assert case["varlen"] == [wanted] * layers * again, name


def test_the_host_waits_for_values_only(cases):
    waits = {name: case["waits"] for name, case in cases.items() if case["waits"]}
    assert waits == {"0.5B, V(prefix)": ["aten._local_scalar_dense.default"]}


def test_each_parameter_gets_a_gradient(cases):
    without = {name for name, case in cases.items() if case["gradients"] < 1}
    assert without == {"old", "0.5B, old", "0.5B, V(prefix)"}


def test_launches_and_memory(cases):
    """As many kernels for 8 groups as for 1. Beyond weights, no pass has its logits (7 GB for 23k tokens) at once."""
    assert cases["1 groups"]["launches"] == cases["8 groups"]["launches"] <= 406
    gigabytes = {name: case["peak"] / 1e9 for name, case in cases.items() if "0.5B" in name}
    for name, most in {"4 groups": 3.28, "8 groups": 5.14, "old": 1.75, "V(prefix)": 1.02}.items():
        assert gigabytes[f"0.5B, {name}"] <= most, gigabytes
    with_casts, plain = (cases[f"0.5B, LoRA, 8 groups{more}"]["launches"] for more in (", casts", ""))
    assert with_casts - plain >= 24 * 7 * 3, "PEFT casts in each adapter: forward, again, and backward"


def test_a_pass_of_the_default_budget_takes_no_more_memory_than_trls(cases):
    """Copies of keys weigh most if there are as many heads of keys as of queries."""
    for name in ("4000, 100", "4000, 1000", "512, 100"):
        assert 0.4 < cases[name]["peak"] / cases[f"{name}, alone"]["peak"] <= 1, name
