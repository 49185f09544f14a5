"""A resumed run equals an uninterrupted one: parameters, window, order of the prompts; or it says that it cannot."""

import os
import re
import shutil
import zlib
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from peft import LoraConfig

from dash_trl import DASHTrainer, manifest
from dash_trl.checkpoints import checkpoint_to_resume, compared
from dash_trl.rollout import SavedRun, Shapes, one_run, why_a_new_window
from tests import doubles
from tests.doubles import WIDER, SaveEarly, same
from tests.tiny import ScriptedReward, prompts, refusal, refused, run

# 32 rows per window and 16 per optimizer step
recorded = partial(doubles.recorded, steps_per_generation=8, reward=ScriptedReward(constant=0.2))


def saved_files(run, runs):
    """Folders `checkpoint-N` of files, which are of the given runs."""
    for step, name in runs.items():
        manifest.begin(folder := run / f"checkpoint-{step}", {name: step})
        (folder / "global_step1").mkdir()
        (folder / "global_step1" / "optimizer.pt").write_bytes(b"state")
        (folder / "trainer_state.json").write_text('{"global_step": 1}')
        manifest.finish(folder, {name: step})


def test_the_checkpoint_that_is_named(tmp_path):
    """The copy, and the half of one, which is later, are none."""
    saved_files(run := tmp_path / "run", {9: "A", 10: "A"})
    shutil.copytree(run / "checkpoint-9", run / "checkpoint-11-copy")
    (run / "checkpoint-12").mkdir()
    last = str(run / "checkpoint-10")
    other = str(run / "checkpoint-9")
    for value in (True, "true", "True", str(run), last):
        assert checkpoint_to_resume(value, str(run)) == last
    assert checkpoint_to_resume(other, str(run)) == other
    assert {checkpoint_to_resume(value, str(run)) for value in (None, False, "False")} == {None}
    for value, said in ((True, "has no"), ("nowhere", "does not exist"), (str(run / "checkpoint-12"), "-12 has no")):
        refused(rf"={value!r} names no whole.*{said}", checkpoint_to_resume, value, str(tmp_path))


@pytest.mark.parametrize("name", ["global_step1/optimizer.pt", "trainer_state.json", manifest.LIST])
@pytest.mark.parametrize(
    "harm",
    [
        Path.unlink,
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    ],
    ids=["deleted", "halved"],
)
def test_a_damaged_checkpoint_is_skipped_or_refused(tmp_path, caplog, name, harm):
    saved_files(tmp_path, {1: "A", 2: "A"})
    harm(tmp_path / "checkpoint-2" / name)
    named = str(tmp_path / "checkpoint-2")
    if name == manifest.LIST and harm is Path.unlink:
        assert checkpoint_to_resume(named, "") == named and "so its files are not checked" in caplog.text
        return
    assert checkpoint_to_resume(True, str(tmp_path)) == str(tmp_path / "checkpoint-1")
    assert f"not from a later one: in {named}, {name} is missing, damaged" in caplog.text
    refused(f"in {named}, {name} is missing, damaged", checkpoint_to_resume, named, "")


def test_checkpoints_of_another_run_do_not_count(tmp_path, caplog):
    saved_files(tmp_path, {1: "A", 2: "B", 3: "A"})
    resumed = manifest.new_run(str(tmp_path / "checkpoint-1"))
    for runs, step in (({"A": 9}, 3), ({"A": 1, "B": 9}, 2), (resumed, 1)):
        manifest.write(tmp_path / manifest.RUN, {"runs": runs})
        assert checkpoint_to_resume(True, str(tmp_path)) == str(tmp_path / f"checkpoint-{step}")
    assert "checkpoint-3 is of another run (A)" in caplog.text
    manifest.write(tmp_path / manifest.RUN, {"runs": {"C": 9}})  # killed before its first checkpoint
    with suppress(OSError), mock.patch.object(Path, "replace", side_effect=OSError):
        manifest.write(tmp_path / manifest.RUN, {})  # a full disk
    (tmp_path / "checkpoint-1" / manifest.LIST).unlink()  # TRL's
    refused(r"-3 is of another run \(A\).*-1 is of another run \(c", checkpoint_to_resume, True, str(tmp_path))


def test_of_a_large_file_each_kth_part_counts(tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    with mock.patch.multiple(manifest, CHUNK=2, MOST=4):
        assert manifest.checksum(tmp_path / "file") == [10, zlib.crc32(b"0167")]


def test_a_run_in_an_old_folder_goes_on_from_its_own_checkpoints(train, tmp_path, caplog):
    saving = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}
    recorded(train, **saving, max_steps=3)
    (tmp_path / "checkpoint-1" / "old").touch()
    with suppress(OSError), mock.patch.object(manifest, "finish", side_effect=OSError):
        recorded(train, **saving, save_total_limit=1)
    refused("checkpoint-1, _files.json is missing", checkpoint_to_resume, str(tmp_path / "checkpoint-1"), "")
    recorded(train, **saving)
    assert not (tmp_path / "checkpoint-1" / "old").exists()
    for old in tmp_path.glob("checkpoint-*"):  # Transformers deletes by age, if this is more than a second
        os.utime(old, (0, 0))
    windows, resumed = recorded(train, True, **saving, max_steps=2, save_total_limit=1)
    assert len(windows) == 1 and resumed.state.global_step == 2
    assert "/checkpoint-1, not from a later one:" in caplog.text and "checkpoint-3 is of another" in caplog.text
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert checkpoint_to_resume(True, str(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert [*manifest.runs_of(tmp_path / "checkpoint-2").values()] == [1, 2]


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory):
    """What the windows of a run of 6 steps sampled, a folder with its checkpoints 1 (mid-window) to 5, and its end."""
    output = tmp_path_factory.mktemp("saved")
    settings = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 2,
        "callbacks": [SaveEarly()],
    }
    windows, whole = recorded(partial(run, DASHTrainer, tiny_model, output), **settings)
    assert len(windows) == 3 and len(windows[0]) == 8
    return windows, output, whole


@pytest.mark.parametrize("at", [3, 5], ids=["in the middle of a window", "within a step, which is repeated"])
def test_resumed_equals_uninterrupted(train, tmp_path, saved, at):
    windows, output, whole = saved
    seen, resumed = recorded(train, output / f"checkpoint-{at}", max_steps=6, logging_steps=2)
    assert seen == windows[(at + 1) // 2 :]
    same(whole, resumed)
    assert not (tmp_path / manifest.RUN).exists()  # it saves none


# Two uses of a window, and two windows of an epoch: TRL would repeat the first one's order in the second.
EPOCHS = {"num_iterations": 2, "steps_per_generation": 4, "dataset": prompts(8), "max_steps": 7}
# In its second reading Transformers would skip more than the stream has.
STREAM = {"dataset": prompts(16).to_iterable_dataset(), "max_steps": 7}


@pytest.mark.parametrize(
    ("settings", "windows_left"), [(EPOCHS, {3: 2, 4: 2, 5: 1}), (STREAM, {5: 1})], ids=["epochs", "stream"]
)
def test_the_second_epoch_goes_on_where_it_was(train, tmp_path, settings, windows_left):
    """From between two uses of a window, the last one of an epoch too, and from an epoch's end."""
    saves = {"save_strategy": "steps", "save_steps": 1}
    windows, whole = recorded(train, **settings, **saves)
    assert whole.state.epoch > 1
    for at, left in windows_left.items():
        checkpoint = tmp_path / f"checkpoint-{at}"
        seen, resumed = recorded(train, checkpoint, **settings)
        assert seen == windows[-left:] and resumed.state.global_step == whole.state.global_step
        same(whole, resumed)


# ---------------------------------------------------------------------- with other shapes than the checkpoint's


def test_other_shapes_go_on_at_the_first_unused_prompt(train, caplog, saved):
    windows, output, _ = saved
    with caplog.at_level("WARNING", logger="dash_trl.checkpoints"):
        seen, trainer = recorded(train, output / "checkpoint-2", **WIDER, max_steps=6)
    assert seen == windows[1:]
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log][1:]
    assert len(norms) == 2 and min(norms) > 0.1
    (said,) = [record.getMessage() for record in caplog.records if record.name == "dash_trl.checkpoints"]
    assert "per_device_train_batch_size=4 (now 8), gradient_accumulation_steps=4 (now 2)" in said
    assert (
        "after prompt 8 of epoch 0, with 0 of 8 micro-batches of its window left; training goes on with a new" in said
    )


def test_others_in_the_middle_of_a_window_are_refused(train, saved):
    message = r"size=4 \(now 8\).*above 0=False \(now True\), correction=None .* 4 of 8 micro.*ignore_data_skip=True"
    changed = {**WIDER, "beta": 0.04, "loss_type": "decoupled_ppo"}
    refused(message, recorded, train, saved[1] / "checkpoint-1", **changed, max_steps=6)


def test_a_run_that_has_ended_makes_no_further_step(train, caplog, saved):
    assert recorded(train, saved[1] / "checkpoint-1")[1].state.global_step == 1
    assert "The run has made all of its 1 steps" in caplog.text


@pytest.mark.parametrize("shapes", [{}, WIDER], ids=["same shapes", "other shapes"])
def test_the_prompts_of_the_epoch_begin_again(train, saved, shapes):
    """With `ignore_data_skip` they do; the rest of the checkpoint's window is left out."""
    windows, output, _ = saved
    checkpoint = output / "checkpoint-3"  # half of the second window is used
    seen, trainer = recorded(train, checkpoint, max_steps=6, ignore_data_skip=True, **shapes)
    assert seen == windows[:2]
    assert trainer.state.global_step == 6


def test_another_kind_of_weights_is_refused(train, tmp_path, saved):
    """Else the weights would not be loaded."""
    lora = LoraConfig(target_modules=["q_proj"])
    adapted = tmp_path / "adapted"
    train(output=adapted, peft_config=lora, save_strategy="steps", save_steps=1).save_model()
    full = saved[1] / "checkpoint-3"
    adapter = adapted / "checkpoint-1"
    for checkpoint, settings, said in (
        (full, {"peft_config": lora}, "the weights of a whole model, but .* an adapter"),
        (adapter, {"peft_config": LoraConfig(lora_alpha=64)}, "an adapter with .*lora_alpha=8, here 64"),
        (adapter, {"peft_config": LoraConfig(layers_to_transform=[0])}, "layers_to_transform=None, here .0"),
        (adapter, {}, "the weights of an adapter, but this run trains all weights"),
    ):
        said = f"{checkpoint} .*{said}.* new run with its weights"
        refused(said, recorded, train, checkpoint, max_steps=6, **settings)
    train(output=adapted).save_model()
    assert not (adapted / "adapter_config.json").exists()  # it would be loaded onto the model


def test_a_checkpoint_without_a_window_is_said(train, tmp_path, caplog, saved):
    windows, output, _ = saved
    for name, works in ("checkpoint-2", True), ("checkpoint-1", False):
        checkpoint = tmp_path / name
        shutil.copytree(output / name, checkpoint)
        for file in ("generation_window_0.pt", manifest.LIST, "scheduler.pt", "optimizer.pt", "rng_state.pth"):
            (checkpoint / file).unlink()
        with (
            nullcontext() if works else pytest.raises(ValueError, match="has no generation window. Transformers would")
        ):
            seen, _ = recorded(train, checkpoint, max_steps=4)
            assert seen == windows[1:2]
    assert "has no generation window; training goes on with a new" in caplog.text
    assert re.search("-2 has no optimizer.* anew; no scheduler.pt.* anew; no rng_state.* anew", caplog.text)


def test_settings_of_the_checkpoint(train, caplog, saved):
    """Those of the optimizer hold, and it is said. Others may change between two windows."""
    middle, end = (saved[1] / f"checkpoint-{step}" for step in (1, 2))
    change = {"temperature": 2.0, "learning_rate": 1e-5, "weight_decay": 0.5, "adam_beta2": 0.9}
    _, trainer = recorded(train, end, max_steps=3, **change)
    assert trainer.state.log_history[-2]["learning_rate"] == 1e-3
    for said in ("learning_rate=0.001", "weight_decay=0.0", r"adam_beta=\(0.9, 0.999\)"):
        assert re.search(rf"{end} has .*{said}, which is used", caplog.text)
    assert "has max_steps=6, so after one step, the learning rate follows the schedule of 3 steps" in caplog.text
    assert "new generation window" not in caplog.text
    said = r"temperature=1.0 \(now 2.0\), sampler_is_old=False \(now True\).* 4 of 8 micro-batches"
    refused(said, recorded, train, middle, max_steps=3, temperature=2.0, loss_type="aipo")
    saved_group = {"momentum": 0, "initial_lr": 1}  # this run has no schedule
    assert "has momentum=0, which is used, not 1" in compared(end, [{"momentum": 1}], [saved_group], 6)
    for optimizer in ("sgd", "adafactor"):
        refused("another optimizer, .*'betas'", recorded, train, end, max_steps=3, optimizer=optimizer)


def test_a_damaged_file_is_refused(train, tmp_path, saved):
    """Also of a checkpoint that does not list its files."""
    torch.save({"window": {}}, other := tmp_path / "of_another_version.pt")
    assert "cannot be loaded: it is damaged, or of another version" in refusal(SavedRun.load, str(other))
    for name in ("generation_window_0.pt", "optimizer.pt", "model.safetensors"):
        checkpoint = shutil.copytree(saved[1] / "checkpoint-1", tmp_path / name)
        (checkpoint / manifest.LIST).unlink()
        (checkpoint / name).write_bytes(b"a note")
        said = f"{name} cannot be loaded: .*Resume from another checkpoint"
        refused(said, recorded, train, checkpoint)


# ---------------------------------------------------------------------- the rule, without a model

SHAPES = Shapes(
    processes=2,
    prompts=64,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    steps_per_generation=4,
    num_iterations=1,
    num_generations=4,
    shuffle_seed=0,
    queues_prompts=False,
)
SAVED = SavedRun(SHAPES, position=(0, 4), step=4, skipped_steps=0, window=None)


def test_ranks_agree_or_refuse_together():
    for found in ([None, SAVED], [SAVED, replace(SAVED, step=8)]):
        refused("is missing, or of another step", one_run, found, 2, "checkpoint-1")
    assert one_run([SAVED, SAVED], 2, "checkpoint-1") == SAVED
    assert one_run([SAVED, SAVED, None], 3, "checkpoint-1") == SAVED  # there were two


HALVED = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 2}


# Old shapes, what they used as (epoch, micro-batches), new shapes, where Transformers would go on with these, verdict
GOES_ON = [
    ({}, (0, 6), {}, (0, 6), "old"),
    ({}, (0, 8), HALVED, (0, 4), "new"),
    ({}, (0, 8), HALVED, (0, 6), "refused"),  # prompts are lost
    ({}, (0, 6), HALVED, (0, 4), "new"),  # the rest of a window whose prompts were used is thrown away
    ({}, (0, 8), {"processes": 1}, (0, 16), "new"),
    ({"num_iterations": 2}, (0, 8), {}, (0, 4), "new"),
    ({}, (1, 8), HALVED, (0, 4), "refused"),  # of another epoch
    ({}, (0, 8), {"prompts": 72}, (0, 8), "refused"),  # in another order
    ({}, (0, 8), {"shuffle_seed": 1}, (0, 8), "refused"),
    ({}, (0, 8), {"queues_prompts": True}, (0, 8), "refused"),  # micro-steps do not tell a queue's place
    ({"queues_prompts": True}, (0, 8), {}, (0, 8), "refused"),
    ({}, (1, 0), {"prompts": 72}, (1, 0), "new"),
]


def test_a_run_goes_on_where_no_prompt_is_lost_or_used_twice():
    for old, used, new, start, verdict in GOES_ON:
        saved = SavedRun(replace(SHAPES, **old), position=used, step=4, skipped_steps=0, window=None)
        now = replace(SHAPES, **new)
        refused = verdict == "refused"
        with pytest.raises(ValueError, match="would be lost, or used twice") if refused else nullcontext():
            reason = why_a_new_window(saved, now, start, checkpoint="c")
            assert (reason is None) == (verdict == "old"), (old, used, new, start)


def test_a_position_is_counted_in_micro_batches():
    assert replace(SHAPES, num_iterations=3).position(2.25, max_steps=1) == (2, 24)
    assert replace(SHAPES, prompts=207).position(0.29, max_steps=1) == (0, 29)  # of 100; 28.999999999999996 in floats
    assert replace(SHAPES, prompts=None).position(0.5, max_steps=20) == (0, 40)
