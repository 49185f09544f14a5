"""Stand-ins for Slurm's commands, on one machine: a node is an address of it, 127.0.0.2 and on, and its processes.

`scontrol show hostnames A,B` prints the nodes of a list; `srun` runs a task on each of `--nodelist`, with its log, and
ends the others if one fails. The processes of a node are found by a variable of their environment, wherever they have
put themselves, as Slurm finds them by their cgroup.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

NODE = "SLURM_STAND_IN_NODE"  # of a process: the number of the job and the node
KILL_SECONDS = 20.0  # from SIGTERM to SIGKILL, as Slurm's KillWait


def install(folder: Path) -> None:
    """Writes the commands into a folder for PATH."""
    folder.mkdir()
    for name in ("srun", "scontrol"):
        command = folder / name
        paths = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        run = f"from tests.slurm_stand_in import {name}\nsys.exit({name}(sys.argv[1:]))\n"
        command.write_text(f"#!{sys.executable}\n{paths}{run}")
        command.chmod(0o755)


def scontrol(arguments: list[str]) -> int:
    show, hostnames, nodes = arguments
    assert (show, hostnames) == ("show", "hostnames")
    print("\n".join(nodes.split(",")))
    return 0


def processes(job: str, node: str = "") -> list[psutil.Process]:
    """What runs on a node, or on all nodes of a job."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            own = process.environ().get(NODE, "")
            if own == f"{job}-{node}" or (not node and own.startswith(f"{job}-")):
                found.append(process)
    return found


def srun(arguments: list[str]) -> int:
    options = {}
    while arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).removeprefix("--").partition("=")
        options[name] = value
    job = os.environ["SLURM_JOB_ID"]
    nodes = options["nodelist"].split(",")
    assert options["nodes"] == options["ntasks"] == str(len(nodes)) and options["export"] == "ALL"
    tasks = [begin(f"{job}-{node}", rank, arguments, options) for rank, node in enumerate(nodes)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        while None in [task.poll() for task in tasks]:
            if any(task.returncode for task in tasks) and options.get("kill-on-bad-exit") == "1":
                break
            time.sleep(0.1)
        codes = [task.returncode or 0 for task in tasks]
        return max(code if code >= 0 else 128 - code for code in codes)
    finally:
        end(job, nodes)


def begin(name: str, rank: int, command: list[str], options: dict[str, str]) -> subprocess.Popen:
    environment = {**os.environ, NODE: name, "SLURM_PROCID": str(rank)}
    mode = "ab" if options["open-mode"] == "append" else "wb"
    with open(options["output"].replace("%t", str(rank)), mode) as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def end(job: str, nodes: list[str]) -> None:
    """SIGTERM to all processes of the nodes, and SIGKILL to those that are left."""
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        left = [process for node in nodes for process in processes(job, node)]
        for process in left:
            with suppress(psutil.Error):
                stop(process)
        psutil.wait_procs(left, KILL_SECONDS)
