"""The benchmark that a GPU runs first, on a CPU with a tiny model."""

import json

from tests.launching import ROOT


def test_the_gpu_benchmark_runs_from_end_to_end(python, toy, tmp_path):
    file = tmp_path / "gpu.json"
    done = python(ROOT / "benchmarks" / "gpu.py", "--small", "--json", file)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(file.read_text())
    assert max(one.get("rel_param_diff", 0.0) for one in found.values()) < 1e-4
    assert {"0% constant", "75% constant, dash_23k", "0% constant, dash, V(prefix)", "toy, dash"} <= found.keys()
