"""`python -m dash_trl.serve`: what it starts, on which ports, cores and GPUs. `test_vllm.py` runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import Qwen2Config

from dash_trl import serve

ROOT = Path(__file__).parents[1]


def test_the_servers_listen_on_this_machine_only_and_the_user_s_flags_win():
    arguments = serve.flags("127.0.0.1", 8000, None, ["--dtype", "bfloat16"])
    assert arguments[:4] == ["--host", "127.0.0.1", "--port", "8000"]
    assert arguments[-2:] == ["--dtype", "bfloat16"] and "float32" in arguments
    assert arguments[arguments.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--trust-remote-code" not in arguments
    on_gpu = serve.flags("127.0.0.1", 8000, 2, [])
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
    assert serve.devices(serve.visible_gpus(), 2) == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert serve.devices(serve.visible_gpus(), 2) == ["3", "5"]


def model_config(heads: int, kv_heads: int, width: int = 1024 * 27, vocabulary: int = 64 * 1024 * 27) -> Qwen2Config:
    """By default all but the heads can be cut as one likes."""
    return Qwen2Config(
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=width, vocab_size=vocabulary
    )


QWEN_05B = model_config(14, 2, 4864, 151_936)
QWEN_7B = model_config(28, 4, 18_944, 152_064)
LLAMA_8B = model_config(32, 8, 14_336, 128_256)


@pytest.mark.parametrize(
    ("config", "gpus", "servers", "options", "expected"),  # expected: servers, tensor-parallel GPUs of each
    [
        (QWEN_05B, 1, None, "", (1, 1)),
        (QWEN_05B, 2, None, "", (1, 2)),
        (QWEN_05B, 4, None, "", (2, 2)),  # 14 heads do not split over 4, and vLLM refuses
        (QWEN_05B, 8, None, "", (4, 2)),
        (QWEN_05B, 3, None, "", (3, 1)),
        (QWEN_05B, 14, None, "", (7, 2)),  # its heads would split over 14, its MLP does not
        (QWEN_05B, 4, 4, "", (4, 1)),
        (QWEN_7B, 8, None, "", (2, 4)),
        (LLAMA_8B, 8, None, "", (1, 8)),
        (LLAMA_8B, 8, 2, "", (2, 4)),
        (model_config(16, 2), 4, None, "", (1, 4)),  # two copies of each KV head
        (model_config(12, 4), 3, None, "", (3, 1)),  # 4 KV heads are neither cut into 3 parts nor copied to 3
        (model_config(12, 12), 3, None, "", (1, 3)),
        (model_config(12, 12, vocabulary=151_936), 3, None, "", (3, 1)),
        (model_config(12, 12, vocabulary=50_257), 3, None, "", (1, 3)),  # padded to 50,304
        (None, 4, None, "", (1, 4)),  # a model that vLLM alone can read
        # the user's own sizes win, and the other ones leave room for them
        (QWEN_05B, 4, None, "--tensor-parallel-size 1", (1, 1)),
        (QWEN_05B, 4, 2, "--tensor_parallel_size=1", (2, 1)),
        (LLAMA_8B, 8, None, "-tp 4", (1, 4)),
        (LLAMA_8B, 8, None, "--data-parallel-size 4", (1, 2)),
        (LLAMA_8B, 8, 2, "-dp 2 --dtype bfloat16", (2, 2)),
        (LLAMA_8B, 8, None, "-dp=2 --pipeline-parallel-size 2", (1, 2)),
        (QWEN_05B, 4, None, "--data_parallel_size 2", (1, 2)),
        (LLAMA_8B, 4, None, "-dp 8", (1, 1)),  # over several machines; else vLLM says so
    ],
)
def test_as_many_gpus_share_the_model_as_its_heads_split_over(config, gpus, servers, options, expected):
    assert serve.layout(gpus, servers, serve.parallelism(options.split()), config) == expected


@pytest.mark.parametrize(
    ("servers", "options", "warning"),
    [
        (None, "", ""),
        (1, "", "2 of 4 GPUs stay idle: each of 1 servers takes 2, .* --servers 2 uses all GPUs"),
        (3, "", "1 of 4 GPUs stay idle: each of 3 servers takes 1, .* --servers 2 uses all GPUs"),
        (1, "-tp 1", ""),
        (1, "-pp 3", r"1 of 4 GPUs stay idle: each of 1 servers takes 3, .* split\.\n"),  # none uses all
        (1, "-dp 2", "With --data-parallel-size 2 the first replica reports .* Use --servers 2 in its place"),
    ],
)
def test_idle_gpus_and_unproven_replicas_are_warned_of(servers, options, warning, caplog):
    serve.layout(4, servers, serve.parallelism(options.split()), QWEN_05B)
    assert re.search(warning, caplog.text) if warning else not caplog.records


def test_impossible_layouts():
    with pytest.raises(ValueError, match="servers=3, but only 2 GPUs are visible"):
        serve.layout(2, 3, serve.parallelism([]), QWEN_05B)
    with pytest.raises(ValueError, match="vllm serve.*-tensor-parallel-size.*invalid int value: 'two'"):
        serve.parallelism(["--tensor-parallel-size", "two"])


def test_the_model_s_config_is_read_as_vllm_will(tmp_path):
    QWEN_05B.save_pretrained(tmp_path)
    assert serve.text_config(str(tmp_path), serve.parallelism([])).num_attention_heads == 14
    assert serve.text_config(str(tmp_path / "nowhere"), serve.parallelism([])) is None
    own_code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(own_code))
    (tmp_path / "own.py").write_text(
        "from transformers import PretrainedConfig\n\nclass Own(PretrainedConfig):\n    num_attention_heads = 6\n"
    )
    assert serve.text_config(str(tmp_path), serve.parallelism([])) is None
    trusting = serve.parallelism(["--max-model-len", "64", "--trust-remote-code"])
    assert serve.text_config(str(tmp_path), trusting).num_attention_heads == 6
    assert serve.parallelism(["--revision=v_2"]).revision == serve.parallelism(["--revision", "v_2"]).revision == "v_2"


def test_a_proxy_is_not_asked_for_this_machine_s_servers(monkeypatch):
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            assert serve.answers(f"http://127.0.0.1:{server.server_address[1]}/health")
        finally:
            server.shutdown()


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
