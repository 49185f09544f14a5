"""`dash_trl eval`: what it writes, and errors before weights are loaded."""

import json
import re
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from dash_trl import command
from dash_trl.evaluation import LocalSampler, main, open_sampler
from tests.launching import SHARED, needs_data
from tests.tiny import load, read_rows, refused, save_tiny_model, write_rows

PROBLEMS = [{"problem": f"{i} + {i}", "answer": str(2 * i), "level": i} for i in range(7)]
FAST = ("--dataset_test_split", "train", "--max_completion_length", 6, "--output_dir", "out")


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def problems() -> Path:
    return write_rows(Path("problems.jsonl"), PROBLEMS)


def rewards(body: str) -> Path:
    """A file with a reward function of one's own."""
    path = Path("reward.py")
    path.write_text(f"def compute_score(completion, answer, level):\n    {body}\n")
    return path


def evaluate(*arguments: object) -> None:
    main(list(map(str, arguments)))


# ------------------------------------------------------------------------------------------------------ samples


@pytest.fixture(scope="module")
def model(tiny_model, tokenizer) -> tuple:
    return load(tiny_model), tokenizer


def test_batches_may_split_a_prompt_and_have_seeds_of_their_own(model):
    """Batches of 4 rows, 3 samples of each of 5 prompts: no batch holds whole prompts only."""
    arguments = {"num_samples": 3, "max_completion_length": 12}
    drawn = dict(LocalSampler(*model, batch_size=4).sample(["1"] * 5, **arguments))
    assert list(drawn) == [0, 1, 2, 3, 4] and all(len(samples) == 3 for samples in drawn.values())
    assert len({tuple(one.token_ids) for samples in drawn.values() for one in samples}) > 12


def test_truncated_is_what_did_not_end(model, tiny_model):
    for padding in ({}, {"pad_token": None}):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model, **padding)
        sampling = {"num_samples": 64, "max_completion_length": 40, "temperature": 3.0}
        ((_, samples),) = LocalSampler(model[0], tokenizer).sample(["1"], **sampling)
        ended = [one.token_ids[-1] == tokenizer.eos_token_id for one in samples]
        assert any(ended) and [one.truncated for one in samples] == [not one for one in ended]
        assert all(len(one.token_ids) == 40 for one in samples if one.truncated)


def test_a_lora_adapter_is_not_merged(tiny_model, tokenizer):
    """In bf16, that would lose small changes. Its generation config is as before: PEFT's generate writes into it."""
    torch.manual_seed(0)
    adapted = get_peft_model(
        load(tiny_model), LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    )
    adapted.save_pretrained("lora")
    ids = torch.tensor([tokenizer("1 + 2")["input_ids"]])
    with open_sampler(Path("lora").resolve()) as sampler:
        assert any("lora" in name for name, _ in sampler.model.named_parameters())
        assert torch.allclose(sampler.model.cpu()(ids).logits, adapted(ids).logits, atol=1e-4)
    ends = adapted.generation_config.eos_token_id = [1, 77]
    list(LocalSampler(adapted, tokenizer).sample(["1"], max_completion_length=3))
    assert adapted.generation_config.eos_token_id == adapted.base_model.model.generation_config.eos_token_id == ends


# ------------------------------------------------------------------------------------------------------ the command


def test_toy_as_a_command(toy, capsys):
    """The README's line after `make demo`: the toy model before and after training. Here nothing was trained."""
    shutil.copytree(toy, "outputs/toy")
    arguments = ["toy", "outputs/toy", "--dataset_test_split", "test[:16]", "--num_samples", "4", "--output_dir", "out"]
    command.main(["eval", *arguments])
    figures = json.loads(Path("out/toy.json").read_text())
    settings, *rows = read_rows(Path("out/toy.jsonl"))
    assert settings["settings"]["dataset_name"] == "toy" and len(rows) == 16
    samples = [(row["answer"], sample) for row in rows for sample in row["samples"]]
    right = [one["reward"] == (one["text"].split("\n")[-1] == f"The answer is {answer}") for answer, one in samples]
    assert all(right) and 0.2 < figures["accuracy"] < 0.7 and figures["failed"] == 0
    assert figures["accuracy"] == sum(sample["reward"] for _, sample in samples) / 64
    printed = capsys.readouterr().out
    assert re.search(r"^ *toy +(\S+) ", printed, re.M)[1] == f"{100 * figures['accuracy']:.1f}"
    assert "first prompt:" in printed and rows[0]["prompt"][0]["content"] in printed
    assert "outputs-toy − toy, paired by problem: accuracy +0.0 [all equal]" in printed
    assert Path("out/pass_at_k.png").read_bytes().startswith(b"\x89PNG")


def test_several_models_and_a_reward_of_ones_own(tiny_model, problems, capsys):
    """The files are named after as much of the models' paths as tells them apart.

    A text is correct if it has an even number of characters, like half of an untrained model's texts.
    """
    reward = rewards("return float(len(completion) % 2 == 0)")
    shutil.copytree(tiny_model, "a/checkpoint-10")
    save_tiny_model(Path("b/checkpoint-10"), num_hidden_layers=1)
    arguments = ("--dataset_name", problems, "--num_samples", 4, "--k", 4, 1, "--reward_path", reward)
    evaluate("a/checkpoint-10", "./b/checkpoint-10/", *arguments, *FAST)
    names = ["a-checkpoint-10", "b-checkpoint-10"]
    first, second = (json.loads(Path("out", f"{name}.json").read_text()) for name in names)
    difference = second["difference"]
    assert difference["from"] == names[0]
    assert difference["accuracy"][0] == pytest.approx(second["accuracy"] - first["accuracy"])
    mean, low, high = (f"{100 * one:+.1f}" for one in difference["accuracy"])
    said = f"{names[1]} − {names[0]}, paired by problem: accuracy {mean} [{low}, {high}]  pass@1 "
    assert said in capsys.readouterr().out
    assert list(first["pass_at"]) == ["1", "4"] and first["samples"] == 28
    for row in read_rows(Path("out", f"{names[0]}.jsonl"))[1:]:
        assert row["prompt"].startswith(PROBLEMS[row["index"]]["problem"])
        assert [one["reward"] for one in row["samples"]] == [float(len(s["text"]) % 2 == 0) for s in row["samples"]]


@needs_data
def test_math_and_code_are_told_apart(tiny_model):
    for source, columns in (("math500", {"answer"}), ("mbppplus", set())):
        part = Path(f"{source}.jsonl")
        part.write_text("\n".join((SHARED / source / "test.jsonl").read_text().splitlines()[:2]))
        evaluate(tiny_model, "--dataset_name", part, "--num_samples", 2, *FAST, "--output_dir", source)
        (file,) = Path(source).glob("*.jsonl")
        rows = read_rows(file)[1:]
        assert len(rows) == 2 and all(one["reward"] == 0.0 for row in rows for one in row["samples"])
        assert all(row.keys() - {"index", "prompt", "samples"} == columns for row in rows), source


def test_failed_rewards_are_not_wrong_answers(tiny_model, problems, caplog, capsys):
    """Where nothing was scored, there is no figure."""
    for body, accuracy, failed in (
        ("return float(int(answer) > 4) if answer != '6' else 1 / 0", "50.0", "14.3%"),
        ("return None", "–", "100.0%"),
    ):
        evaluate(tiny_model, "--dataset_name", problems, "--num_samples", 2, "--reward_path", rewards(body), *FAST)
        line = next(line for line in capsys.readouterr().out.splitlines() if line.endswith(f" {failed}"))
        assert line.split()[1] == accuracy
    assert "it raised ZeroDivisionError" in caplog.text


# ------------------------------------------------------------------------------------------------------ bad input

SIZES = ("num_samples", "max_completion_length", "per_device_eval_batch_size")
OURS = ("TINY", "--dataset_name", "problems.jsonl", *FAST)


MISTAKES = [
    ((*OURS, "--num_samples", 4, "--k", 1, 8), r"k=\[1, 8\] with num_samples=4.*--num_samples 8"),
    ((*OURS, "--temperature", 0), "greedy decoding"),
    *[((*OURS, f"--{name}", 0), "numbers of 1 or more") for name in SIZES],
    ((*OURS, "--temperature", "nan"), "numbers of 1 or more"),
    ((*OURS, "--dataset_test_split", "train[:0]"), "no row is in it"),
    ((*OURS, "--dataset_test_split", "test"), "has no split 'test'"),
    ((*OURS, "--reward_path", "judge.py"), "rubric"),
    ((*OURS, "--reward_name", "right"), "add --reward_path"),
    ((*OURS, "--dataset_name", "toy", "--dataset_test_split", "dev"), "'toy' has no split"),
    (("TINY",), "add --dataset_name"),
    (("./no/such/model", *OURS[1:]), "./no/such/model' is no model"),
    (("TINY", *OURS), "name each once"),
]


def test_mistakes_are_found_before_weights_are_loaded(tiny_model, problems, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    Path("judge.py").write_text("def compute_score(completions, rubric):\n    return [1.0]\n")
    for arguments, message in MISTAKES:
        refused(message, evaluate, *(tiny_model if one == "TINY" else one for one in arguments))
