"""Start vLLM servers with the flags that `DASHTrainer` needs, and stop them together.

Examples::

    python -m dash_trl.serve Qwen/Qwen2.5-0.5B-Instruct --servers 2
    python -m dash_trl.serve toy                     # the tiny model of `make demo`
    python -m dash_trl.serve MODEL --servers 2 --max-model-len 4096 --dtype bfloat16   # more options for `vllm serve`
    python -m dash_trl.serve MODEL --enable-lora --max-lora-rank 16     # LoRA: only the adapter is sent

The command prints the option `--vllm_server_urls …`. Append it to the training command. Options that the command does
not know are passed to `vllm serve`.

All endpoints require a key. If the environment variable VLLM_API_KEY is set, its value is the key; set the variable for
the trainer, too. Otherwise a key is created in a file, where trainers of the same user find it. The servers listen on
127.0.0.1. `--host` opens them to other machines and requires VLLM_API_KEY.

Each server gets an equal share of the visible GPUs and uses its share for tensor parallelism. If the model's
attention heads cannot be split over this number of GPUs, vLLM refuses to start. Then start more servers, or set
`--tensor-parallel-size`.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import torch

from dash_trl.sampling import (
    API_KEY,
    MIDDLEWARE,
    WORKER_EXTENSION,
    is_loopback,
    is_unspecified,
    key_file,
    key_header,
    own_key,
)
from dash_trl.workers import Command

HOST, FIRST_PORT = "127.0.0.1", 8000
STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READY_SECONDS = 600.0  # a large model may have to be loaded from a slow disk, and compiled
CPU_CACHE_GIB = "1"  # size of the KV cache; by default vLLM takes most of a CPU machine's memory
# Number of sequences that a server on a CPU samples at once, equal to vLLM's default on a GPU. In preemptive sampling,
# a window may have more rows than vLLM's default on a CPU, 128, so that some rows would have to wait.
CPU_SEQUENCES = 256
# No proxy is used, because the servers are on this machine: a proxy would look for 127.0.0.1 on the proxy's machine.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Servers:
    """Context manager that starts vLLM servers on entry and stops them on exit.

    Args:
        model: a hub name or a directory.
        count: number of servers, each of which gets an equal share of the visible GPUs.
        host: address at which the servers listen.
        port: port of the first server; the others take the next free ports.
        options: more arguments for `vllm serve`, which override the arguments of `flags`.

    Attributes:
        key: API key of the servers.
        devices: for each server, its GPUs as `CUDA_VISIBLE_DEVICES` names them; empty on a CPU.
        ports: port of each server.
        logs: folder with the servers' logs.
        commands: the servers' processes.

    Raises:
        ValueError: if there are more servers than GPUs; if vLLM is not installed; if other machines can reach `host`,
            but VLLM_API_KEY is not set.
        OSError: if `host` is not an address of this machine.
    """

    def __init__(
        self, model: str, count: int = 1, *, host: str = HOST, port: int = FIRST_PORT, options: Sequence[str] = ()
    ):
        gpus = visible_gpus()
        share = len(gpus) // count
        if gpus and not share:
            raise ValueError(f"servers={count}, but only {len(gpus)} GPUs are visible. Start at most one per GPU.")
        if not is_loopback(host) and not os.environ.get(API_KEY):
            raise ValueError(
                f"--host {host} opens the servers to other machines, which could read or replace the model. Set the "
                f"environment variable {API_KEY} for the servers and the trainer, or use a tunnel to {HOST}."
            )
        self.key = own_key()
        self.model, self.options, self.program = model, list(options), vllm_program()
        self.devices = [gpus[number * share : (number + 1) * share] for number in range(count)]
        self.host, self.ports, self.commands = host, free_ports(count, port, host), list[Command]()
        self.logs = Path(tempfile.mkdtemp(prefix="dash_trl_serve_"))

    @property
    def urls(self) -> list[str]:
        """URLs of the servers, for clients on this machine."""
        host = HOST if is_unspecified(self.host) else self.host
        return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for port in self.ports]

    def __enter__(self) -> Servers:
        self.commands = [self.start(number) for number in range(len(self.ports))]
        return self

    def __exit__(self, *exception: object) -> None:
        for command in self.commands:
            command.terminate()
        for command in self.commands:
            command.stop()

    def start(self, number: int) -> Command:
        """Start one server.

        Args:
            number: number of the server, from 0.
        """
        environment = {"VLLM_SERVER_DEV_MODE": "1", API_KEY: self.key}
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # otherwise vLLM ignores our plugin's `Resolver`
        gpus = self.devices[number]
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        else:
            own = {"VLLM_CPU_KVCACHE_SPACE": CPU_CACHE_GIB, "VLLM_CPU_OMP_THREADS_BIND": cores(number, len(self.ports))}
            environment |= {name: os.environ.get(name, value) for name, value in own.items()}
        return Command(
            [self.program, "serve", self.model, *flags(self.host, self.ports[number], len(gpus), self.options)],
            environment=environment,
            log=self.logs / f"server_{number}.log",
        )

    def wait_until_ready(self) -> None:
        """Wait until every server answers.

        Raises:
            RuntimeError: if a server ends before it is ready, or is not ready after `READY_SECONDS`. The message
                contains the last lines of the server's log.
        """
        deadline = time.monotonic() + READY_SECONDS
        for url, command in zip(self.urls, self.commands, strict=True):
            while not command.running or not answers(f"{url}/health"):  # another program may have taken the port
                if not command.running or time.monotonic() > deadline:
                    end = "\n".join(command.log.read_text(errors="replace").splitlines()[-15:])
                    raise RuntimeError(f"The server {url} did not start. The end of {command.log}:\n{end}")
                time.sleep(0.5)


def flags(host: str, port: int, gpus: int, options: Sequence[str]) -> list[str]:
    """Return the arguments after `vllm serve MODEL`. The user's options come last and override ours.

    Args:
        host: address at which the server listens.
        port: port of the server.
        gpus: number of GPUs that share the model; 0 on a CPU.
        options: the user's options.
    """
    chosen = ["--host", host, "--port", str(port), "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    chosen += ["--worker-extension-cls", WORKER_EXTENSION, "--middleware", MIDDLEWARE]
    if gpus:
        chosen += ["--tensor-parallel-size", str(gpus)]
    else:
        # In bfloat16, log-probs would differ from the trainer's by 1e-3 and more. Without `--enforce-eager` vLLM needs
        # a compiler, which most CPU machines lack.
        chosen += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(CPU_SEQUENCES)]
    return [*chosen, *options]


def vllm_program() -> str:
    """Return the path of the command `vllm`.

    The command in the folder of this Python is preferred, because its environment may not be activated.

    Raises:
        ValueError: if vLLM is not installed.
    """
    program = shutil.which("vllm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        remedy = (
            f"Run `{sys.executable} -m pip install 'trl[vllm]'`."
            if torch.cuda.is_available()
            else "This machine has no GPU, which vLLM from `pip install` needs. On Linux x86-64, `make test` in a "
            "checkout of dash_trl installs vLLM's CPU build into .venv (docs/howto/vllm.md)."
        )
        raise ValueError(f"vLLM is not installed in the environment of {sys.executable}. {remedy}")
    return program


def visible_gpus() -> list[str]:
    """Return the visible GPUs as `CUDA_VISIBLE_DEVICES` names them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def cores(number: int, count: int) -> str:
    """Return the CPU cores of one server, such as "0,1". Servers on the same cores would slow each other down.

    Args:
        number: number of the server, from 0.
        count: number of servers.
    """
    if not hasattr(os, "sched_getaffinity"):
        return "nobind"  # vLLM's word; macOS does not bind threads to cores
    available = sorted(os.sched_getaffinity(0))
    share = max(1, len(available) // count)
    return ",".join(str(available[(number * share + i) % len(available)]) for i in range(share))


def free_ports(count: int, first: int, host: str = HOST) -> list[int]:
    """Return the next free ports.

    Args:
        count: number of ports.
        first: first port to try.
        host: address at which the ports have to be free.

    Raises:
        OSError: if `host` is not an address of this machine.
    """
    ports: list[int] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while len(ports) < count:
        try:
            socket.create_server((host, first), family=family).close()
            ports.append(first)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        first += 1
    return ports


def answers(url: str) -> bool:
    """Return whether a GET request succeeds.

    Args:
        url: URL of a server.
    """
    try:
        read(url, timeout=5)
    except OSError:
        return False
    return True


def read(url: str, *, timeout: float = 10.0) -> str:
    """Send a GET request with the API key, and return the answer.

    Args:
        url: URL of a server.
        timeout: seconds.

    Raises:
        OSError: if the request does not succeed.
    """
    with DIRECT.open(urllib.request.Request(url, headers=key_header(url)), timeout=timeout) as response:
        return response.read().decode()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        argv: command line arguments; None: the arguments of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dash_trl.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a hub name, a directory, or 'toy'")
    parser.add_argument("--servers", type=int, default=1, help="number of servers; the visible GPUs are split evenly")
    parser.add_argument("--host", default=HOST, help="address at which the servers listen")
    parser.add_argument("--port", type=int, default=FIRST_PORT, help="port of the first server; others take the next")
    arguments, options = parser.parse_known_args(argv)
    model = arguments.model
    vllm_program()  # checked before the warm-up of the toy model, which takes a minute
    if model == "toy":
        from dash_trl.toy import toy_model

        model = toy_model()
    for number in STOPPED_BY[1:]:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda *_: sys.exit("Stopped."))  # so that `Servers` stops the servers
    with Servers(model, arguments.servers, host=arguments.host, port=arguments.port, options=options) as servers:
        print(f"Starting vLLM, logs: {servers.logs}", flush=True)
        if not os.environ.get(API_KEY):
            print(f"Trainers of this user find the servers' key in {key_file()}.", flush=True)
        try:
            servers.wait_until_ready()
            print(f"Ready. Train with:\n\n    --vllm_server_urls {' '.join(servers.urls)}\n")
            print("Ctrl+C stops the servers.", flush=True)
            while all(command.running for command in servers.commands):
                time.sleep(1.0)
            sys.exit(f"A server has ended, so all are stopped. The logs are in {servers.logs}.")
        except KeyboardInterrupt:
            print("\nStopping the servers.")
        finally:
            for number in STOPPED_BY:  # because a second Ctrl+C would leave servers running
                signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
