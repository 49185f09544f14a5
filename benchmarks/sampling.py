"""Measures sampling from real vLLM servers: gain of a preemptive batch, overhead of the pool, time of a weight sync.

    python benchmarks/sampling.py --json sampling.json          # ~6 minutes on 2 cores

One server has the toy model (0.5 M parameters, float32, on a CPU). Completions have 64 tokens.

- `preemptive_ratio_N`: completions per second with batches of N rows, relative to batches of 8 rows (a micro-step).
  The pool sends both; they alternate. Median of 5 rounds.
- `overhead`: time of a batch of 256 rows in the pool, relative to the server's own time. The server's time is the mean
  latency of a request in /metrics, since all rows are sampled together from the first token to the last.
- `sync_…`: `seconds` of a weight sync by file (gather, write, load) for 1 M and 50 M parameters, and
  `copy_seconds` for copying a file of the same size.
"""

import re
import shutil
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import harness
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer

from dash_trl.sampling import ServerGeneration, ServerPool
from dash_trl.serve import vllm_servers
from dash_trl.server_key import key_header
from dash_trl.toy import arithmetic_dataset, toy_model

TOKENS = 64
GROUP = 8
MICRO_STEP = 8
ROUNDS = 5
BATCHES = (256, 1024)
SIZES = {"1M": {"hidden_size": 128, "num_hidden_layers": 4}, "50M": {"hidden_size": 576, "num_hidden_layers": 10}}


def make_prompts(path: str, groups: int) -> list[tuple[list[int], int]]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = arithmetic_dataset("train", groups)["prompt"]
    texts = [tokenizer.apply_chat_template(row, add_generation_prompt=True, tokenize=False) for row in rows]
    return [(ids, GROUP) for ids in tokenizer(texts)["input_ids"]]


def latency(url: str) -> tuple[float, float]:
    """Return (seconds, requests): the summed latencies and the number of all requests of the server so far."""
    text = urlopen(Request(f"{url}/metrics", headers=key_header(url))).read().decode()
    found = [re.search(rf"^vllm:e2e_request_latency_seconds_{part}.* (\S+)$", text, re.M) for part in ("sum", "count")]
    return float(found[0][1]), float(found[1][1])


def sampling(path: str) -> dict[str, float]:
    options = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
    prompts = make_prompts(path, max(BATCHES) // GROUP)
    few = prompts[: BATCHES[0] // GROUP]
    work = {MICRO_STEP: few, **{batch: prompts[: batch // GROUP] for batch in BATCHES}}  # rows of a batch → all rows
    rates = defaultdict(list)
    overheads = []
    with vllm_servers(path, port=8600) as (url,):
        pool = ServerPool([url])
        pool.wait_until_ready()

        def by_pool(rows: list[tuple[list[int], int]], at_a_time: int = BATCHES[0]) -> None:
            for start in range(0, len(rows), at_a_time // GROUP):
                batch = rows[start : start + at_a_time // GROUP]
                pool.run(pool.complete(ids, n, options) for ids, n in batch)

        by_pool(prompts[:4])  # the first requests compile kernels
        for _ in range(ROUNDS):
            for at_a_time, rows in work.items():
                rates[at_a_time].append(GROUP * len(rows) / harness.timed(by_pool, rows, at_a_time)[1])
            for _ in range(2):
                before = latency(url)
                wall = harness.timed(by_pool, few)[1]
                total, count = (b - a for a, b in zip(before, latency(url), strict=True))
                overheads.append(wall / (total / count))
    rate = harness.medians(rates)
    return {
        **{f"completions_per_second_{at_a_time}": rate[at_a_time] for at_a_time in work},
        **{f"preemptive_ratio_{batch}": rate[batch] / rate[MICRO_STEP] for batch in BATCHES},
        **harness.medians({"overhead": overheads}),
    }


def weight_sync(tokenizer: Any, name: str, shape: dict[str, int]) -> dict[str, Any]:
    heads = shape["hidden_size"] // 32
    directory = Path(tempfile.mkdtemp(dir=harness.OUTPUT.name))
    model = harness.qwen2(
        vocab_size=len(tokenizer),
        intermediate_size=4 * shape["hidden_size"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
        initializer_range=0.08,
        max_position_embeddings=512,
        **shape,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    copy = partial(shutil.copyfile, next(directory.glob("*.safetensors")), directory / "copy")
    with vllm_servers(str(directory), port=8700) as urls:
        pool = ServerGeneration(
            urls,
            weight_dir=str(directory / "weights"),
            model=model,
            accelerator=Accelerator(cpu=True),
            processing_class=tokenizer,
        )
        first = harness.timed(pool.sync_weights)[1]
        rounds = [(harness.timed(pool.sync_weights)[1], harness.timed(copy)[1]) for _ in range(ROUNDS)]
    syncs, copies = zip(*rounds, strict=True)
    later = harness.medians({"seconds": syncs, "copy_seconds": copies}) | {"bytes": 4 * model.num_parameters()}
    harness.say(f"{name}: first sync {first:.1f} s, then", later)
    return {f"first_sync_{name}": first, f"sync_{name}": later}


def main() -> dict[str, Any]:
    torch.set_num_threads(1)  # an idle vLLM worker polls, so on two cores a second thread here would wait for it
    path = toy_model()
    results = sampling(path)
    harness.say("sampling", results)
    for name, shape in SIZES.items():
        results |= weight_sync(AutoTokenizer.from_pretrained(path), name, shape)
    return results


if __name__ == "__main__":
    harness.run(main, __doc__)
