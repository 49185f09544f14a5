"""Waiting for calls, memory of worker processes, and programs; more on calls is in `test_backends.py`."""

import os
import time

import pytest

from dash_trl.workers import Command, ProcessCalls, call_all, default_workers
from tests.launching import ends


def test_ranks_share_the_cpus(monkeypatch):
    monkeypatch.setattr("loky.cpu_count", lambda: 12)
    for ranks, workers in ((None, 8), ("4", 3), ("100", 1)):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert default_workers() == workers


def test_a_worker_whose_memory_cannot_be_limited_works_without_a_limit(tmp_path, monkeypatch):
    """As on macOS, in a real worker: Python runs this file as it starts."""
    refuse = "import resource\nresource.setrlimit = lambda *_: exec('raise ValueError')\n"
    (tmp_path / "sitecustomize.py").write_text(refuse)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    backend = ProcessCalls([os.getpid], 1)
    (process,) = call_all(backend, os.getpid, [{}], timeout=300.0)
    backend.close()
    assert isinstance(process, int) and process != os.getpid()


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_stopping_a_command_ends_its_children_too(tmp_path, seconds):
    script = "sleep 300 & echo $! >> pids; trap '' TERM; echo ready $SPECIAL; wait; sleep 300"
    command = Command(["sh", "-c", f"cd {tmp_path}; {script}"], environment={"SPECIAL": "x"}, log=tmp_path / "log")
    while "ready x" not in (tmp_path / "log").read_text():
        time.sleep(0.01)
    assert command.running
    child = int((tmp_path / "pids").read_text())
    command.stop(seconds=seconds)
    assert not command.running and ends(child)
    command.stop()  # again: nothing to do
