"""Several nodes on one machine: `examples/multi_node/`, with real servers and real launches of accelerate.

A node is an address of this machine. The Slurm script runs as it is, with stand-ins for `srun` and `scontrol`.
"""

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from dash_trl.serve import free_ports
from tests import slurm_stand_in
from tests.tiny import read_rows

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]

ROOT = Path(__file__).parents[1]
SECONDS = 900.0  # that ends what hangs, on a busy machine
TRAIN = {
    "dataset_name": "own.jsonl",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "use_cpu": "true",
    "bf16": "false",
    "report_to": "none",
}


class Job:
    """`sbatch slurm.sh` in the folder of `own_folder`, on nodes that are addresses of this machine.

    Attributes:
        commands: the command lines of all its processes, as every user of the machine can read them.
    """

    def __init__(self, folder: Path, nodes: int, **environment: object):
        self.folder, self.name = folder, f"{os.getpid()}"
        self.nodes = [f"127.0.0.{2 + number}" for number in range(nodes)]
        if not (folder / "bin").exists():
            slurm_stand_in.install(folder / "bin")
        server_port, train_port = free_ports(2, 20000 + os.getpid() % 10000)
        settings = {
            "PATH": os.pathsep.join([str(folder / "bin"), str(Path(os.sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": self.name,
            "SLURM_JOB_NODELIST": ",".join(self.nodes),
            "MODEL": folder / "model",
            "SERVERS": 1,
            "PROCESSES": 1,
            "CONFIG": ROOT / "accelerate_configs" / "cpu.yaml",
            "OUTPUT": folder / "output",
            "SERVER_PORT": server_port,
            "TRAIN_PORT": train_port,
            "OMP_NUM_THREADS": 1,
            "CI": 1,
        }
        self.environment = {**os.environ, **{name: str(value) for name, value in (settings | environment).items()}}
        self.commands: set[str] = set()

    def start(self, script: Path = ROOT / "examples" / "train_math.py", **flags: object) -> None:
        self.batch = subprocess.Popen(
            ["bash", str(ROOT / "examples" / "multi_node" / "slurm.sh"), str(script)]
            + [part for name, value in (TRAIN | flags).items() for part in (f"--{name}", str(value))],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        """The exit code, and all that was said."""
        said, _ = self.batch.communicate(timeout=SECONDS)
        assert not slurm_stand_in.processes(self.name)  # nothing is left behind
        logs = sorted((self.folder / "output" / "logs").iterdir())
        return self.batch.returncode, "\n".join([said, *(f"== {log.name}\n{log.read_text()}" for log in logs)])


@pytest.fixture
def job(own_folder):
    made = []

    def make(nodes: int, **environment: object) -> Job:
        made.append(Job(own_folder, nodes, **environment))
        return made[-1]

    yield make
    for one in made:
        one.batch.kill()
        psutil.wait_procs([process for process in slurm_stand_in.processes(one.name) if not process.kill()])


def test_two_nodes_train_on_the_server_of_a_third(job):
    one = job(3)
    one.start()
    code, said = one.end()
    assert code == 0, said
    steps = [row for row in read_rows(one.folder / "output" / "metrics.jsonl") if "filter/kept_rows" in row]
    assert len(steps) == 2, said
    print(said)
