"""Several nodes on one machine: `examples/multi_node/`, with real servers and real launches of accelerate.

A node is an address of this machine. The Slurm script runs as it is, with stand-ins for `srun` and `scontrol`.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dash_trl.serve import free_ports
from tests import slurm_stand_in
from tests.launching import ROOT, flags
from tests.tiny import read_rows

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
}


class Job:
    """`sbatch slurm.sh` on three nodes, addresses of this machine; `start` once more is `scontrol requeue`.

    Attributes:
        commands: the command lines of all processes of the machine during the job; every user can read them.
        keys: the server keys in the environments of the job's processes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.number = str(os.getpid())
        self.log = folder / "batch.log"
        self.nodes = [f"127.0.0.{2 + number}" for number in range(3)]
        server_port, train_port = free_ports(2, 20000 + os.getpid() % 10000)
        settings = {
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
        self.environment = {**os.environ, **{name: str(value) for name, value in settings.items()}}
        self.environment.pop("VLLM_API_KEY", None)
        self.commands: set[str] = set()
        self.keys: set[str] = set()
        self.batch = None

    def start(self, **changes: object) -> None:
        script = [SCRIPT, ROOT / "examples" / "train_math.py"]
        with self.log.open("ab") as log:
            self.batch = subprocess.Popen(
                ["bash", *script, *flags(TRAIN | changes)],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, condition) -> None:
        """Waits, and records the commands and keys of processes."""
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, self.said()
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    self.commands.add(" ".join(process.cmdline()))
            for process in slurm_stand_in.processes(self.number):
                with suppress(psutil.Error):
                    self.keys |= {process.environ().get("VLLM_API_KEY")} - {None}  # vLLM renames processes over theirs
            time.sleep(LOOK)

    def end(self) -> int:
        """Waits for the end of the job; checks that no process is left, and returns the exit code."""
        self.wait_for(lambda: self.batch.poll() is not None)
        assert not slurm_stand_in.processes(self.number)
        return self.batch.returncode

    def kill(self, node: str = "") -> None:
        """Kills the processes of a node, or of all nodes."""
        for process in slurm_stand_in.processes(self.number, node):
            with suppress(psutil.Error):
                process.kill()

    def said(self) -> str:
        logs = [self.log, *sorted((self.folder / "output" / "logs").glob("*"))]
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)

    def steps(self) -> list[dict]:
        return [row for row in read_rows(self.folder / "output" / "metrics.jsonl") if "filter/kept_rows" in row]


@pytest.fixture
def job_with_vllm_servers(own_folder):
    """A job whose last node has a real server."""
    slurm_stand_in.install(own_folder / "bin")
    (own_folder / "own_reward.py").write_text(REWARD)
    job = Job(own_folder)
    yield job
    job.batch.kill()
    job.kill()


def test_the_slurm_script_trains_on_two_nodes_with_a_server_on_a_third(job_with_vllm_servers):
    one = job_with_vllm_servers
    one.start()
    assert one.end() == 0, one.said()
    differences = [step["sampling/sampling_logp_difference/mean"] for step in one.steps()]
    assert len(differences) == 2 and max(differences) < 1e-4, one.said()
    checkpoint = one.folder / "output" / "checkpoint-2"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {file.name for file in checkpoint.iterdir()}
    logs = {log.name for log in (one.folder / "output" / "logs").iterdir()}
    assert logs == {"servers-0.log", "training-0.log", "training-1.log"}
    (key,) = one.keys
    assert len(key) == 64 and key not in one.said() and not any(key in command for command in one.commands)
    assert any("--machine_rank 1" in command for command in one.commands)


@pytest.mark.exhaustive
@pytest.mark.parametrize("node", [1, 2], ids=["a trainer", "a server"])
def test_a_node_that_is_killed_ends_the_job_which_resumes(job_with_vllm_servers, node):
    """Its processes end as far as the others can see; those of the other roles end, too. One window ahead."""
    one = job_with_vllm_servers
    (one.folder / "wait").touch()
    one.start(max_steps=4, async_level=1)
    one.wait_for((one.folder / "output" / "checkpoint-2" / "trainer_state.json").exists)
    one.kill(one.nodes[node])
    assert one.end() != 0
    role = "servers" if node == 2 else "training"
    assert f"The job ends: {role} ended with exit code 137. Read output/logs/{role}-*.log" in one.said(), one.said()
    (one.folder / "wait").unlink()
    one.start(max_steps=4, async_level=1)
    assert one.end() == 0, one.said()
    assert "Resuming in output" in one.said()
    assert [step["step"] for step in one.steps()] == [1, 2, 3, 4]
