"""Start vLLM servers for `DASHTrainer`, with the flags that it needs, and stop them together.

    python -m dash_trl.serve Qwen/Qwen2.5-0.5B-Instruct --servers 2
    python -m dash_trl.serve toy                     # the tiny model of `make demo`
    python -m dash_trl.serve MODEL --servers 2 --max-model-len 4096 --dtype bfloat16     # the rest goes to `vllm serve`
    python -m dash_trl.serve MODEL --enable-lora --max-lora-rank 16     # LoRA: only the adapter is sent

Prints the `--vllm_server_urls …` to paste behind the training command. All endpoints require a key: the environment
variable VLLM_API_KEY, to be set for the trainer, too; without it one that is made, and that trainers of the same user
find in a file. The servers listen on 127.0.0.1; `--host` opens them to others, and needs VLLM_API_KEY.

Each server gets an equal share of the visible GPUs and uses all of it for tensor parallelism. vLLM refuses a number of
GPUs over which the model's heads do not split: start more servers, or give `--tensor-parallel-size`.
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
READY_SECONDS = 600.0  # a large model is loaded from a slow disk, and compiled
CPU_CACHE_GIB = "1"  # of keys and values; vLLM's default on a CPU is most of the memory
CPU_SEQUENCES = (
    256  # side by side, vLLM's default on a GPU; on a CPU it is 128, and a preemptive batch would wait in line
)
# The servers are on this machine: the proxies of `http_proxy` would look for 127.0.0.1 on their own.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Servers:
    """`count` running vLLM servers; a context manager that stops them.

    Args:
        model: a hub name or a directory.
        count: servers, each on an equal share of the visible GPUs.
        host: where they listen. port: the first one; the others take the next free ones.
        options: more arguments of `vllm serve`; they win over ours.
    Raises:
        ValueError: fewer GPUs than servers, vLLM is not installed, or there is no key (see `own_key`; VLLM_API_KEY, if
            `host` is open to others).
        OSError: a host that is not this machine's.
        RuntimeError: a server ended before it was ready, with the end of its log.
    """

    def __init__(
        self, model: str, count: int = 1, *, host: str = HOST, port: int = FIRST_PORT, options: Sequence[str] = ()
    ):
        if count < 1:
            raise ValueError(f"servers={count}: start at least one.")
        program, gpus = vllm_program(), visible_gpus()
        share = len(gpus) // count
        if gpus and not share:
            raise ValueError(f"servers={count}, but only {len(gpus)} GPUs are visible: start at most one for each.")
        if not is_loopback(host) and not os.environ.get(API_KEY):
            raise ValueError(
                f"--host {host} opens the servers to others, who could replace or read the model. Set the environment "
                f"variable {API_KEY} for the servers and the trainer, or use a tunnel to {HOST}."
            )
        if any(option.partition("=")[0].replace("_", "-") == "--api-key" for option in options):
            raise ValueError(
                f"--api-key shows the key to every user of this machine, who can read command lines. Set the "
                f"environment variable {API_KEY} for the servers and the trainer."
            )
        self.key = own_key()
        self.model, self.options, self.program = model, list(options), program
        self.devices = [gpus[number * share : (number + 1) * share] for number in range(count)]
        self.host, self.ports = host, free_ports(count, port, host)
        self.logs = Path(tempfile.mkdtemp(prefix="dash_trl_serve_"))
        self.commands: list[Command] = []

    @property
    def urls(self) -> list[str]:
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
        """One of the servers, at its address."""
        environment = {"VLLM_SERVER_DEV_MODE": "1", API_KEY: self.key}
        if "--enable-lora" in self.options:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # else vLLM asks nobody for an adapter
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
        """Until every server answers; raises with the end of its log if one ends before that."""
        deadline = time.monotonic() + READY_SECONDS
        for url, command in zip(self.urls, self.commands, strict=True):
            while not answers(f"{url}/health"):
                if not command.running or time.monotonic() > deadline:
                    end = "\n".join(command.log.read_text(errors="replace").splitlines()[-15:])
                    raise RuntimeError(f"The server {url} did not start. The end of {command.log}:\n{end}")
                time.sleep(0.5)


def flags(host: str, port: int, gpus: int, options: Sequence[str]) -> list[str]:
    """The arguments behind `vllm serve MODEL`; the user's own come last and win.

    Args:
        gpus: that share the model; 0 on a CPU.
    """
    chosen = ["--host", host, "--port", str(port), "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    chosen += ["--worker-extension-cls", WORKER_EXTENSION, "--middleware", MIDDLEWARE]
    if gpus:
        chosen += ["--weight-transfer-config", '{"backend": "nccl"}', "--tensor-parallel-size", str(gpus)]
    else:
        # float32: in bfloat16 log-probs differ by 1e-3 and more. Eager: most CPU machines lack a compiler.
        chosen += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(CPU_SEQUENCES)]
    return [*chosen, *options]


def vllm_program() -> str:
    """Path of the command `vllm`: first the one beside Python, whose environment may not be activated."""
    program = shutil.which("vllm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        remedy = (
            f"Run `{sys.executable} -m pip install 'trl[vllm]'`."
            if torch.cuda.is_available()
            else "This machine has no GPU, which the vLLM of `pip install` needs. On Linux x86-64, `make test` in a "
            "checkout of dash_trl installs vLLM's CPU build into .venv (docs/vllm.md)."
        )
        raise ValueError(f"vLLM is not installed in the environment of {sys.executable}. {remedy}")
    return program


def visible_gpus() -> list[str]:
    """As `CUDA_VISIBLE_DEVICES` names them."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def cores(number: int, count: int) -> str:
    """The CPU cores of one of `count` servers, e.g. "0,1": on the same ones their threads would wait for each other."""
    if not hasattr(os, "sched_getaffinity"):
        return "nobind"  # vLLM's word; macOS binds no thread to a core
    available = sorted(os.sched_getaffinity(0))
    share = max(1, len(available) // count)
    return ",".join(str(available[(number * share + i) % len(available)]) for i in range(share))


def free_ports(count: int, first: int, host: str = HOST) -> list[int]:
    """The next `count` ports from `first` on that nobody listens at."""
    ports: list[int] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, 65536):
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
        else:
            ports.append(port)
        if len(ports) == count:
            return ports
    raise ValueError(f"No {count} free ports from {first} on.")


def answers(url: str) -> bool:
    try:
        read(url, timeout=5)
        return True
    except OSError:
        return False


def read(url: str, *, timeout: float = 10.0) -> str:
    """What a server answers to a GET; raises an OSError where that is no success."""
    with DIRECT.open(urllib.request.Request(url, headers=key_header(url)), timeout=timeout) as response:
        return response.read().decode()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m dash_trl.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", help="a hub name, a directory, or 'toy'")
    parser.add_argument("--servers", type=int, default=1, help="each gets an equal share of the visible GPUs")
    parser.add_argument("--host", default=HOST, help="the address to listen at")
    parser.add_argument("--port", type=int, default=FIRST_PORT, help="the first server's; the others take the next")
    arguments, options = parser.parse_known_args(argv)
    model = arguments.model
    vllm_program()  # before the warm-up of the toy model, which takes a minute
    if model == "toy":
        from dash_trl.toy import toy_model

        model = toy_model()
    for number in STOPPED_BY[1:]:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does
            signal.signal(number, lambda *_: sys.exit("Stopped."))  # so that the servers are stopped, too
    with Servers(model, arguments.servers, host=arguments.host, port=arguments.port, options=options) as servers:
        print(f"Starting vLLM, logs: {servers.logs}", flush=True)
        if not os.environ.get(API_KEY):
            print(f"Trainers of this user find the servers' key in {key_file()}.", flush=True)
        try:
            servers.wait_until_ready()
            print(
                f"Ready. Train with:\n\n    --vllm_server_urls {' '.join(servers.urls)}\n\nCtrl+C stops the servers.",
                flush=True,
            )
            while all(command.running for command in servers.commands):
                time.sleep(1.0)
            ended = [url for url, one in zip(servers.urls, servers.commands, strict=True) if not one.running]
            sys.exit(f"Ended: {', '.join(ended)}. The logs are in {servers.logs}; the other servers are stopped, too.")
        except KeyboardInterrupt:
            print("\nStopping the servers.")
        finally:
            for number in STOPPED_BY:  # a second Ctrl+C would leave servers behind
                signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
