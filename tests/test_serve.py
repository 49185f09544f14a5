"""`python -m dash_trl.serve`: what it starts, on which ports, cores and GPUs. `test_vllm.py` runs it."""

from __future__ import annotations

import os
import socket

import pytest

from dash_trl import serve


def test_the_servers_listen_on_this_machine_only_and_the_user_s_flags_win():
    arguments = serve.flags(8000, None, ["--dtype", "bfloat16"])
    assert arguments[:4] == ["--host", "127.0.0.1", "--port", "8000"]
    assert arguments[-2:] == ["--dtype", "bfloat16"] and "float32" in arguments
    assert arguments[arguments.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--trust-remote-code" not in arguments
    on_gpu = serve.flags(8000, ["0,1", "2,3"], [])
    assert on_gpu[on_gpu.index("--tensor-parallel-size") + 1] == "2" and "--weight-transfer-config" in on_gpu


def test_ports_in_use_are_left_out():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        ports = serve.free_ports(2, first)
    assert first not in ports and len(set(ports)) == 2 and min(ports) > first


def test_the_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5, 6})
    assert [serve.cores(i, 2) for i in range(2)] == ["0,1", "4,5"]
    assert serve.cores(0, 1) == "0,1,4,5,6"
    assert [serve.cores(i, 7) for i in range(7)] == ["0", "1", "4", "5", "6", "0", "1"]


def test_the_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert serve.devices(2) == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert serve.devices(2) == ["3", "5"]
    with pytest.raises(ValueError, match=r"servers=3, but only 2 GPUs are visible \(3,5\)"):
        serve.devices(3)


@pytest.mark.vllm
def test_a_server_that_does_not_start_says_why(tmp_path):
    with serve.Servers(str(tmp_path / "no-model"), 1, port=8800) as servers:
        with pytest.raises(RuntimeError, match="(?s)did not start. The end of .*server_0.log:.*no-model"):
            servers.wait_until_ready()
    with pytest.raises(ValueError, match="start at least one"):
        serve.Servers("model", 0)
