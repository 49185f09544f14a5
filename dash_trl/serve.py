"""Start vLLM servers for `DASHTrainer`, with the flags that it needs, and stop them together.

    python -m dash_trl.serve Qwen/Qwen2.5-0.5B-Instruct --servers 2
    python -m dash_trl.serve embedded                     # the tiny model of `make demo`
    python -m dash_trl.serve MODEL --servers 2 --max-model-len 4096 --dtype bfloat16     # the rest goes to `vllm serve`

Prints the `--vllm_server_urls …` to paste behind the training command. The servers listen on 127.0.0.1, since their
weight endpoints have no authentication; `--host` opens them to others. An API key for sampling is taken from the
environment variable VLLM_API_KEY.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm.auto import tqdm

from dash_trl.sampling.urls import is_loopback, is_unspecified
from dash_trl.sampling.vllm_plugin import WORKER_EXTENSION
from dash_trl.workers import Command

HOST, FIRST_PORT = "127.0.0.1", 8000
STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READY_SECONDS = 600.0  # a large model is loaded from a slow disk, and compiled
CPU_CACHE_GIB = "1"  # of keys and values; vLLM's default on a CPU is most of the memory
CPU_SEQUENCES = (
    256  # side by side, vLLM's default on a GPU; on a CPU it is 128, and a preemptive batch would wait in line
)


class Servers:
    """`count` running vLLM servers; a context manager that stops them.

    Args:
        model: a hub name or a directory. count: servers, each on its own share of the visible GPUs.
        host: where they listen. port: the first one; the others take the next free ones.
        options: more arguments of `vllm serve`.
    Raises:
        ValueError: fewer GPUs than servers, a host that is not this machine's, or vLLM is not installed.
        RuntimeError: a server ended before it was ready, with the end of its log.
    """

    def __init__(
        self, model: str, count: int = 1, *, host: str = HOST, port: int = FIRST_PORT, options: Sequence[str] = ()
    ):
        if count < 1:
            raise ValueError(f"servers={count}: start at least one.")
        program = Path(sys.executable).with_name("vllm")  # beside this Python, be its environment activated or not
        found = str(program) if program.exists() else shutil.which("vllm")
        if found is None:
            raise ValueError("vLLM is not installed in this environment: `pip install dash_trl[vllm]`.")
        self.model, self.options, self._program = model, list(options), found
        self.logs = Path(tempfile.mkdtemp(prefix="dash_trl_serve_"))
        self.host, self.ports = host, free_ports(count, port, host)
        self.commands: list[Command] = []
        self._devices = devices(count)

    @property
    def urls(self) -> list[str]:
        host = HOST if is_unspecified(self.host) else self.host
        return [f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for port in self.ports]

    def __enter__(self) -> Servers:
        try:
            for number in range(len(self.ports)):
                self.commands.append(self._start(number))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        with signals_ignored():  # a second Ctrl+C would leave servers behind
            for command in self.commands:
                command.terminate()
            for command in self.commands:
                command.stop()

    def restart(self, number: int) -> None:
        """A server that died, at its old address."""
        self.commands[number] = self._start(number)

    def _start(self, number: int) -> Command:
        environment = {"VLLM_SERVER_DEV_MODE": "1"}
        if self._devices is None:
            own = {"VLLM_CPU_KVCACHE_SPACE": CPU_CACHE_GIB, "VLLM_CPU_OMP_THREADS_BIND": cores(number, len(self.ports))}
            environment |= {name: os.environ.get(name, value) for name, value in own.items()}
        else:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices[number]
        return Command(
            [self._program, "serve", self.model, *flags(self.host, self.ports[number], self._devices, self.options)],
            environment=environment,
            log=self.logs / f"server_{number}.log",
        )

    def wait_until_ready(self, *, progress: bool = False) -> None:
        """Until every server answers; raises with the end of its log if one ends before that."""
        waiting = set(range(len(self.ports)))
        started = time.monotonic()
        with tqdm(total=len(waiting), desc="Starting vLLM", unit="server", disable=not progress) as bar:
            while waiting:
                for number in sorted(waiting):
                    if answers(f"{self.urls[number]}/health"):
                        waiting.discard(number)
                        bar.update()
                    elif not self.commands[number].running or time.monotonic() - started > READY_SECONDS:
                        raise RuntimeError(
                            f"Server {number} ({self.urls[number]}) did not start. The end of {self.logs}/server_"
                            f"{number}.log:\n{tail(self.commands[number].log)}"
                        )
                bar.set_postfix_str(f"{time.monotonic() - started:.0f} s")
                time.sleep(0.5)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP do nothing while something must be finished."""
    try:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPED_BY}
    except ValueError:  # not in the main thread, which alone gets signals
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def flags(host: str, port: int, devices: list[str] | None, options: Sequence[str]) -> list[str]:
    """The arguments behind `vllm serve MODEL`; the user's own come last and win."""
    chosen = ["--host", host, "--port", str(port), "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    chosen += ["--worker-extension-cls", WORKER_EXTENSION]
    if devices is None:
        # float32: in bfloat16 log-probs differ by 1e-3 and more. Eager: most CPU machines lack a compiler.
        chosen += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(CPU_SEQUENCES)]
    else:
        chosen += ["--weight-transfer-config", '{"backend": "nccl"}']
        chosen += ["--tensor-parallel-size", str(len(devices[0].split(",")))]
    return [*chosen, *options]


def devices(count: int) -> list[str] | None:
    """`CUDA_VISIBLE_DEVICES` for each server, an equal share of the visible GPUs; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    if len(visible) < count:
        raise ValueError(f"servers={count}, but only {len(visible)} GPUs are visible ({','.join(visible)}).")
    share = len(visible) // count
    return [",".join(visible[i * share : (i + 1) * share]) for i in range(count)]


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
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise ValueError(f"--host {host}: nobody can listen there on this machine ({error}).") from error
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise ValueError(f"No {count} free ports from {first} on.")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="a hub name, a directory, or 'embedded'")
    parser.add_argument("--servers", type=int, default=1, help="each gets an equal share of the visible GPUs")
    parser.add_argument("--host", default=HOST, help="the address to listen at")
    parser.add_argument("--port", type=int, default=FIRST_PORT, help="the first server's; the others take the next")
    arguments, options = parser.parse_known_args()
    if not is_loopback(arguments.host):
        print(
            f"WARNING: --host {arguments.host} opens vLLM's weight endpoints, which have no authentication, to whoever "
            "reaches that address: they can replace or read the model. Use a private network or a tunnel.",
            file=sys.stderr,
        )
    model = arguments.model
    if model == "embedded":
        from dash_trl.embedded import embedded_model

        model = embedded_model()
    for number in STOPPED_BY[1:]:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does
            signal.signal(number, lambda *_: sys.exit("Stopped."))  # so that the servers are stopped, too
    with Servers(model, arguments.servers, host=arguments.host, port=arguments.port, options=options) as servers:
        print(f"logs: {servers.logs}", flush=True)
        try:
            servers.wait_until_ready(progress=True)
            urls = " ".join(servers.urls)
            print(f"Ready. Train with:\n\n    --vllm_server_urls {urls}\n", flush=True)
            if is_unspecified(arguments.host):
                print(f"On other machines, with this one's name or address in place of {HOST}.")
            print("Ctrl+C stops the servers.", flush=True)
            while all(command.running for command in servers.commands):
                time.sleep(1.0)
            ended = [url for url, one in zip(servers.urls, servers.commands, strict=True) if not one.running]
            sys.exit(f"Ended: {', '.join(ended)}. The logs are in {servers.logs}; the other servers are stopped, too.")
        except KeyboardInterrupt:
            print("\nStopping the servers.")


if __name__ == "__main__":
    main()
