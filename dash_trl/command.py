"""Train, serve and evaluate models with one command. `python -m dash_trl` does the same.

    dash_trl doctor                     shows what works on this machine
    dash_trl train                      runs examples/train_math.py; without flags, it trains a tiny model offline
    dash_trl sft                        runs examples/sft.py
    dash_trl serve MODEL --servers 2    starts vLLM servers
    dash_trl eval MODEL                 measures accuracy and pass@k

`dash_trl COMMAND --help` lists the flags of a command. For `train` and `sft`, it lists the most used flags, and
--help_all lists all flags. These two commands run their scripts by `accelerate launch`, so they also have flags of the
launcher: --accelerate_config (ddp, zero2, zero3, zero3_offload, fsdp2, single_process, cpu, or a file), --num_processes
(default: one for each GPU of this machine, unless the file has a number), --gpu_ids, --num_machines, --machine_rank,
--main_process_ip and --main_process_port.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import psutil

from dash_trl.signals import end, say, set_handlers

GRACE = 10  # seconds that a script has to end after Ctrl-C, until it gets SIGTERM
PACKAGE = Path(__file__).parent
SCRIPTS = {"train": "train_math.py", "sft": "sft.py"}
MODULES = {"serve": "dash_trl.serve", "eval": "dash_trl.evaluation", "doctor": "dash_trl.doctor"}  # with a `main`
# Flags for `accelerate launch`; no script has a flag of the same name. All other flags go to the script.
LAUNCH = ("num_processes", "gpu_ids", "num_machines", "machine_rank", "main_process_ip", "main_process_port")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dash_trl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=[*SCRIPTS, *MODULES])
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the command")
    arguments = parser.parse_args(argv)
    sys.excepthook = say
    if arguments.command in SCRIPTS:
        launch(SCRIPTS[arguments.command], arguments.flags)
        return 0
    return import_module(MODULES[arguments.command]).main(arguments.flags) or 0


def launch(script: str, flags: Sequence[str]) -> None:
    """Run a script of examples/ by `accelerate launch`; `flags` has flags of both. If it fails, this process exits."""
    before = set_handlers(end, end)  # the imports take seconds
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    come: list[int] = []

    def pass_on(number: int, _: object) -> None:
        children = psutil.Process().children()
        if not children:  # not yet, or the script has ended of the same Ctrl-C, and has said so
            os._exit(128 + number)
        if number != signal.SIGALRM:
            come.append(number)
        if number == signal.SIGINT:  # Ctrl-C reaches the script, too; `kill -INT` of this process does not
            signal.alarm(GRACE)
        else:
            for child in children:
                child.terminate()

    set_handlers(pass_on, pass_on)
    signal.signal(signal.SIGALRM, pass_on)
    logging.disable(logging.WARNING)  # the launcher warns of signals and of its defaults
    # The last error on the screen must be the script's, not the launcher's. With one process, --quiet ensures this.
    # With several processes, torch has recorded the script's error, which is printed below.
    try:
        launch_command(launch_command_parser().parse_args(["--quiet", *launch_arguments(script, flags)]))
    except (SystemExit, ChildFailedError, SignalException) as error:
        number = getattr(error, "sigval", None) or next(iter(come), 0)
        sys.exit(128 + number if number else getattr(error, "code", str(error)))
    finally:
        signal.alarm(0)
        set_handlers(*before)
        logging.disable(logging.NOTSET)


def launch_arguments(script: str, flags: Sequence[str]) -> list[str]:
    """Return the arguments of `accelerate launch`: its flags, the script of examples/, and the script's flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--accelerate_config", dest="config_file")
    for name in LAUNCH:
        parser.add_argument(f"--{name}")
    known, others = parser.parse_known_args(flags)
    own = vars(known)
    if "config_file" in own:
        own["config_file"] = accelerate_config(own["config_file"])
        if not {"num_processes", "num_machines"} & own.keys():
            own |= processes(own["config_file"], own.get("gpu_ids"))
    return [
        *(part for name, value in own.items() for part in (f"--{name}", value)),
        str(PACKAGE / "signals.py"),
        str(files("examples") / script),
        *others,
    ]


def accelerate_config(config: str) -> str:
    """Return the path of a configuration of accelerate: a file, or a name in accelerate_configs/."""
    folder = files("accelerate_configs")
    for path in (Path(config), folder / f"{config}.yaml"):
        if path.is_file():
            return str(path)
    names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise ValueError(f"accelerate_config={config!r} is neither a file nor one of {names}.")


def processes(config_file: str, gpu_ids: str | None) -> dict[str, str]:
    """Return --num_processes for one process per GPU; {} if the configuration has a number, or several machines."""
    import torch
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(config_file)
    if config.num_processes != -1 or config.num_machines > 1:
        return {}
    ids = gpu_ids or config.gpu_ids or "all"
    # Without a GPU, one process starts, and its error says that there is no GPU.
    return {"num_processes": str(max(torch.cuda.device_count(), 1) if ids == "all" else len(ids.split(",")))}


def files(folder: str) -> Path:
    """Return the path of a folder of the project, which is in the installed package or, in a checkout, next to it."""
    carried = PACKAGE / folder
    return carried if carried.is_dir() else PACKAGE.parent / folder
