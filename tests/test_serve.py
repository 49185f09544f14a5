"""`python -m dash_trl.serve`: what it starts, on which ports, cores and GPUs. `test_vllm.py` runs it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dash_trl import serve

ROOT = Path(__file__).parents[1]


def test_the_servers_listen_on_this_machine_only_and_the_user_s_flags_win():
    arguments = serve.flags("127.0.0.1", 8000, None, ["--dtype", "bfloat16"])
    assert arguments[:4] == ["--host", "127.0.0.1", "--port", "8000"]
    assert arguments[-2:] == ["--dtype", "bfloat16"] and "float32" in arguments
    assert arguments[arguments.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--trust-remote-code" not in arguments
    on_gpu = serve.flags("127.0.0.1", 8000, ["0,1", "2,3"], [])
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


def test_where_threads_cannot_be_bound(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert serve.cores(1, 2) == "nobind"


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
def test_where_the_servers_listen_and_where_they_are_reached():
    assert serve.Servers("model", 1, host="0.0.0.0", port=8900).urls[0].startswith("http://127.0.0.1:89")
    assert serve.Servers("model", 1, host="::1", port=8900).urls[0].startswith("http://[::1]:89")
    with pytest.raises(ValueError, match="--host 192.0.2.1: nobody can listen there on this machine"):
        serve.Servers("model", 1, host="192.0.2.1")


SCRIPT = """
import sys
from dash_trl import serve, workers
commands = []
def start(servers, number):  # a program that takes a second to stop, in place of vLLM
    slow = "trap 'sleep 1; exit' TERM; echo up; while :; do sleep 0.1; done"
    commands.append(workers.Command(["sh", "-c", slow], log=servers.logs / f"{number}.log"))
    print("PID", commands[-1].process.pid, flush=True)
    return commands[-1]
serve.Servers._start = start
serve.answers = lambda url: all("up" in command.log.read_text() for command in commands)
sys.argv[1:] = ["model", "--servers", "2", "--host=0.0.0.0"]
serve.main()
"""


@pytest.mark.vllm
@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_no_signal_leaves_servers_behind(first):
    """Nor does an impatient second one."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    pids = []
    for line in iter(process.stdout.readline, ""):
        if line.startswith("PID"):
            pids.append(int(line.split()[1]))
        if line.startswith("Ctrl+C"):
            break
    assert len(pids) == 2
    process.send_signal(first)
    for another in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        time.sleep(0.1)
        process.send_signal(another)
    _, errors = process.communicate(timeout=20)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)
    assert "--host 0.0.0.0 opens vLLM's weight endpoints" in errors


@pytest.mark.vllm
def test_a_server_that_does_not_start_says_why(tmp_path):
    with serve.Servers(str(tmp_path / "no-model"), 1, port=8800) as servers:
        with pytest.raises(RuntimeError, match="(?s)did not start. The end of .*server_0.log:.*no-model"):
            servers.wait_until_ready()
    with pytest.raises(ValueError, match="start at least one"):
        serve.Servers("model", 0)
