"""`python -m dash_trl.serve`: what it starts, on which ports, cores and GPUs. `test_vllm.py` has real servers."""

import asyncio
import importlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from dash_trl import serve
from dash_trl.sampling import key_header, own_key
from tests.fake_server import Fake
from tests.vllm_run import wait_until

PYTHON = sys.executable


def test_the_servers_listen_on_this_machine_only_and_the_user_s_flags_win():
    arguments = serve.flags("127.0.0.1", 8000, 0, ["--dtype", "bfloat16"])
    assert arguments[:4] == ["--host", "127.0.0.1", "--port", "8000"]
    assert arguments[-2:] == ["--dtype", "bfloat16"] and "float32" in arguments
    assert arguments[arguments.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--trust-remote-code" not in arguments
    on_gpu = serve.flags("127.0.0.1", 8000, 2, [])
    assert on_gpu[on_gpu.index("--tensor-parallel-size") + 1] == "2"


def test_a_key_guards_all_endpoints(monkeypatch):
    """Those for weights and for health, too, which vLLM's own check leaves out."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    arguments = serve.flags("127.0.0.1", 8000, 0, [])
    module, _, name = arguments[arguments.index("--middleware") + 1].rpartition(".")

    async def endpoint(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"weights"})

    guarded = getattr(importlib.import_module(module), name)(endpoint)

    def answer(**scope):
        said = []

        async def send(message):
            said.append(message)

        asyncio.run(guarded(scope, None, send))
        return said

    for sent, status in ((b"Bearer secret", 200), (b"Bearer other", 401), (None, 401)):
        headers = [] if sent is None else [(b"authorization", sent)]
        for path in ("/collective_rpc", "/health", "/v1/models"):
            first, *more = answer(type="http", method="POST", path=path, headers=headers)
            assert first["status"] == status, (path, sent)
            assert (b"weights" in [one.get("body") for one in more]) == (status == 200), (path, sent)
        first = answer(type="websocket", headers=headers)[0]
        assert first["type"] == ("http.response.start" if status == 200 else "websocket.close"), sent
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(ValueError, match="needs a key: set the environment variable VLLM_API_KEY"):
        type(guarded)(endpoint)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Of a user without a key."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dash_trl"


def test_a_key_is_made_once_for_the_servers_and_trainers_of_a_user(program, cache, monkeypatch):
    """Servers get it by their environment, since every user can read command lines."""
    program.write_text('#!/bin/sh\necho "$VLLM_API_KEY $*"\n')
    first, second = [one.split() for one in said(serve.Servers("model", 2))]
    again = [one.split() for one in said(serve.Servers("model"))]
    file = cache / "vllm_key"
    key = file.read_text()
    assert len(key) > 40 and file.stat().st_mode & 0o777 == 0o600 and list(cache.iterdir()) == [file]
    assert first[0] == second[0] == again[0][0] == key and key not in "".join([*first[1:], *second[1:]])
    here = ["http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000", "http://0.0.0.0:8000"]
    assert [key_header(url) for url in here] == [{"Authorization": f"Bearer {key}"}] * 4
    assert key_header("https://example.com") == {}
    monkeypatch.setenv("VLLM_API_KEY", "given")
    assert said(serve.Servers("model"))[0].startswith("given ") and file.read_text() == key
    assert key_header(here[0]) == key_header("https://example.com") == {"Authorization": "Bearer given"}


def test_the_key_that_another_command_makes_meanwhile_counts(cache, monkeypatch):
    def link(source: str, target: Path) -> None:
        assert len(Path(source).read_text()) > 40  # nobody reads half a key
        target.touch(0o600)
        target.write_text("the other's")
        raise FileExistsError

    monkeypatch.setattr(os, "link", link)
    assert own_key() == own_key() == "the other's"


def test_what_gives_the_servers_to_others_is_refused(program):
    refused = [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 opens the servers to other machines.* VLLM_API_KEY"),
        ({"host": "example.com"}, "--host example.com opens"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            serve.Servers("model", **options)


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
    monkeypatch.delattr(os, "sched_getaffinity")
    assert serve.cores(1, 2) == "nobind"


@pytest.fixture
def program(tmp_path, cache, monkeypatch) -> Path:
    """A `vllm` beside Python that says what it was started with, and ends."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "$VLLM_SERVER_DEV_MODE $CUDA_VISIBLE_DEVICES $VLLM_CPU_OMP_THREADS_BIND $*"\n')
    program.chmod(0o755)
    return program


def said(servers: serve.Servers) -> list[str]:
    """Of each server."""
    with servers:
        for command in servers.commands:
            command.process.wait(60)
    return [command.log.read_text() for command in servers.commands]


def test_the_gpus_are_shared_out(program, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = said(serve.Servers("model", 2, options=["--max-model-len", "64"]))
    assert first.startswith("1 0,1 ") and second.startswith("1 2,3 ")
    assert " serve model --host 127.0.0.1 --port " in first and first.endswith(" --max-model-len 64\n")
    assert "--tensor-parallel-size 2 " in first and "float32" not in first
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [one[:4] for one in said(serve.Servers("model", 2))] == ["1 3 ", "1 5 "]
    with pytest.raises(ValueError, match="servers=3, but only 2 GPUs are visible"):
        serve.Servers("model", 3)


def test_without_gpus_the_cores_are_shared_out(program, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    first, second = said(serve.Servers("model", 2))
    assert first.startswith("1  0 serve model") and second.startswith("1  1 serve model") and "float32" in first


def test_a_server_that_does_not_start_says_why(program, monkeypatch):
    port = 20000 + os.getpid() % 10000  # no other test has a server there
    did_not = pytest.raises(RuntimeError, match="(?s)did not start.*0.log:.*no-model")
    with serve.Servers("no-model", port=port) as servers:
        servers.commands[0].process.wait(60)
        with did_not:
            servers.wait_until_ready()
        monkeypatch.setattr("dash_trl.serve.answers", lambda url: True)  # as if another program had taken the port
        with did_not:
            servers.wait_until_ready()


def test_without_vllm_an_install_that_works_is_named_before_the_warm_up(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr("dash_trl.toy.toy_model", lambda: pytest.fail("the warm-up began"))
    for gpu, remedy in ((True, r"pip install 'trl\[vllm\]'"), (False, "no GPU.*`make test`.*CPU b")):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        with pytest.raises(
            ValueError, match=f"vLLM is not installed in the environment of /nowhere/python. .*{remedy}"
        ):
            serve.main(["toy"])


def test_this_machine_s_servers_are_asked_with_the_key_and_by_no_proxy(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    fake = Fake()
    fake.key = "secret"
    assert serve.answers(f"{fake.url}/health")
    fake.stop()
    assert not serve.answers(f"{fake.url}/health")


def test_where_the_servers_listen_and_where_they_are_reached(program, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert serve.Servers("model", 1, host="0.0.0.0", port=8900).urls[0].startswith("http://127.0.0.1:89")
    assert serve.Servers("model", 1, host="::1", port=8900).urls[0].startswith("http://[::1]:89")
    with pytest.raises(OSError, match="192.0.2.1"):
        serve.Servers("model", 1, host="192.0.2.1")


STUBBORN = """
import http.server, os, signal, sys, time

def stop(*_):
    open(f"{sys.argv[0]}.{os.getpid()}", "w")
    while not os.path.exists(sys.argv[0] + ".go"):
        time.sleep(0.05)
    os._exit(0)

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

signal.signal(signal.SIGTERM, stop)
assert sys.argv[1:3] == ["serve", "the tiny one"]
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""  # in place of vLLM: a server that says when it is told to stop, and does not stop before it may


def served() -> tuple[int, TextIO]:
    """`main` in a process of its own: its number, and what it says."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            sys.stdout = sys.stderr = os.fdopen(writes, "w")
            for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
                signal.signal(number, handler)  # a suite in the background ignores both
            serve.main(["toy", "--servers", "2"])
        finally:  # no test goes on in it
            sys.stdout.flush()
            os._exit(0)
    os.close(writes)
    return pid, os.fdopen(reads)


def test_no_signal_leaves_servers_behind(program, monkeypatch):
    """Nor does an impatient second one."""
    program.write_text(f"#!{PYTHON}{STUBBORN}")
    monkeypatch.setattr("dash_trl.toy.toy_model", lambda: "the tiny one")
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    for first in numbers:
        pid, output = served()
        said = ""
        while "Ctrl+C stops the servers.\n" not in said:
            line = output.readline()
            assert line, said
            said += line
        servers = psutil.Process(pid).children()
        assert len(servers) == 2 and "servers' key in" in said
        os.kill(pid, first)
        wait_until(lambda servers=servers: all(Path(f"{program}.{server.pid}").exists() for server in servers))
        for another in numbers:
            os.kill(pid, another)
        Path(f"{program}.go").touch()
        output.read()
        os.waitpid(pid, 0)
        assert not any(server.is_running() for server in servers)
        Path(f"{program}.go").unlink()
