"""Two real processes of which one fails: the error reaches both, and nobody waits for a rank that has gone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from dash_trl.distributed import meet

ROOT = Path(__file__).parents[1]
ALONE = ["sampled", "rewards", "advantages", "too few rewards", "rollout_func", "generation", "markers"]


def launch(output: Path, model: str, *kinds: str) -> subprocess.CompletedProcess:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    run = ["torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    command = [sys.executable, "-m", *run, str(ROOT / "tests" / "failing_run.py"), str(output), model, *kinds]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def failures(tiny_model, tmp_path_factory) -> dict[str, dict[int, str]]:
    done = launch(tmp_path_factory.mktemp("failing"), tiny_model, *ALONE)
    lines = [line.removeprefix("FAILED ") for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, dict[int, str]] = {}
    for rank, kind, failure in map(json.loads, lines):
        found.setdefault(kind, {})[rank] = failure
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ALONE)
def test_what_one_rank_does_alone_fails_on_both(failures, kind):
    error = {"too few rewards": "ValueError: The reward function", "markers": "ValueError: markers="}
    expected = error.get(kind, "KeyError: 'of rank 1'")
    assert failures[kind][1].startswith(expected)
    assert failures[kind][0].startswith(f"RankFailed: Rank 1 failed with {expected}")


@pytest.mark.distributed
def test_a_callback_that_communicates_and_fails_ends_its_process_and_the_launcher_the_others(tiny_model, tmp_path):
    """The other rank is in a collective that will never be complete."""
    done = launch(tmp_path, tiny_model, "communicates")
    assert done.returncode != 0 and "KeyError: 'of rank 1'" in done.stderr and "FAILED" not in done.stdout


def meetings(*failures: str | None) -> list[dict[int, str]]:
    """What each of so many ranks, threads here, is told."""
    store, said = dist.HashStore(), [{}] * len(failures)

    def come(rank: int) -> None:
        said[rank] = meet(store, rank, len(failures), failures[rank], 0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(len(failures))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_every_rank_is_told_what_failed():
    assert meetings(None, None, None) == [{}] * 3
    assert meetings(None, "late", "early") == [{1: "late", 2: "early"}] * 3


def test_a_rank_that_failed_does_not_wait_for_ever_for_the_others():
    assert meet(dist.HashStore(), 1, 2, "alone", 0, patience=0.0) == {1: "alone"}


def test_meetings_leave_nothing_behind():
    store = dist.HashStore()
    for number in range(1, 20):
        assert meet(store, 0, 1, None, number) == {}
    assert store.num_keys() <= 3
