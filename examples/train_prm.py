"""Train a process reward model, which scores the steps of a solution, on the toy problems: offline, in two CPU minutes.

    python examples/train_prm.py --output_dir outputs/prm
    accelerate launch examples/train_math_process.py --value_model outputs/prm

The toy model gets a token classification head. The data are generated solutions with some wrong steps. The separator
after each step is labelled, 1 = right and 0 = wrong; `ProcessRewardModel` reads the score at the same token, as TRL's
former `PRMTrainer` and Math-Shepherd (arXiv 2312.08935) have it. A process reward model for other problems is trained
in the same way, on steps that people or sampled completions have judged.
"""

import argparse
import random
import re
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)

from dash_trl.toy import arithmetic_dataset, toy_model

WRONG = 0.2  # probability that a step is wrong
RIGHT = 1  # the label of a right step
SEPARATOR = "\n"
BATCH = 16  # completions in one pass of the process reward model


class ProcessRewardModel:
    """Scores each step by the probability that it is right, which a token classifier predicts. It is for `StepValue`.

    The input of the model is the prompt, then each step with a separator after it; steps and separators are tokenized
    one by one. The prediction at the separator's last token is the score of the step before it.

    Args:
        path: name or folder of an `AutoModelForTokenClassification` with two labels or more. Each rank loads it onto
            its own device.
    """

    def __init__(self, path: str):
        self.model = AutoModelForTokenClassification.from_pretrained(path).to(PartialState().device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def __call__(self, prompts: list[str], steps: list[list[str]], **columns: list[Any]) -> list[list[float]]:
        rows = [encoded(self.tokenizer, *one) for one in zip(prompts, steps, strict=True)]
        return [score for first in range(0, len(rows), BATCH) for score in self._scored(rows[first : first + BATCH])]

    @torch.no_grad()
    def _scored(self, rows: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        batch = self.tokenizer.pad({"input_ids": [ids for ids, _ in rows]}, padding_side="right", return_tensors="pt")
        right = self.model(**batch.to(self.model.device)).logits.float().softmax(dim=-1)[..., RIGHT].tolist()
        return [[row[end] for end in ends] for row, (_, ends) in zip(right, rows, strict=True)]


def encoded(tokenizer: Any, prompt: str, steps: list[str]) -> tuple[list[int], list[int]]:
    """Returns the token ids of the model's input, and the position of the last token of each step's separator."""
    ids, separator, *parts = tokenizer([prompt, SEPARATOR, *map(str.strip, steps)], add_special_tokens=False)[
        "input_ids"
    ]
    ends = []
    for part in parts:
        ids = [*ids, *part, *separator]
        ends.append(len(ids) - 1)
    return ids, ends


def judged_steps(problem: str, draw: random.Random) -> Iterator[tuple[str, int]]:
    """Yields the steps of a solution, and for each 1 = right or 0 = wrong.

    After a wrong step, the solution continues with the wrong total. The next step is right if its own sum is right.
    """
    total, *operations = re.findall(r"[+-]?\d+", problem)
    for operation in operations:
        right = int(total) + int(operation)
        found = right if draw.random() >= WRONG else max(right + draw.choice((-2, -1, 1, 2)), 0)
        yield f"{total}{operation}={found}", int(found == right)
        total = str(found)


def examples(split: str, size: int, tokenizer: Any) -> tuple[Dataset, list[tuple[str, list[str], list[int]]]]:
    """Generates solutions for training and for the test.

    Returns:
        Token ids with `labels` (−100 = no label), and (prompt, steps, labels) of each solution.
    """
    draw = random.Random(split)
    rows, texts = [], []
    for prompt in arithmetic_dataset(split, size)["prompt"]:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        steps, right = map(list, zip(*judged_steps(prompt[0]["content"], draw), strict=True))
        ids, ends = encoded(tokenizer, text, steps)
        labels = dict(zip(ends, right, strict=True))
        rows.append({"input_ids": ids, "labels": [labels.get(place, -100) for place in range(len(ids))]})
        texts.append((text, steps, right))
    return Dataset.from_list(rows), texts


def main(arguments: list[str] | None = None) -> None:
    """Trains and saves the model; prints the share of held-out steps that it judges correctly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/prm")
    parser.add_argument("--problems", type=int, default=4096)
    parser.add_argument("--epochs", type=float, default=3)
    script = parser.parse_args(arguments)
    path = toy_model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=2)
    data, _ = examples("train", script.problems, tokenizer)
    settings = TrainingArguments(
        script.output_dir,
        num_train_epochs=script.epochs,
        per_device_train_batch_size=32,
        learning_rate=3e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=20,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
    )
    Trainer(model, settings, DataCollatorForTokenClassification(tokenizer), data).train()
    model.save_pretrained(script.output_dir)
    tokenizer.save_pretrained(script.output_dir)
    _, held_out = examples("test", 256, tokenizer)
    prompts, steps, labels = (list(column) for column in zip(*held_out, strict=True))
    scores = ProcessRewardModel(script.output_dir)(prompts, steps)
    right = [
        (score > 0.5) == label
        for row, row_labels in zip(scores, labels, strict=True)
        for score, label in zip(row, row_labels, strict=True)
    ]
    share = f"{sum(right) / len(right):.1%} of {len(right)}"
    print(f"{share} held-out steps are judged correctly; the model is in {script.output_dir}")


if __name__ == "__main__":
    main()
