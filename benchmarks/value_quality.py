"""Measures whether V(prefix) orders the prefixes of a problem by their success.

    dash_trl serve MODEL --max-model-len 256      # in another terminal
    python benchmarks/value_quality.py --model MODEL --dataset outputs/short/mixed.jsonl      # 25 minutes on 2 cores

The problems are the first 25 that the model solves in 10 to 90 % of 16 samples. Four of these samples have a prefix
after 1/5, 2/5, 3/5 and 4/5 of their tokens. The success of a prefix is the share of its 16 continuations that are
right. The figures are Spearman's ρ of V and the success of the 16 prefixes of a problem: the mean over problems, and
its 95 % interval. A problem whose prefixes all have the same success is left out.

- `position`: the number of tokens of the prefix takes the place of V.
- `forced …`: `AnswerLogProbValue` with this force prompt.
- `8 continuations`: V is the success of the first 8 continuations. It is compared with that of the other 8.
"""

from collections import defaultdict

import harness
import pandas
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl import MathAccuracyReward, load_math_dataset
from dash_trl.evaluation import bootstrap_interval
from dash_trl.process_rewards import AnswerLogProbValue, ValueRequest
from dash_trl.sampling import ServerPool

PROBLEMS, SAMPLES, COMPLETIONS, PARTS = 25, 16, 4, 5
FORCED = ("\nThe answer is ", "\n#### ", "\n", "=")


def main(model: str, dataset: str, url: str, tokens: int) -> dict[str, list[float]]:
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    reward, pool = MathAccuracyReward(), ServerPool([url])
    pool.wait_until_ready()

    def continued(prompt: list[int], begun: list[list[int]], answer: str) -> list[list[tuple[list[int], float]]]:
        """Continues each beginning of a completion SAMPLES times; returns (token ids, reward) of the completions."""
        options = {"max_tokens": tokens, "temperature": 1.0, "stop_token_ids": [tokenizer.eos_token_id]}
        found = pool.run(pool.completions([(prompt + one, SAMPLES) for one in begun], options))
        ids = [[[*one, *more.token_ids] for more in of] for one, of in zip(begun, found, strict=True)]
        texts = [tokenizer.batch_decode(of, skip_special_tokens=True) for of in ids]
        return [[*zip(of, reward(text, [answer] * SAMPLES), strict=True)] for of, text in zip(ids, texts, strict=True)]

    def correlation(one: list[float], other: list[float]) -> float:
        return pandas.DataFrame([one, other]).T.rank().corr()[0][1]

    correlations: dict[str, list[float]] = defaultdict(list)
    for row in load_math_dataset(dataset):
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        (samples,) = continued(prompt, [[]], row["answer"])
        if not 0.1 <= sum(right for _, right in samples) / SAMPLES <= 0.9:
            continue
        chosen = [ids for ids, _ in samples[:COMPLETIONS]]
        ends = [[len(ids) * part // PARTS for part in range(1, PARTS)] for ids in chosen]
        prefixes = [ids[:end] for ids, of in zip(chosen, ends, strict=True) for end in of]
        rewards = [[right for _, right in of] for of in continued(prompt, prefixes, row["answer"])]
        success = [*map(sum, rewards)]
        if len({*success}) == 1:
            continue
        values: dict[str, list[float]] = {"position": [*map(len, prefixes)]}
        for forced in FORCED:
            requests = [
                ValueRequest(tuple(prompt), tuple(ids), tuple(of), (row["answer"],))
                for ids, of in zip(chosen, ends, strict=True)
            ]
            scored = AnswerLogProbValue(forced, closing=tokenizer.eos_token).score(requests, policy, tokenizer)
            values[f"forced {forced!r}"] = sum(scored, [])
        for name, value in values.items():
            correlations[name].append(correlation(value, success))
        halves = [[sum(of[half::2]) for of in rewards] for half in (0, 1)]
        if all(len({*half}) > 1 for half in halves):
            correlations["8 continuations"].append(correlation(*halves))
        print(
            len(correlations["position"]),
            row["answer"],
            {k: round(v[-1], 2) for k, v in correlations.items()},
            flush=True,
        )
        if len(correlations["position"]) == PROBLEMS:
            break
    found = {}
    for name, ofs in correlations.items():
        low, high = bootstrap_interval(ofs)
        found[name] = [sum(ofs) / len(ofs), low, high, len(ofs)]
        print(f"{name:26} {found[name][0]:+.2f} [{low:+.2f}, {high:+.2f}]  {len(ofs)} problems")
    return found


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        model={"required": True, "help": "a folder, or a name on the hub"},
        dataset={"required": True, "help": "problems, as for `dash_trl eval`"},
        url={"default": "http://127.0.0.1:8000", "help": "the vLLM server"},
        tokens={"type": int, "default": 32, "help": "most tokens of a continuation"},
    )
