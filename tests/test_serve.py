"""`dash_trl serve`: what it starts, on which ports and GPUs, how it ends. `test_vllm.py` has real servers."""

import asyncio
import importlib
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from dash_trl import serve
from dash_trl.server_key import key_header
from tests.tiny import refusal, refused
from tests.vllm_run import wait_until

# In place of vLLM: a server that writes down how it was started and when it is told to stop, and stops when it may.
PROGRAM = """
import http.server, os, signal, sys, time

def stop(*_):
    open(f"{sys.argv[0]}.{os.getpid()}", "w")
    while not os.path.exists(sys.argv[0] + ".go"):
        time.sleep(0.05)
    os._exit(0)

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == "Bearer " + os.environ["VLLM_API_KEY"] else 401)
        self.end_headers()

signal.signal(signal.SIGTERM, stop)
assert sys.argv[2] != "no-model", "no such model"
port = sys.argv[sys.argv.index("--port") + 1]
names = "VLLM_API_KEY", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
with open(f"{sys.argv[0]}.{port}", "w") as file:
    file.write(" ".join([*(os.environ.get(name, "none") for name in names), *sys.argv[1:]]))
http.server.HTTPServer(("127.0.0.1", int(port)), Healthy).serve_forever()
"""


def test_a_key_guards_all_connections(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    module, _, name = serve.FLAGS[serve.FLAGS.index("--middleware") + 1].rpartition(".")
    kind = getattr(importlib.import_module(module), name)

    def reached(connection: str, *headers: tuple[bytes, bytes]) -> tuple[str, int | None]:
        """What a request comes to first: the application, or an answer of the middleware."""
        found = []

        async def note(*received: dict) -> None:
            found.append(received[0])

        asyncio.run(kind(note)({"type": connection, "headers": headers}, None, note))
        return found[0]["type"], found[0].get("status")

    for headers in ([], [(b"authorization", b"Bearer other")]):
        assert reached("http", *headers) == ("http.response.start", 401)
        assert reached("websocket", *headers) == ("websocket.close", None)
    for connection in ("http", "websocket"):
        assert reached(connection, (b"authorization", b"Bearer secret")) == (connection, None)
    monkeypatch.delenv("VLLM_API_KEY")
    assert "needs a key: set the environment variable VLLM_API_KEY" in refusal(kind, None)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Of a user without a key."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dash_trl"


@pytest.fixture
def program(tmp_path, cache, monkeypatch) -> Path:
    """A `vllm` beside Python, on a machine without GPUs, whose proxy nobody answers."""
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}{PROGRAM}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    (tmp_path / "vllm.go").touch()
    return program


def said(program: Path, *arguments: object, **settings: object) -> list[list[str]]:
    """Of each server its key, GPUs, number of threads and arguments."""
    with serve.vllm_servers(*arguments, **settings) as urls:
        return [Path(f"{program}.{url.rpartition(':')[2]}").read_text().split() for url in urls]


def test_a_key_is_made_once_for_the_servers_and_trainers_of_a_user(program, cache, monkeypatch):
    """Servers get it by their environment, since every user can read command lines."""
    first, second, again = *said(program, "model", 2), *said(program, "model")
    key = (file := cache / "vllm_key").read_text()
    assert len(key) > 40 and file.stat().st_mode & 0o777 == 0o600 and list(cache.iterdir()) == [file]
    assert first[0] == second[0] == again[0] == key and key not in "".join([*first[1:], *second[1:]])
    here = ["http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000", "http://0.0.0.0:8000"]
    assert [key_header(url) for url in here] == [{"Authorization": f"Bearer {key}"}] * 4
    assert key_header("https://example.com") == {}
    monkeypatch.setenv("VLLM_API_KEY", "given")
    assert said(program, "model")[0][0] == "given" and file.read_text() == key
    assert key_header(here[0]) == key_header("https://example.com") == {"Authorization": "Bearer given"}


def test_ports_in_use_are_left_out(program):
    with serve.vllm_servers("model") as (url,):
        taken = int(url.rpartition(":")[2])
        assert taken not in serve.free_ports(2, taken)


def test_the_gpus_are_shared_out(program, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = said(program, "model", 2, options=["--max-logprobs", "7"])
    assert (first[1], second[1]) == ("0,1", "2,3")
    arguments = " ".join(first[3:])
    assert arguments.startswith("serve model --host 127.0.0.1 --port ")
    assert "--logprobs-mode processed_logprobs --max-logprobs -1 " in arguments  # the user's flags come last and win
    assert arguments.endswith(" --tensor-parallel-size 2 --max-logprobs 7") and "float32" not in arguments
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [one[1] for one in said(program, "model", 2)] == ["3", "5"]
    assert "servers=3, but only 2 GPUs are visible" in refusal(said, program, "model", 3)


def test_without_gpus_the_cores_are_shared_out(program, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    for one in said(program, "model", 2):
        assert one[2] == "2" and "--dtype float32 --enforce-eager --max-num-seqs 256 --block-size 32" in " ".join(one)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert said(program, "model")[0][2] == "4"


def test_a_server_that_does_not_start_says_why(program):
    refused("(?s)did not start.*server_0.log:.*no such model", said, program, "no-model")


def test_without_vllm_an_install_that_works_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(sys, "argv", ["serve", "model"])
    refused(r"not installed.* /nowhere/python.* 'trl\[vllm\]'", runpy.run_module, "dash_trl.serve", None, "__main__")


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


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_signal_leaves_servers_behind(program, monkeypatch, number):
    """Nor does an impatient second one. SIGKILL: one of the servers dies."""
    Path(f"{program}.go").unlink()
    monkeypatch.setattr(serve, "toy_model", lambda: "the tiny one")
    pid, output = served()
    said = ""
    while "Ctrl+C stops the servers.\n" not in said:
        line = output.readline()
        assert line, said
        said += line
    servers = psutil.Process(pid).children()
    assert len(servers) == 2 and "vllm_key" in said and "--vllm_server_urls http://127.0.0.1:" in said
    died = servers[: number == signal.SIGKILL]
    os.kill(died[0].pid if died else pid, number)
    wait_until(lambda: all(Path(f"{program}.{server.pid}").exists() for server in servers if server not in died))
    if not died:
        os.kill(pid, number)
    Path(f"{program}.go").touch()
    output.read()
    os.waitpid(pid, 0)
    assert not any(server.is_running() for server in servers)
