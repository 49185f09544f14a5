"""Start vLLM servers for `DASHTrainer`, with the flags that it needs, and stop them together.

    python -m dash_trl.serve Qwen/Qwen2.5-0.5B-Instruct --servers 2
    python -m dash_trl.serve embedded                     # the tiny model of `make demo`
    python -m dash_trl.serve MODEL --servers 2 --max-model-len 4096 --dtype bfloat16     # the rest goes to `vllm serve`

Prints the `--vllm_server_urls …` to paste behind the training command. The servers listen on 127.0.0.1, since their
weight endpoints have no authentication; `--host` opens them to others. An API key for sampling is taken from the
environment variable VLLM_API_KEY.

A server takes as many GPUs for tensor parallelism as the model's heads split over; the data parallelism is `--servers`,
by default as few as use all GPUs. vLLM's own (`--data-parallel-size`) has one replica report its weights for all.
"""

from __future__ import annotations

import argparse
import errno
import logging
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
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig

from dash_trl.sampling import WORKER_EXTENSION, is_loopback, is_unspecified
from dash_trl.workers import Command

logger = logging.getLogger(__name__)

HOST, FIRST_PORT = "127.0.0.1", 8000
STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READY_SECONDS = 600.0  # a large model is loaded from a slow disk, and compiled
CPU_CACHE_GIB = "1"  # of keys and values; vLLM's default on a CPU is most of the memory
CPU_SEQUENCES = (
    256  # side by side, vLLM's default on a GPU; on a CPU it is 128, and a preemptive batch would wait in line
)
VOCABULARY_MULTIPLE = 64  # to which vLLM pads a vocabulary (vocab_parallel_embedding.py)
# The servers are on this machine: the proxies of `http_proxy` would look for 127.0.0.1 on their own.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Servers:
    """`count` running vLLM servers; a context manager that stops them.

    Args:
        model: a hub name or a directory.
        count: servers, each on its own share of the visible GPUs. None: one, or as few as use all GPUs where the
            model's heads do not split over them.
        host: where they listen. port: the first one; the others take the next free ones.
        options: more arguments of `vllm serve`.
    Raises:
        ValueError: fewer GPUs than servers, a host that is not this machine's, or vLLM is not installed.
        RuntimeError: a server ended before it was ready, with the end of its log.
    """

    def __init__(
        self,
        model: str,
        count: int | None = None,
        *,
        host: str = HOST,
        port: int = FIRST_PORT,
        options: Sequence[str] = (),
    ):
        if count is not None and count < 1:
            raise ValueError(f"servers={count}: start at least one.")
        program = Path(sys.executable).with_name("vllm")  # beside this Python, be its environment activated or not
        found = str(program) if program.exists() else shutil.which("vllm")
        if found is None:
            raise ValueError("vLLM is not installed in this environment: `pip install dash_trl[vllm]`.")
        self.model, self.options, self._program = model, list(options), found
        self._devices: list[str] | None = None
        self._tensor_parallel_size = 1
        gpus = visible_gpus()
        if gpus:
            own = parallelism(options)
            count, self._tensor_parallel_size = layout(len(gpus), count, own, text_config(model, own))
            self._devices = devices(gpus, count)
        self.host, self.ports = host, free_ports(count or 1, port, host)
        self.logs = Path(tempfile.mkdtemp(prefix="dash_trl_serve_"))
        self.commands: list[Command] = []

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
        gpus = None if self._devices is None else self._tensor_parallel_size
        return Command(
            [self._program, "serve", self.model, *flags(self.host, self.ports[number], gpus, self.options)],
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


def flags(host: str, port: int, tensor_parallel_size: int | None, options: Sequence[str]) -> list[str]:
    """The arguments behind `vllm serve MODEL`; the user's own come last and win.

    Args:
        tensor_parallel_size: GPUs that share the model; None on a CPU.
    """
    chosen = ["--host", host, "--port", str(port), "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    chosen += ["--worker-extension-cls", WORKER_EXTENSION]
    if tensor_parallel_size is None:
        # float32: in bfloat16 log-probs differ by 1e-3 and more. Eager: most CPU machines lack a compiler.
        chosen += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(CPU_SEQUENCES)]
    else:
        chosen += ["--weight-transfer-config", '{"backend": "nccl"}']
        chosen += ["--tensor-parallel-size", str(tensor_parallel_size)]
    return [*chosen, *options]


# ------------------------------------------------------------------------------------------ GPUs over servers


def visible_gpus() -> list[str]:
    """As `CUDA_VISIBLE_DEVICES` names them."""
    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def devices(gpus: Sequence[str], count: int) -> list[str]:
    """`CUDA_VISIBLE_DEVICES` for each server, an equal share of the GPUs."""
    share = len(gpus) // count
    return [",".join(gpus[i * share : (i + 1) * share]) for i in range(count)]


def parallelism(options: Sequence[str]) -> argparse.Namespace:
    """What the user's own arguments of `vllm serve` say of GPUs, and of where the model's config is."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, short in (("tensor", "-tp"), ("pipeline", "-pp"), ("data", "-dp")):
        parser.add_argument(f"--{name}-parallel-size", short, type=int)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--revision")
    words = [word.partition("=") for word in options]
    # vLLM reads --tensor_parallel_size, too.
    dashed = [(name.replace("_", "-") if name.startswith("-") else name) + rest + value for name, rest, value in words]
    try:
        return parser.parse_known_args(dashed)[0]
    except argparse.ArgumentError as error:
        raise ValueError(f"In the arguments of `vllm serve`: {error}.") from error


def text_config(model: str, own: argparse.Namespace) -> Any:
    """The config of the language model; None where vLLM alone can read it, or say what is wrong."""
    try:
        config = AutoConfig.from_pretrained(model, revision=own.revision, trust_remote_code=own.trust_remote_code)
    except (OSError, ValueError):
        return None
    return config.get_text_config()


def splits(config: Any, gpus: int) -> bool:
    """Whether vLLM 0.31 can share a model of this text config over so many GPUs.

    It cuts the heads, the vocabulary and the MLP into equal parts, and either cuts the KV heads or copies them
    (`QKVParallelLinear`, `VocabParallelEmbedding`).
    """
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    heads, kv_heads, width, vocabulary = (
        value if isinstance(value := getattr(config, name, None), int) else 0 for name in names
    )
    padded = -(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    copied = kv_heads > 0 and gpus % kv_heads == 0
    return all(size % gpus == 0 for size in (heads, width, padded)) and (kv_heads % gpus == 0 or copied)


def layout(gpus: int, servers: int | None, own: argparse.Namespace, config: Any) -> tuple[int, int]:
    """(servers, tensor-parallel GPUs of each).

    Args:
        gpus: that are visible, at least 1.
        servers: None: as few as use all GPUs; one if the user says how vLLM is to use them.
        own: the user's tensor-, pipeline- and data-parallel sizes, None where there are none: they win.
        config: the model's, see `text_config`.
    """
    if servers is not None and servers > gpus:
        raise ValueError(f"servers={servers}, but only {gpus} GPUs are visible: start at most one for each.")
    copies = (own.pipeline_parallel_size or 1) * (own.data_parallel_size or 1)

    def tensor_parallel(count: int) -> int:
        room = range(gpus // count // copies, 0, -1)
        return own.tensor_parallel_size or next((size for size in room if splits(config, size)), 1)

    def used(count: int) -> int:
        return count * copies * tensor_parallel(count)

    full = next((count for count in range(1, gpus + 1) if used(count) == gpus), None)
    if servers is None:
        servers = 1 if full is None or own.tensor_parallel_size or copies > 1 else full
    if not own.tensor_parallel_size and used(servers) < gpus:
        logger.warning(
            f"{gpus - used(servers)} of {gpus} GPUs stay idle: each of {servers} servers takes "
            f"{used(servers) // servers}, an equal share over which the model's heads and layers split."
            + (f" --servers {full} uses all GPUs." if full is not None else "")
        )
    if (own.data_parallel_size or 1) > 1:
        logger.warning(
            f"With --data-parallel-size {own.data_parallel_size} the first replica reports its weights for all: nobody "
            f"proves that the others have the trainer's. Use --servers {own.data_parallel_size} in its place."
        )
    return servers, tensor_parallel(servers)


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
        with DIRECT.open(url, timeout=5) as response:
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
    parser.add_argument(
        "--servers", type=int, help="each gets an equal share of the visible GPUs; default: as few as use all of them"
    )
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
