"""Sampling through real vLLM servers: what a preemptive batch gains, what the pool costs, how long a weight sync takes.

    python benchmarks/sampling.py --json sampling.json          # ~6 minutes on 2 cores

One server with the embedded model (0.5 M parameters), 64 tokens per completion, float32 on a CPU.

- `preemptive_ratio_N`: completions per second of one batch of N rows over those of 8 rows at a time (a micro-step's),
  both through the pool, by turns; median of 5 rounds.
- `overhead`: wall time of a batch of 256 in the pool over the server's own time for it, the mean latency of its
  requests by /metrics: all rows are sampled side by side from the first token to the last. `bare_overhead`: the same of
  a bare client by turns with it, which sends these requests at once and reads the bytes of the answers.
- `sync_…`: a weight sync by file (gather, checksum, write, load, verify) for 1 M and 50 M parameters, over the time of
  copying a file of as many bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CI", "1")

import aiohttp
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from dash_trl.embedded import arithmetic_dataset, embedded_model
from dash_trl.sampling import ServerPool, VLLMPool
from dash_trl.serve import DIRECT, Servers

TOKENS, GROUP, MICRO_STEP, ROUNDS = 64, 8, 8, 5
BATCHES = (256, 1024)
SIZES = {"1M": {"hidden_size": 128, "num_hidden_layers": 4}, "50M": {"hidden_size": 576, "num_hidden_layers": 10}}


def make_prompts(path: str, groups: int) -> list[tuple[list[int], int]]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = arithmetic_dataset("train", groups)["prompt"]
    texts = [tokenizer.apply_chat_template(row, add_generation_prompt=True, tokenize=False) for row in rows]
    return [(ids, GROUP) for ids in tokenizer(texts)["input_ids"]]


def seconds(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def latency(url: str) -> tuple[float, float]:
    """(seconds, requests) so far, from a request's arrival at the server to its end."""
    text = DIRECT.open(f"{url}/metrics", timeout=10).read().decode()
    found = [re.search(rf"^vllm:e2e_request_latency_seconds_{part}.* (\S+)$", text, re.M) for part in ("sum", "count")]
    return float(found[0][1]), float(found[1][1])


def bare_client(url: str, model: str, prompts: list[tuple[list[int], int]], options: dict[str, Any]) -> None:
    async def ask(session: aiohttp.ClientSession, ids: list[int], n: int) -> None:
        request = {"model": model, "prompt": ids, "n": n, "logprobs": 0, "return_token_ids": True, **options}
        async with session.post(f"{url}/v1/completions", json=request) as response:
            await response.read()
            assert response.status == 200

    async def ask_all() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(ask(session, ids, n) for ids, n in prompts))

    asyncio.run(ask_all())


def sampling(path: str, results: dict[str, Any]) -> None:
    options = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
    prompts = make_prompts(path, max(BATCHES) // GROUP)
    with Servers(path, 1, port=8600) as servers:
        servers.wait_until_ready()
        pool = ServerPool(servers.urls)
        pool.wait_until_ready()
        pool.complete(prompts[:4], options)  # the first requests compile kernels
        rates: dict[int, list[float]] = {MICRO_STEP: [], **{batch: [] for batch in BATCHES}}
        overheads: dict[str, list[float]] = {"overhead": [], "bare_overhead": []}
        for _ in range(ROUNDS):
            # as many completions as in the smaller batch, a micro-step's rows at a time
            few = prompts[: BATCHES[0] // GROUP]
            per_step = MICRO_STEP // GROUP
            steps = [few[i : i + per_step] for i in range(0, len(few), per_step)]
            rates[MICRO_STEP].append(
                BATCHES[0] / seconds(lambda steps=steps: [pool.complete(s, options) for s in steps])
            )
            for batch in BATCHES:
                rows = prompts[: batch // GROUP]
                rates[batch].append(batch / seconds(lambda rows=rows: pool.complete(rows, options)))
            for name, client in (
                ("overhead", lambda rows: pool.complete(rows, options)),
                ("bare_overhead", lambda rows: bare_client(servers.urls[0], path, rows, options)),
            ):
                for _ in range(2):
                    before = latency(servers.urls[0])
                    wall = seconds(lambda client=client, few=few: client(few))
                    total, count = (b - a for a, b in zip(before, latency(servers.urls[0]), strict=True))
                    overheads[name].append(wall / (total / count))
    medians = {batch: statistics.median(values) for batch, values in rates.items()}
    for batch, rate in medians.items():
        print(f"{batch:5} rows at a time: {rate:6.1f} completions/s ({rate / medians[MICRO_STEP]:.2f}×)", flush=True)
    results |= {f"completions_per_second_{batch}": rate for batch, rate in medians.items()}
    results |= {f"preemptive_ratio_{batch}": medians[batch] / medians[MICRO_STEP] for batch in BATCHES}
    results |= {name: statistics.median(values) for name, values in overheads.items()}
    print(
        f"over the server's own time at {BATCHES[0]} rows: the pool {results['overhead']:.3f}, a bare client "
        f"{results['bare_overhead']:.3f}",
        flush=True,
    )


def weight_sync(tokenizer_path: str, name: str, shape: dict[str, int], results: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    heads = shape["hidden_size"] // 32
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        intermediate_size=4 * shape["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
        initializer_range=0.08,
        max_position_embeddings=512,
        **shape,
    )
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "model")
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        with Servers(path, 1, port=8700) as servers:
            servers.wait_until_ready()
            pool = VLLMPool(
                servers.urls,
                weight_sync="file",
                weight_dir=str(Path(directory) / "weights"),
                model=model,
                accelerator=Accelerator(cpu=True),
                processing_class=tokenizer,
            )
            results[f"first_sync_{name}"] = seconds(pool.sync_weights)
            file = next(Path(path).glob("*.safetensors"))
            syncs, copies = [], []
            for _ in range(ROUNDS):
                syncs.append(seconds(pool.sync_weights))
                copies.append(seconds(lambda: shutil.copyfile(file, Path(directory) / "copy")))
    sync, copy = statistics.median(syncs), statistics.median(copies)
    results[f"sync_{name}"] = {"seconds": sync, "bytes": 4 * model.num_parameters(), "copy_seconds": copy}
    print(
        f"{model.num_parameters() / 1e6:.1f} M parameters: sync {sync:.3f} s, copying the bytes {copy:.3f} s "
        f"({sync / copy:.1f}×); the first one, with its proof, {results[f'first_sync_{name}']:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # an idle vLLM worker polls: on two cores a second thread here would wait for it
    results: dict[str, Any] = {}
    path = embedded_model()
    sampling(path, results)
    for name, shape in SIZES.items():
        weight_sync(path, name, shape, results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
