"""Several nodes on one machine: `examples/multi_node/`, with real servers and real launches of accelerate.

A node is an address of this machine. The Slurm script runs as it is, with stand-ins for `srun` and `scontrol`.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dash_trl import RewardRunner
from dash_trl.serve import free_ports
from tests import slurm_stand_in
from tests.tiny import read_rows
from tests.vllm_run import wait_until

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "multi_node" / "slurm.sh"
SECONDS = 900.0  # that ends what hangs, on a busy machine
LOOK = 1.0  # seconds between looks at the processes
REWARD = '''
import os, time
from pathlib import Path

def reward(completion, completion_ids, **columns):
    """By chance, so that groups have signal. The second training node waits, when it is told so."""
    while os.environ["SLURM_PROCID"] == "1" and Path("wait").exists() and Path("output/checkpoint-2").exists():
        time.sleep(0.1)
    return float(sum(completion_ids) % 7)
'''
TRAIN = {
    "dataset_name": "own.jsonl",
    "reward_path": "own_reward.py",
    "reward_name": "reward",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": 2,
    "save_steps": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "use_cpu": "true",
    "bf16": "false",
    "report_to": "none",
}


class Job:
    """`sbatch slurm.sh` on nodes that are addresses of this machine; `start` once more is `scontrol requeue`.

    Attributes:
        commands: the command lines of all processes of the machine during the job; every user can read them.
        keys: the server keys in the environments of the job's processes.
    """

    def __init__(self, folder: Path, nodes: int, **settings: object):
        self.folder, self.number, self.log = folder, str(os.getpid()), folder / "batch.log"
        self.nodes = [f"127.0.0.{2 + number}" for number in range(nodes)]
        server_port, train_port = free_ports(2, 20000 + os.getpid() % 10000)
        defaults = {
            "PATH": os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
            "SLURM_JOB_ID": self.number,
            "SLURM_JOB_NODELIST": ",".join(self.nodes),
            "MODEL": "model",
            "SERVERS": 1,
            "PROCESSES": 1,
            "CONFIG": ROOT / "accelerate_configs" / "cpu.yaml",
            "OUTPUT": "output",
            "SERVER_PORT": server_port,
            "TRAIN_PORT": train_port,
            "OMP_NUM_THREADS": 1,
            "CI": 1,
        }
        self.environment = {**os.environ, **{name: str(value) for name, value in (defaults | settings).items()}}
        self.environment.pop("VLLM_API_KEY", None)
        self.commands: set[str] = set()
        self.keys: set[str] = set()
        self.batch: subprocess.Popen[bytes] | None = None

    def start(self, script: str = "tests/multi_node_run.py", **flags: object) -> None:
        arguments = [part for name, value in (TRAIN | flags).items() for part in (f"--{name}", str(value))]
        with self.log.open("ab") as log:
            self.batch = subprocess.Popen(
                ["bash", str(SCRIPT), str(ROOT / script), *arguments],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def look(self) -> bool:
        """Records the commands and keys of processes; returns whether the job still runs."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                self.commands.add(" ".join(process.cmdline()))
        for process in slurm_stand_in.processes(self.number):
            with suppress(psutil.Error):
                self.keys |= {process.environ().get("VLLM_API_KEY")} - {None}  # vLLM renames processes, over theirs
        time.sleep(LOOK)
        return self.batch.poll() is None

    def wait_for(self, condition: Any) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert self.look() and time.monotonic() < end, self.said()

    def end(self) -> int:
        """Waits for the end of the job; checks that no process is left, and returns the exit code."""
        end = time.monotonic() + SECONDS
        while self.look():
            assert time.monotonic() < end, self.said()
        assert not slurm_stand_in.processes(self.number)
        return self.batch.returncode

    def kill(self, node: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to all processes of a node."""
        for process in slurm_stand_in.processes(self.number, node):
            with suppress(psutil.Error):
                process.send_signal(number)

    def said(self) -> str:
        logs = [self.log, *sorted((self.folder / "output" / "logs").glob("*"))]
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)

    def steps(self) -> list[dict]:
        return [row for row in read_rows(self.folder / "output" / "metrics.jsonl") if "filter/kept_rows" in row]


@pytest.fixture
def job_with_vllm_servers(own_folder):
    """Makes jobs, whose last nodes have real servers."""
    slurm_stand_in.install(own_folder / "bin")
    (own_folder / "own_reward.py").write_text(REWARD)
    made: list[Job] = []

    def make(nodes: int, **settings: object) -> Job:
        made.append(Job(own_folder, nodes, **settings))
        return made[-1]

    yield make
    for one in made:
        if one.batch is not None:
            one.batch.kill()
        for process in slurm_stand_in.processes(one.number):
            with suppress(psutil.Error):
                process.kill()


def differences(steps: list[dict]) -> list[float]:
    """Of the sampler's log-probs and the trainer's, the means of each step."""
    return [step["sampling/sampling_logp_difference/mean"] for step in steps]


def test_the_slurm_script_trains_on_two_nodes_with_a_server_on_a_third(job_with_vllm_servers):
    one = job_with_vllm_servers(3)
    one.start("examples/train_math.py")
    assert one.end() == 0, one.said()
    steps = one.steps()
    assert len(steps) == 2 and max(differences(steps)) < 1e-4, one.said()
    checkpoint = one.folder / "output" / "checkpoint-2"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {file.name for file in checkpoint.iterdir()}
    logs = {log.name for log in (one.folder / "output" / "logs").iterdir()}
    assert logs == {"servers-0.log", "training-0.log", "training-1.log"}
    (key,) = one.keys
    assert len(key) == 64 and key not in one.said() and not any(key in command for command in one.commands)
    assert any("--machine_rank 1" in command for command in one.commands)


# ------------------------------------------------------------------------------------------------- failures


@pytest.mark.exhaustive
@pytest.mark.parametrize("node", [1, 2], ids=["a trainer", "a server"])
def test_a_node_that_is_killed_ends_the_job(job_with_vllm_servers, node):
    """With its processes, as far as the others can see; those of the other roles end, too."""
    one = job_with_vllm_servers(3)
    (one.folder / "wait").touch()
    one.start(max_steps=4)
    one.wait_for((one.folder / "output" / "checkpoint-2" / "trainer_state.json").exists)
    one.kill(one.nodes[node])
    assert one.end() != 0
    role = "servers" if node == 2 else "training"
    assert f"The job ends: {role} ended with exit code 137. Read output/logs/{role}-*.log" in one.said(), one.said()


@pytest.mark.exhaustive
def test_a_node_that_hangs_ends_the_job_which_resumes_on_another_number_of_nodes(job_with_vllm_servers):
    """One window ahead, with two nodes of servers; then on half of the nodes, with windows as large as before."""
    one = job_with_vllm_servers(4, SERVER_NODES=2)
    (one.folder / "wait").touch()
    flags = {"async_level": 1, "max_steps": 4, "ddp_timeout": 120}
    one.start(**flags)
    one.wait_for((one.folder / "output" / "checkpoint-2" / "trainer_state.json").exists)
    one.kill(one.nodes[1], signal.SIGSTOP)
    assert one.end() != 0
    said = one.said()
    assert "The job ends: training ended with exit code 1" in said, said
    assert re.search(r"RankFailed: Rank \d has waited 120 s \(ddp_timeout\) for the ranks \[\d\]", said), said

    (one.folder / "wait").unlink()
    one.start(**flags)
    assert one.end() == 0, one.said()
    assert "Resuming from output/checkpoint-2" in one.said()
    assert [step["step"] for step in one.steps()] == [1, 2, 3, 4] and differences(one.steps())[0] < 1e-4

    half = job_with_vllm_servers(2)
    half.start(**flags | {"max_steps": 6, "gradient_accumulation_steps": 4})
    assert half.end() == 0, half.said()
    assert "processes=2 (now 1)" in half.said() and "training goes on with a new generation window" in half.said()
    assert [step["step"] for step in half.steps()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.exhaustive
def test_zero3_trains_on_two_nodes_and_its_checkpoint_is_refused_on_one(job_with_vllm_servers):
    config = ROOT / "tests" / "accelerate" / "zero3.yaml"
    one = job_with_vllm_servers(4, SERVER_NODES=2, CONFIG=config)
    one.start(async_level=1)
    assert one.end() == 0, one.said()
    assert [step["async/staleness_max"] for step in one.steps()] == [0, 1] and differences(one.steps())[0] < 1e-4

    half = job_with_vllm_servers(2, CONFIG=config)
    half.start(async_level=1, max_steps=4, gradient_accumulation_steps=4)
    assert half.end() != 0
    assert "checkpoint-2 was saved by 2 processes, and now there are 1. Under ZeRO" in half.said(), half.said()


# ------------------------------------------------------------------------------------------------- Ray


@pytest.mark.exhaustive
def test_rewards_on_a_ray_cluster_outlive_one_of_its_nodes(tmp_path, monkeypatch):
    """While rows are computed there: they are computed on the other node."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    import ray
    from ray._private import ray_constants

    def score(number: int, completion: str) -> float:
        (tmp_path / f"{os.environ['NODE']}-{number}").write_text(str(os.getpid()))
        while not (tmp_path / "go").exists():
            time.sleep(0.05)
        return float(number)

    def begun(node: str) -> list[Path]:
        return list(tmp_path.glob(f"{node}-*"))

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)  # in spite of its name: on 127.0.0.1 alone
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "0")
    here = {"num_cpus": 1, "include_dashboard": False}
    cluster = cluster_utils.Cluster()
    try:
        cluster.add_node(**here, env_vars={"NODE": "first"})
        second = cluster.add_node(**here, env_vars={"NODE": "second"})
        cluster.connect()
        rows = [{"completion": "", "number": number} for number in range(8)]
        with RewardRunner(score, backend="ray", timeout=SECONDS) as runner:
            request = runner.submit(rows)
            wait_until(lambda: begun("first") and begun("second"), SECONDS)
            cluster.remove_node(second, allow_graceful=False)
            wait_until(lambda: not any(psutil.pid_exists(int(path.read_text())) for path in begun("second")), SECONDS)
            (tmp_path / "go").touch()
            request.wait()
        assert [one.value for one in request.outcomes[0]] == [float(number) for number in range(8)]
        assert len(begun("first")) == 8
    finally:
        ray.shutdown()
        cluster.shutdown()
