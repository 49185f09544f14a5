"""The supervised baselines: solutions by humans, a teacher's traces, and the loss on completions alone."""

import re
import shutil
from functools import partial

import pytest
import sft
import traces
import train_math
from datasets import Dataset
from transformers import AutoTokenizer

from dash_trl import script
from dash_trl.toy import arithmetic_dataset, arithmetic_reward
from tests.launching import CONFIGS as LAUNCHES
from tests.launching import ROOT, flags
from tests.tiny import assistant, read_rows, refused, user, write_rows

CONFIGS = sorted((ROOT / "examples" / "configs").glob("sft_*.yaml"))
SMALL = {"max_steps": 2, "per_device_train_batch_size": 4}


# ------------------------------------------------------------------------------------------- solutions by humans


def test_humans_are_right_and_skip_steps():
    rows = list(sft.human_dataset("train"))[:500]
    texts = [row["completion"][0]["content"] for row in rows]
    assert set(arithmetic_reward(texts, [row["answer"] for row in rows])) == {1.0}
    assert sft.human_solution([{"content": "7+9-2-2+4"}]) == "7+9-2=14\n14-2+4=16\nThe answer is 16"


# -------------------------------------------------------------------------------------------------------- sft.py


@pytest.mark.parametrize("task", ["toy", "toy_code"])
def test_it_learns_what_humans_wrote(toy, tmp_path, monkeypatch, capsys, task):
    """The demo shows how a model is measured."""
    monkeypatch.setattr(script, "evaluate", lambda *arguments, **sampling: {"accuracy": 0.25})
    learns = {**SMALL, "max_steps": 6, "per_device_train_batch_size": 32, "output_dir": tmp_path}
    sft.main(flags(learns if task == "toy" else {**learns, "dataset_name": task}))
    losses = [row["loss"] for row in read_rows(tmp_path / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 6 and losses[-1] < losses[0] and (tmp_path / "model.safetensors").exists()
    said = capsys.readouterr().out
    assert re.search(r"sampled accuracy on 256 .*: 0.250 before, 0.250 after\ngreedy accuracy", said)
    assert f"metrics: {tmp_path}/metrics.jsonl\nmodel:   {tmp_path}\n" in said


@pytest.mark.parametrize("chat", [True, False])
def test_the_loss_is_on_the_completion_alone(own_folder, monkeypatch, chat):
    """What the trainer's own collator masks: of a conversation the prompt and the assistant's header, of a text it."""
    seen = []
    monkeypatch.setattr(sft, "train", lambda trainer, measure: seen.append((trainer, measure)))
    prompt = "7+5"
    completion = "7+5=12\nThe answer is 12"
    row = {"prompt": prompt, "completion": completion}
    if chat:
        row = {"prompt": user(prompt), "completion": assistant(completion)}
    write_rows(own_folder / "rows.jsonl", [row] * 4)
    sft.main(flags({**SMALL, "model_name_or_path": "model", "completions": "rows.jsonl", "output_dir": "out"}))
    ((trainer, measure),) = seen
    assert measure() == {}  # since the task is not known
    batch = next(iter(trainer.get_train_dataloader()))
    learned = [
        trainer.processing_class.decode(ids[labels != -100])
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    assert learned == [completion + "<|im_end|>" + ("\n" if chat else "")] * 4
    assert all(prompt in trainer.processing_class.decode(ids) for ids in batch["input_ids"])


def test_table_8():
    """Each file is one without mistakes, and its values are the paper's. `test_paper.py` says which there are."""
    types = (sft.SupervisedArguments, sft.SupervisedConfig, sft.ModelConfig)
    expected = {
        "learning_rate": 2e-5,
        "num_train_epochs": 3,
        "max_length": None,
        "completion_only_loss": None,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "eos_token": "<|im_end|>",
    }
    data = {
        "sft_h": ("nlile/hendrycks-MATH-benchmark", None),
        "sft_m": (None, "outputs/traces_qwen2.5-7b-instruct.jsonl"),
        "sft_h_code": ("evalplus/mbppplus", None),
    }
    for path in CONFIGS:
        given, args, model = sft.parse(["--config", str(path), "--use_cpu", "--bf16=False"], types, {})
        sft.check_arguments(given, args, model)
        kind, size = path.stem.split("_qwen2.5-")
        own = {"output_dir": f"outputs/{path.stem}"}
        assert {name: getattr(args, name) for name in expected | own} == expected | own
        assert model.model_name_or_path.lower() == f"qwen/qwen2.5-{size}" and not model.use_peft
        assert (given.dataset_name, given.completions) == data[kind]
        assert f"--config examples/configs/{path.name}" in path.read_text()


MODEL = {"model_name_or_path": "model"}
FILE = {"completions": "rows.jsonl"}


def test_mistakes(own_folder, monkeypatch):
    mistakes = [
        # half a task, or two
        (MODEL, [], "model_name_or_path='model' with dataset_name=None: give both"),
        ({**MODEL, **FILE, "lora_r": "64"}, [], r"\['lora_r'\] have no effect without --use_peft"),
        # the file of completions, by datasets
        (FILE, [{"prompt": "p", "text": "t"}], r"\['completion'\] not in the dataset"),
        # the dataset
        ({**MODEL, "dataset_name": "own.jsonl"}, [], r"Row 0 lacks a solution \(an answer alone is none"),
    ]
    monkeypatch.setattr(sft, "SFTTrainer", None)
    for settings, rows, message in mistakes:
        write_rows(own_folder / "rows.jsonl", rows)
        refused(message, sft.main, flags({**SMALL, **settings}))


def test_a_chat_template_that_never_ends_is_refused(toy):
    tokenizer = AutoTokenizer.from_pretrained(toy)
    chat = user("1+1"), assistant("2")
    rows = Dataset.from_list([dict(zip(("prompt", "completion"), chat, strict=True))])
    args = sft.SupervisedConfig("out")
    check = partial(sft.check_completions, rows, tokenizer)
    check(args)
    tokenizer.eos_token = "<|endoftext|>"  # as a base model's, whose template is a chat model's
    refused(r"ends a message with '<\|im_end\|>\\n', without .*'<\|endoftext\|>'.*--eos_token", check, args)
    for settings in ({"eos_token": "<|im_end|>"}, {"chat_template_path": "other"}):
        check(sft.SupervisedConfig("out", **settings))


# ----------------------------------------------------------------------------------------------------- traces.py


def test_correct_traces_are_kept_and_learned_from(own_folder, capsys, monkeypatch):
    settings = {"dataset_name": "toy", "dataset_test_split": "train[:12]", "num_samples": 2, "temperature": 1.0}
    traces.main(["model", *flags({**settings, "output": "t.jsonl"})])
    _, *rows = read_rows(own_folder / "t" / "model.jsonl")
    problems = arithmetic_dataset("train").select(range(12)).to_list()
    expected = [
        {"prompt": problem["prompt"], "completion": assistant(one["text"])}
        for problem, row in zip(problems, rows, strict=True)
        for one in row["samples"]
        if arithmetic_reward([one["text"]], [problem["answer"]]) == [1.0]
    ]
    kept = read_rows(own_folder / "t.jsonl")
    assert kept == expected and 0 < len(kept) < 24
    wrong = 24 - len(kept)
    assert f"24 traces of 12 problems: {len(kept)} kept, {wrong} wrong, 0 cut off, 0 failed" in capsys.readouterr().out
    measured = []
    monkeypatch.setattr(sft, "toy_accuracies", lambda *arguments: measured.append(None) or {})
    sft.main(flags({**SMALL, "completions": "t.jsonl", "output_dir": "out", "max_steps": 1}))
    assert len(measured) == 2
    assert traces.fate({"reward": 1.0, "truncated": True}) == "cut off", "it is not kept, though it passes"


def test_the_toy_teacher_is_the_model_after_rl_and_is_kept(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(traces, "toy_model", lambda: toy)
    run = ["toy", *flags({"dataset_test_split": "train[:4]", "output": "one.jsonl"})]
    for trains in (lambda argv: shutil.copytree(toy, argv[1], dirs_exist_ok=True), None):
        monkeypatch.setattr(train_math, "main", trains)
        traces.main(run)
    assert list((tmp_path / "dash_trl").glob("teacher-*/model.safetensors")) and read_rows(tmp_path / "one.jsonl")


@pytest.mark.exhaustive
def test_without_arguments_it_unlearns_what_humans_skip(launch, tmp_path):
    """As in the paper; the teacher's traces do not."""
    config = LAUNCHES / "single_process.yaml"
    done = launch(ROOT / "examples" / "sft.py", "--output_dir", tmp_path, config=config, threads=2)
    accuracy = dict(re.findall(r"(sampled|greedy) accuracy on 256 .*: (.* before, .*) after", done.stdout))
    before, after = map(float, accuracy["greedy"].split(" before, "))
    assert before >= 0.9 and before - after >= 0.2, done.stdout
