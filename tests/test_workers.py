"""What limits worker processes, threads for waiting in, and programs; workers are also tested with the math reward."""

import asyncio
import os
import select
import threading
import time

import pytest

from dash_trl.workers import Command, EventLoop, Feeder, ProcessCalls, call_all


def ends(process: int) -> bool:
    """Whether a process has gone, or goes by itself, though init may not have reaped it yet."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    gone = bool(select.select([handle], [], [], 60)[0])
    os.close(handle)
    return gone


def test_calls_whose_outcomes_are_lost_end_all_the_same(monkeypatch):
    """Here every other one never reaches its backend."""
    monkeypatch.setattr("dash_trl.workers.calls.LAST_SECONDS", 0.0)

    def submit(calls):
        for call in calls[::2]:
            call.finish(7)

    made = call_all(submit, int, [{}] * 4, timeout=0.1)
    assert [call.value for call in made] == [7, None, 7, None]
    assert all("its outcome was lost" in str(call.error) for call in made[1::2])


def test_a_worker_whose_memory_cannot_be_limited_works_without_a_limit(tmp_path, monkeypatch):
    """As on macOS, in a real worker: Python runs this file as it starts."""
    refuse = "import resource\nresource.setrlimit = lambda *_: exec('raise ValueError')\n"
    (tmp_path / "sitecustomize.py").write_text(refuse)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    backend = ProcessCalls(1)
    (call,) = call_all(backend.submit, os.getpid, [{}], timeout=300.0)
    backend.close()
    assert call.error is None and call.value != os.getpid()


def test_a_feeder_consumes_in_order_and_returns_the_value():
    feeder = Feeder(list, ahead=2, timeout=300.0)
    for i in range(10):
        feeder.put(i)
    assert feeder.finish() == list(range(10))


def test_a_feeder_s_failure_is_raised_where_it_is_fed():
    """By a put that waits for room, at once and not after its time-out, and by each one after it."""
    waiting = threading.Event()

    def consume(items):
        next(items)
        waiting.wait()
        time.sleep(0.05)
        raise RuntimeError("the link is down")

    feeder = Feeder(consume, ahead=1, timeout=60.0)
    feeder.put(0)
    feeder.put(1)
    waiting.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the link is down"):
            feeder.put(2)


def test_a_feeder_that_hangs_costs_its_timeout():
    feeder = Feeder(lambda items: threading.Event().wait(), ahead=1, timeout=0.1)
    feeder.put(0)
    with pytest.raises(TimeoutError, match=r"nothing was consumed for 0.1 s"):
        feeder.put(1)
    ended = Feeder(lambda items: threading.Event().wait(), ahead=1, timeout=0.1)
    with pytest.raises(TimeoutError):
        ended.finish()


def test_the_event_loop_works_inside_another_one_and_relays_errors():
    before = set(threading.enumerate())
    loop = EventLoop()
    (thread,) = set(threading.enumerate()) - before

    async def fail():
        await asyncio.sleep(0)
        raise KeyError("x")

    async def notebook():
        return loop.run(asyncio.sleep(0, result=7))

    assert asyncio.run(notebook()) == 7
    with pytest.raises(KeyError):
        loop.run(fail())
    closed = []

    async def last():
        closed.append(True)

    loop.close(last)
    assert closed == [True]
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("at_once", [False, True])
def test_stopping_a_command_ends_its_children_too(tmp_path, at_once, monkeypatch):
    script = "sleep 300 & echo $! >> pids; trap '' TERM; echo ready $SPECIAL; wait; sleep 300"
    command = Command(["sh", "-c", f"cd {tmp_path}; {script}"], environment={"SPECIAL": "x"}, log=tmp_path / "log")
    while "ready x" not in (tmp_path / "log").read_text():
        time.sleep(0.01)
    assert command.running
    child = int((tmp_path / "pids").read_text())
    monkeypatch.setattr("dash_trl.workers.processes.STOP_SECONDS", 0.2)
    command.stop(at_once=at_once)
    assert not command.running and ends(child)
    command.stop()  # again: nothing to do
