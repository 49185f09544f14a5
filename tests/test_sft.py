"""The supervised baselines: solutions by humans, a teacher's traces, and the loss on completions alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl.embedded import arithmetic_dataset, arithmetic_reward, embedded_model, program_dataset
from tests.test_examples import flags, launch

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "examples" / "configs").glob("sft_*.yaml"))
ON_CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}
SMALL = {**ON_CPU, "max_steps": 2, "per_device_train_batch_size": 4}
PARTS = {"dataset_name": "embedded", "dataset_train_split": "train[:24]"}  # of the embedded problems, for traces.py


@pytest.fixture
def examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    (tmp_path / "model").symlink_to(embedded_model())


@pytest.fixture
def sft(examples):
    import sft

    return sft


@pytest.fixture
def traces(examples):
    import traces

    return traces


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ------------------------------------------------------------------------------------------- solutions by humans


def test_humans_are_right_and_skip_steps():
    rows = list(arithmetic_dataset("train", size=500, completion=True))
    texts = [row["completion"][0]["content"] for row in rows]
    assert set(arithmetic_reward(texts, [row["answer"] for row in rows])) == {1.0}
    for row, text in zip(rows, texts, strict=True):
        operations = len(re.findall(r"[+-]", row["prompt"][0]["content"]))
        *sums, _ = text.split("\n")
        assert len(sums) == (operations + 1) // 2  # the model was taught one operation a line
        assert all(eval(left) == int(right) for left, right in (line.split("=") for line in sums))
    by_problem = {row["prompt"][0]["content"]: text for row, text in zip(rows, texts, strict=True)}
    assert by_problem["7+9-2-2+4"] == "7+9-2=14\n14-2+4=16\nThe answer is 16"
    assert "completion" not in arithmetic_dataset("train", size=1).column_names


def test_programs_by_humans_pass_the_tests():
    for row in program_dataset("test", size=50, completion=True):
        names: dict = {}
        exec(row["completion"][0]["content"], names)
        assert all(eval(test.removeprefix("assert "), names) for test in row["tests"])


# -------------------------------------------------------------------------------------------------------- sft.py


def likelihood(model: str, row: dict) -> float:
    """Mean log P of the tokens of a completion and its end."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    start = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    ends = row["completion"][0]["content"] + "<|im_end|>"
    prompt, completion = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (start, ends))
    with torch.no_grad():
        logits = network(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
    return sum(logits[len(prompt) + i - 1, token].item() for i, token in enumerate(completion)) / len(completion)


LEARNS = {**SMALL, "max_steps": 8, "per_device_train_batch_size": 32, "output_dir": "out"}


def test_it_learns_what_humans_wrote(sft, tmp_path, capsys):
    sft.main(flags(LEARNS))
    said = capsys.readouterr().out
    assert re.search(r"sampled accuracy on 256 .*: 0\.\d+ before, .* after\ngreedy accuracy", said)
    assert "metrics: out/metrics.jsonl\nmodel:   out\n" in said
    row = arithmetic_dataset("test", completion=True)[0]
    assert likelihood("out", row) > likelihood("model", row)


def test_it_learns_programs(sft, tmp_path, monkeypatch):
    import train_math

    monkeypatch.setattr(train_math, "measure", lambda *arguments: {})
    sft.main(flags({**LEARNS, "dataset_name": "embedded_code"}))
    losses = [row["loss"] for row in rows_of(tmp_path / "out" / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.parametrize("chat", [True, False])
def test_the_loss_is_on_the_completion_alone(sft, tmp_path, monkeypatch, chat):
    """What the trainer's own collator masks: of a conversation the prompt and the assistant's header, of a text it."""
    trainers = []
    monkeypatch.setattr(sft, "train_and_measure", lambda trainer, *rest: trainers.append(trainer))
    prompt, completion = "7+5", "7+5=12\nThe answer is 12"
    row = {"prompt": prompt, "completion": completion}
    if chat:
        roles = {"prompt": "user", "completion": "assistant"}
        row = {name: [{"role": roles[name], "content": text}] for name, text in row.items()}
    write(tmp_path / "rows.jsonl", [row] * 4)
    sft.main(flags({**SMALL, "model_name_or_path": "model", "completions": "rows.jsonl", "output_dir": "out"}))
    (trainer,) = trainers
    batch = next(iter(trainer.get_train_dataloader()))
    learned = [
        trainer.processing_class.decode(ids[labels != -100])
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    assert learned == [completion + "<|im_end|>" + ("\n" if chat else "")] * 4
    assert all(prompt in trainer.processing_class.decode(ids) for ids in batch["input_ids"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_table_8(sft, path):
    """Every file is a run without mistakes, and its values are the paper's."""
    types = (sft.SupervisedArguments, sft.SupervisedConfig, sft.ModelConfig)
    script, args, model = sft.parse([f"--config={path}", "--use_cpu", "--bf16=False"], types, sft.supervised_defaults())
    sft.check_arguments(script, args, model)
    kind, size = path.stem.split("_qwen2.5-")
    run = yaml.safe_load(path.read_text())
    assert model.model_name_or_path.lower() == f"qwen/qwen2.5-{size}" and run["output_dir"] == f"outputs/{path.stem}"
    assert (args.learning_rate, args.num_train_epochs) == (2e-5, 3)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 2)
    assert (args.max_length, args.completion_only_loss, model.use_peft) == (None, None, False)
    assert args.eos_token == "<|im_end|>"
    assert {"sft_h": script.dataset_name, "sft_m": script.completions, "sft_h_code": script.dataset_name}[kind] == {
        "sft_h": "nlile/hendrycks-MATH-benchmark",
        "sft_m": "outputs/traces_qwen2.5-7b-instruct.jsonl",
        "sft_h_code": "evalplus/mbppplus",
    }[kind]
    assert f"--config examples/configs/{path.name}" in path.read_text()


def test_there_is_a_file_for_every_run_of_tables_1_and_2():
    sizes = {"sft_h": ("0.5b", "1.5b", "3b"), "sft_m": ("0.5b", "1.5b", "3b"), "sft_h_code": ("0.5b", "1.5b")}
    assert {path.stem for path in CONFIGS} == {f"{kind}_qwen2.5-{size}" for kind in sizes for size in sizes[kind]}


GOOD = {"prompt": "1+1", "completion": "2"}
MODEL, DATA, FILE = ({"model_name_or_path": "model"}, {"dataset_name": "own.jsonl"}, {"completions": "rows.jsonl"})


@pytest.mark.parametrize(
    ("settings", "rows", "message"),
    [
        # half a task, or two
        (MODEL, [], "model_name_or_path='model' is given, but no dataset"),
        (DATA, [], "dataset_name='own.jsonl' is given, but no model"),
        ({**MODEL, **DATA, **FILE}, [], "dataset_name='own.jsonl' has no effect with completions='rows.jsonl'"),
        ({**MODEL, **FILE, "prompt_template": "plain"}, [], "prompt_template='plain' has no effect with completions="),
        ({**FILE, "eval_strategy": "steps"}, [], "no others to evaluate: leave --eval_strategy out"),
        ({**MODEL, **DATA, "reward_path": "own.py"}, [], "reward_path='own.py' has no effect on supervised"),
        ({**MODEL, **DATA, "dataset_streaming": True}, [], "dataset_streaming=True has no effect"),
        ({"model_name_or_path": "./nowhere", **FILE}, [GOOD], "model='./nowhere' cannot be loaded"),
        # the file of completions
        ({**FILE, "completions": "none.jsonl"}, [], "completions='none.jsonl' cannot be read .*: correct the path"),
        (FILE, [], "completions='rows.jsonl' has no rows"),
        (FILE, [GOOD, {"prompt": "p", "text": "t"}], r"Line 2 of rows.jsonl lacks .* it has \['prompt', 'text'\]"),
        (FILE, [{"settings": {}}, GOOD], r"Line 1 of rows.jsonl lacks .* it has \['settings'\].*not its \*.samples"),
        (FILE, [{**GOOD, "completion": ""}], "Line 1 of rows.jsonl has an empty completion"),
        (FILE, [{**GOOD, "completion": [{"role": "assistant", "content": "2"}]}], "or one of another form than its"),
        # the data set
        ({**MODEL, **DATA}, [], r"own.jsonl' lack a solution in 'answer' \(an answer alone is none"),
        (
            {**MODEL, "dataset_name": "other.jsonl"},
            [],
            r"neither gold answers .* its columns are \['problem', 'gold'\]",
        ),
        ({**MODEL, "dataset_name": "code.jsonl"}, [], "1 of 1 rows of 'code.jsonl' lack a solution in 'code'"),
    ],
)
def test_mistakes(sft, tmp_path, monkeypatch, settings, rows, message):
    monkeypatch.setattr(sft, "SFTTrainer", None)
    write(tmp_path / "rows.jsonl", rows)
    write(tmp_path / "own.jsonl", [{"problem": "1+1", "answer": "2"}])
    write(tmp_path / "other.jsonl", [{"problem": "1+1", "gold": "2"}])
    write(tmp_path / "code.jsonl", [{"text": "Add.", "code": "", "test_list": ["assert add(1, 1) == 2"]}])
    with pytest.raises(ValueError, match=message):
        sft.main(flags({**SMALL, **settings}))


def test_a_chat_template_that_never_ends_is_refused(sft):
    tokenizer = AutoTokenizer.from_pretrained("model")
    chat = [{"role": "user", "content": "1+1"}], [{"role": "assistant", "content": "2"}]
    rows = Dataset.from_list([dict(zip(("prompt", "completion"), chat, strict=True))])
    args = sft.SupervisedConfig("out", **ON_CPU)
    sft.check_completions(rows, tokenizer, args)
    tokenizer.eos_token = "<|endoftext|>"  # as a base model's, whose template is a chat model's
    with pytest.raises(
        ValueError, match=r"ends a message with '<\|im_end\|>\\n', without .*'<\|endoftext\|>'.*--eos_token"
    ):
        sft.check_completions(rows, tokenizer, args)
    sft.check_completions(rows, tokenizer, sft.SupervisedConfig("out", eos_token="<|im_end|>", **ON_CPU))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template: add --chat_template_path"):
        sft.check_completions(rows, tokenizer, args)


def test_rows_that_are_cut_off_are_counted(sft, caplog):
    rows = Dataset.from_list([GOOD, {"prompt": "1+1", "completion": "2" * 50}])
    args = sft.SupervisedConfig("out", max_length=20, **ON_CPU)
    sft.check_completions(rows, AutoTokenizer.from_pretrained("model"), args)
    assert (
        "max_length=20 cuts the ends, and so the answers, off 1 of 2 rows; the longest has 54 tokens."
        in caplog.messages
    )


# ----------------------------------------------------------------------------------------------------- traces.py


def sampled(path: str) -> list[dict]:
    _, *rows = rows_of(Path(path))
    return [sample for row in rows for sample in row["samples"]]


def test_correct_traces_are_kept_and_learned_from(traces, sft, tmp_path, capsys):
    traces.main(["model", *flags({**PARTS, "num_samples": 2, "output": "t.jsonl", "temperature": 1.0})])
    kept, samples = rows_of(tmp_path / "t.jsonl"), sampled("t.samples.jsonl")
    problems = arithmetic_dataset("train").select(range(24)).to_list()
    expected = [
        {**problem, "completion": [{"role": "assistant", "content": one["text"]}]}
        for problem, pair in zip(problems, zip(samples[::2], samples[1::2], strict=True), strict=True)
        for one in pair
        if arithmetic_reward([one["text"]], [problem["answer"]]) == [1.0]
    ]
    assert kept == expected and 0 < len(kept) < 48
    wrong = 48 - len(kept)
    assert f"48 traces of 24 problems: {len(kept)} kept, {wrong} wrong, 0 cut off, 0 failed" in capsys.readouterr().out
    sft.main(flags({**SMALL, "completions": "t.jsonl", "output_dir": "out", "max_steps": 1}))
    assert "accuracy on 256" in capsys.readouterr().out
    sft.main(flags({**SMALL, "completions": "t.jsonl", "output_dir": "out", "max_steps": 1, **MODEL}))
    assert "accuracy on 256" not in capsys.readouterr().out


def test_an_interrupted_run_goes_on_to_the_same_files(traces, tmp_path, monkeypatch):
    arguments = ["model", *flags({**PARTS, "num_samples": 2, "per_device_eval_batch_size": 8})]
    traces.main([*arguments, "--output", "whole.jsonl"])
    scored = []

    def interrupted(*arguments):
        scored.append(None)
        if len(scored) == 40:
            raise KeyboardInterrupt
        return real(*arguments)

    real = traces.scored
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(traces, "scored", interrupted)
        traces.main([*arguments, "--output", "cut.jsonl"])
    assert not (tmp_path / "cut.jsonl").exists()
    (tmp_path / "cut.samples.jsonl").open("a").write('{"index": 20, "samp')
    traces.main([*arguments, "--output", "cut.jsonl"])
    for name in ("{}.jsonl", "{}.samples.jsonl"):
        assert (tmp_path / name.format("cut")).read_text() == (tmp_path / name.format("whole")).read_text()
    traces.main([*arguments, "--output", "cut.jsonl"])  # all is there: nothing is sampled, nothing changes
    with pytest.raises(
        ValueError, match="cut.samples.jsonl is of other settings: .*temperature is 0.7 there and 0.5 here"
    ):
        traces.main([*arguments, "--output", "cut.jsonl", "--temperature", "0.5"])
    (tmp_path / "cut.jsonl").write_text("mine\n")
    with pytest.raises(ValueError, match="cut.jsonl has other rows than these traces: choose another --output"):
        traces.main([*arguments, "--output", "cut.jsonl"])
    assert (tmp_path / "cut.jsonl").read_text() == "mine\n"


def test_programs_and_what_is_cut_off(traces, tmp_path, capsys):
    """Rows of MBPP's columns; the tests decide, in the sandbox, and what was cut off is not kept though it passes."""
    row = {"text": "f", "test_list": ["assert f(1) == 1"]}
    write(tmp_path / "code.jsonl", [row] * 2)
    with pytest.raises(ValueError, match="No trace is kept: of 2 there are 2 wrong, 0 cut off, 0 failed. Look at them"):
        traces.main(["model", *flags({"dataset_name": "code.jsonl", "max_completion_length": 4, "output": "t.jsonl"})])
    fates = {(1.0, False): "kept", (1.0, True): "cut off", (0.0, True): "wrong", (None, False): "failed"}
    for (reward, truncated), fate in fates.items():
        assert traces.fate({"reward": reward, "truncated": truncated}) == fate


def test_the_embedded_teacher_is_the_model_after_rl_and_is_kept(traces, tmp_path, monkeypatch):
    import train_math

    cache = tmp_path / "cache" / "dash_trl"
    shutil.copytree(Path(embedded_model()), cache / Path(embedded_model()).name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    short = {
        **train_math.embedded_defaults(),
        "max_steps": 1,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 8,
    }
    monkeypatch.setattr(train_math, "embedded_defaults", lambda: short)
    monkeypatch.setattr(train_math, "measure", lambda *arguments: {})
    run = ["embedded", *flags({"dataset_train_split": "train[:4]", "max_completion_length": 64})]
    traces.main([*run, "--output", "one.jsonl"])
    (teacher,) = cache.glob("teacher-*")
    assert (teacher / "metrics.jsonl").exists() and json.loads(Path("one.samples.jsonl").read_text().splitlines()[0])
    monkeypatch.setattr(traces, "train", None)
    traces.main([*run, "--output", "two.jsonl"])
    assert Path("one.jsonl").read_text() == Path("two.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "There are no problems for 'model': add --dataset_name"),
        (["./nowhere", "--dataset_name", "embedded"], "nowhere' cannot be read: no directory or hub name"),
        (["model", *flags({**PARTS, "dataset_train_split": "test"})], "'embedded' has no split 'test': use 'train'"),
        (
            ["embedded", "--prompt_template", "plain"],
            "prompt_template='plain' has no effect with dataset_name='embedded'",
        ),
        (
            ["embedded", "--dataset_test_split", "dev"],
            "dataset_test_split='dev' has no effect: traces are of the training",
        ),
        (["embedded", "--reward_name", "x"], "reward_name='x' has no effect without --reward_path"),
        (["embedded", "--use_vllm", "--per_device_eval_batch_size", "8"], "=8 has no effect with vLLM"),
        (["model", *flags({**PARTS, "temperature": 0, "num_samples": 2})], "greedy decoding .* gives one sample"),
        (["model", *flags({**PARTS, "output": "mine.jsonl"})], "mine.jsonl exists, and mine.samples.jsonl"),
        (["model", "--dataset_name", "other.jsonl"], r"neither gold answers .* columns are \['problem', 'gold'\]"),
    ],
)
def test_mistakes_about_traces(traces, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(traces, "train", None)
    write(tmp_path / "mine.jsonl", [GOOD])
    write(tmp_path / "other.jsonl", [{"problem": "1+1", "gold": "2"}])
    with pytest.raises(ValueError, match=message):
        traces.main(arguments)


@pytest.mark.slow
def test_without_arguments_it_unlearns_what_humans_skip(tmp_path):
    """As in the paper; the teacher's traces do not."""
    done = launch("--output_dir", tmp_path, script="sft")
    accuracy = dict(re.findall(r"(sampled|greedy) accuracy on 256 .*: (.* before, .*) after", done.stdout))
    before, after = map(float, accuracy["greedy"].split(" before, "))
    assert before >= 0.9 and before - after >= 0.2, done.stdout
