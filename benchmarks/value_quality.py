"""Is V(prefix) worth anything? Against Monte Carlo success on the embedded task, where truth is cheap.

    python benchmarks/value_quality.py --json value_quality.json          # ~4 minutes on 2 cores

256 sampled responses (64 problems × 4), cut at their lines; from every boundary K = 32 completions are sampled with the
model itself, and their share of right answers is the truth. Reported for each force prompt and space: Spearman's ρ of V
with the truth, and the AUC of V for "succeeds more often than not", over all boundaries and within the boundaries of
one problem (the honest figure: credit compares prefixes of one problem); ρ of U with the difference of the truth. The
rival is the position alone: the boundary's number in its response.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl.embedded import arithmetic_dataset, arithmetic_reward, embedded_model
from dash_trl.process_rewards import AnswerLogProbValue, Segmenter, ValueRequest, auc, line_starts, spearman, within

PROMPTS, RESPONSES, ROLLOUTS, BATCH, LONGEST = 64, 4, 32, 256, 64
END = "<|im_end|>"
FORCE_PROMPTS = {
    "The answer is N<|im_end|>": ("The answer is ", END),
    "The answer is N": ("The answer is ", ""),
    "Wait, the answer is N": ("Wait, The answer is ", END),
    "=N": ("=", ""),
}


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prefixes: Sequence[Sequence[int]]) -> list[list[int]]:
    """One completion of each prefix at temperature 1, without the end token."""
    order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))
    completions: list[list[int]] = [[] for _ in prefixes]
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        width = max(len(prefixes[i]) for i in rows)
        pad = tokenizer.pad_token_id
        generated = model.generate(
            input_ids=torch.tensor([[pad] * (width - len(prefixes[i])) + list(prefixes[i]) for i in rows]),
            attention_mask=torch.tensor([[0] * (width - len(prefixes[i])) + [1] * len(prefixes[i]) for i in rows]),
            do_sample=True,
            max_new_tokens=LONGEST,
            pad_token_id=pad,
        )
        for i, ids in zip(rows, generated[:, width:].tolist(), strict=True):
            end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
            completions[i] = ids[:end]
    return completions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    path = embedded_model()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    segmenter = Segmenter(tokenizer, markers=line_starts, min_episode_tokens=1)

    rows = list(arithmetic_dataset("test", PROMPTS))
    prompts = [
        tokenizer(
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False),
            add_special_tokens=False,
        )["input_ids"]
        for row in rows
    ]
    owners = [problem for problem in range(PROMPTS) for _ in range(RESPONSES)]
    responses = sample(model, tokenizer, [prompts[i] for i in owners])
    requests = [
        ValueRequest(tuple(prompts[i]), tuple(response), segmenter(response).boundaries, (rows[i]["answer"],))
        for i, response in zip(owners, responses, strict=True)
    ]
    places = [(r, k) for r, request in enumerate(requests) for k in range(len(request.boundaries))]
    prefixes = [[*requests[r].prompt_ids, *requests[r].completion_ids[: requests[r].boundaries[k]]] for r, k in places]
    finished = sample(model, tokenizer, [prefix for prefix in prefixes for _ in range(ROLLOUTS)])
    texts = tokenizer.batch_decode(
        [
            [*requests[r].completion_ids[: requests[r].boundaries[k]], *finished[n * ROLLOUTS + j]]
            for n, (r, k) in enumerate(places)
            for j in range(ROLLOUTS)
        ]
    )
    answers = [rows[owners[r]]["answer"] for r, _ in places for _ in range(ROLLOUTS)]
    right = arithmetic_reward(texts, answers)
    truth = [sum(right[n * ROLLOUTS : (n + 1) * ROLLOUTS]) / ROLLOUTS for n in range(len(places))]
    problems = [owners[r] for r, _ in places]
    likely = [value > 0.5 for value in truth]
    steps = [n for n, (_, k) in enumerate(places) if k > 0]  # place n − 1 is the boundary before
    true_steps = [truth[n] - truth[n - 1] for n in steps]
    step_problems = [problems[n] for n in steps]
    print(f"{len(requests)} responses, {len(places)} boundaries, mean success {statistics.mean(truth):.3f}")

    results: dict[str, Any] = {"responses": len(requests), "boundaries": len(places)}
    columns = ("spearman", "spearman_within", "auc", "auc_within", "u_spearman", "u_spearman_within")
    print(f"{'predictor':42}" + "".join(f"{column:>18}" for column in columns))

    def report(name: str, values: Sequence[float]) -> None:
        utilities = [values[n] - values[n - 1] for n in steps]
        figures = (
            spearman(values, truth),
            within(spearman, problems, values, truth),
            auc(values, likely),
            within(auc, problems, values, likely),
            spearman(utilities, true_steps),
            within(spearman, step_problems, utilities, true_steps) if len(set(utilities)) > 1 else None,
        )
        results[name] = dict(zip(columns, figures, strict=True))
        print(f"{name:42}" + "".join(f"{'–':>18}" if f is None else f"{f:18.3f}" for f in figures), flush=True)

    report("position", [float(k) for _, k in places])
    for name, (force_prompt, closing) in FORCE_PROMPTS.items():
        for space in ("log", "probability"):
            estimator = AnswerLogProbValue(force_prompt, closing=closing, space=space)
            values = [value for row in estimator.score(requests, model, tokenizer) for value in row]
            report(f"{name}, {space}", values)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
