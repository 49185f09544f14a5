"""The benchmark that a GPU runs first, on a CPU with a tiny model."""

import json

from tests.launching import ROOT


def test_the_gpu_benchmark_runs_from_end_to_end(python, toy, tmp_path):
    file = tmp_path / "gpu.json"
    python(ROOT / "benchmarks" / "gpu.py", "--small", "--json", file)
    found = json.loads(file.read_text())
    assert not [one["error"] for one in found.values() if "error" in one]
    assert found["0.5B, 75% constant"]["rel_grad_diff"] < 1e-4 and "Qwen3.5, 0% constant" in found
