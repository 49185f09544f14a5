"""Reading ahead: Transformers gets the same micro-batches as without it, and the prompts of the next windows are known.

The expected prompts are those of a run that does not read ahead (`async_level=0`, Transformers' own reading).
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
from datasets import IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback

from dash_trl import DASHTrainer
from dash_trl.rollout import PromptReader, open_epoch
from tests.tiny import prompts, run


def names(rows):
    return [row["prompt"] for row in rows]


class Walk(DASHTrainer):
    """A trainer without a model that records the prompts of micro-steps and windows, and the announced prompts.

    `ends` contains (optimizer step, number of micro-steps at its end).
    """

    notes = ("seen", "windows", "announced", "ends")

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen.append(names(inputs))
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            self.windows.append(names(inputs))
            self.announced.append([names(rows) for rows in self._reader.upcoming(self._step)])
        self._step += 1
        return torch.zeros((), device=self.args.device)

    def get_batch_samples(self, *args):
        batches, num_items = super().get_batch_samples(*args)
        self.ends.append((self.state.global_step + 1, len(self.seen) + len(batches)))
        return batches, num_items

    def train(self, *args, **kwargs):
        for name in self.notes:
            setattr(self, name, [])
        return super().train(*args, **kwargs)


def walks(model, output, levels=(0, 1, 3), **settings):
    """Trains one trainer with each `async_level`; returns what `Walk` has recorded."""
    trainers, notes = [], []
    settings = {"num_generations": 2, "prepare": trainers.append, **settings}
    run(Walk, model, output, **settings, async_level=levels[0])
    (trainer,) = trainers
    for level in levels:
        if level != levels[0]:
            trainer.args.async_level = level
            trainer.train()
        notes.append(SimpleNamespace(level=level, **{name: getattr(trainer, name) for name in Walk.notes}))
    return notes


def check(model, output, **settings):
    """Of every level, what is handed out is that of level 0, and what is announced is what level 0 samples next.

    Returns the prompts of its windows.
    """
    expected, *others = walks(model, output, **settings)
    windows = expected.windows
    for walk in (expected, *others):
        assert (walk.seen, walk.ends, walk.windows) == (expected.seen, expected.ends, windows), walk.level
        assert walk.announced == [windows[n : n + walk.level] for n in range(1, len(windows) + 1)], walk.level
    return windows


SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 2}


def stream(rows):
    return prompts(rows).to_iterable_dataset()


def read_once(rows):
    """A stream that has nothing when it is read again."""
    left = list(prompts(rows))

    def generate():
        while left:
            yield left.pop(0)

    return IterableDataset.from_generator(generate)


# name → (dataset, settings, windows of the run)
TABLE = {
    "a window is a step, three epochs": (prompts(8), {**SMALL, "max_steps": 12}, 12),
    "by parts of epochs": (prompts(8), {**SMALL, "max_steps": -1, "num_train_epochs": 1.5}, 6),
    "prompts that fill no window": (prompts(7), {**SMALL, "max_steps": -1, "num_train_epochs": 3}, 9),
    "one window in an epoch": (prompts(2), {**SMALL, "max_steps": 5}, 5),
    "several steps of a window": (prompts(8), {**SMALL, "steps_per_generation": 4, "max_steps": 8}, 4),
    "max_steps within a window": (prompts(8), {**SMALL, "steps_per_generation": 8, "max_steps": 5}, 2),
    "several windows of a step": (prompts(9), {**SMALL, "gradient_accumulation_steps": 6, "max_steps": 4}, 8),
    "the last step of an epoch is shorter": (
        prompts(10),
        {**SMALL, "gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 3},
        15,
    ),
    "a window begins within a step": (prompts(12), {**SMALL, "steps_per_generation": 3, "max_steps": 9}, 6),
    "used three times": (prompts(8), {**SMALL, "num_iterations": 3, "max_steps": 7}, 3),
    "rows of tensors": (
        prompts(8).add_column("weights", [[0.5, 0.5]] * 8).with_format("torch"),
        {**SMALL, "max_steps": 5},
        5,
    ),
    "workers that stay": (
        prompts(4),
        {**SMALL, "max_steps": 5, "dataloader_num_workers": 1, "dataloader_persistent_workers": True},
        5,
    ),
    "a stream": (stream(8), {**SMALL, "max_steps": 10}, 10),
    "a stream that fills no window": (stream(7), {**SMALL, "max_steps": 7}, 7),
    "a stream that ends within a step": (stream(10), {**SMALL, "gradient_accumulation_steps": 4, "max_steps": 4}, 9),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_is_announced_is_what_is_sampled(tiny_model, tmp_path, name):
    dataset, settings, expected = TABLE[name]
    windows = check(tiny_model, tmp_path, dataset=dataset, **settings)
    assert len(windows) == expected


@settings(max_examples=8, derandomize=True)
@given(
    st.fixed_dictionaries(
        {
            "per_device_train_batch_size": st.sampled_from([2, 4]),
            "steps_per_generation": st.integers(1, 4),
            "gradient_accumulation_steps": st.integers(1, 5),
            "num_iterations": st.integers(1, 3),
            "shuffle_dataset": st.booleans(),
        }
    ),
    st.integers(1, 4),  # windows in an epoch
    st.integers(0, 1),  # prompts beside them
    st.one_of(st.integers(1, 9), st.sampled_from([0.4, 1.0, 2.5])),  # steps, or epochs
    st.booleans(),
)
def test_any_shape(tiny_model, tmp_path_factory, shapes, windows, more, length, is_stream):
    per_window = shapes["per_device_train_batch_size"] * shapes["steps_per_generation"] // 2
    rows = per_window * windows + min(more, per_window - 1)
    batches = windows * shapes["steps_per_generation"] * shapes["num_iterations"]
    if isinstance(length, float):
        duration = {"max_steps": -1, "num_train_epochs": length}
    else:
        duration = {"max_steps": length}
    is_stream &= isinstance(length, int) and batches >= shapes["gradient_accumulation_steps"]
    dataset = stream(rows) if is_stream else prompts(rows)
    check(tiny_model, tmp_path_factory.mktemp("any"), dataset=dataset, **shapes, **duration)


def test_a_stream_that_can_be_read_once_ends_the_run(tiny_model, tmp_path):
    seen = []
    for level in range(3):
        (walk,) = walks(tiny_model, tmp_path, [level], dataset=read_once(10), **SMALL, max_steps=9)
        assert walk.announced == [walk.windows[n : n + level] for n in range(1, 6)]
        seen.append(walk.seen)
    assert len(seen[0]) == 10 and seen[0] == seen[1] == seen[2]


class EndsTheEpoch(TrainerCallback):
    """At the second event of this name."""

    def __init__(self, event):
        setattr(self, event, self._end)

    def on_train_begin(self, args, state, control, **kwargs):
        self.events = 0

    def _end(self, args, state, control, **kwargs):
        self.events += 1
        control.should_epoch_stop = self.events == 2


@pytest.mark.parametrize(
    "rows, data, event", [(8, prompts, "on_substep_end"), (2, prompts, "on_step_end"), (8, stream, "on_step_end")]
)
def test_a_callback_ends_an_epoch(tiny_model, tmp_path, rows, data, event):
    """What was read ahead of it is not trained on, and what is announced after that is right again."""
    settings = {**SMALL, "max_steps": 6, "dataset": data(rows), "callbacks": [EndsTheEpoch(event)]}
    expected, *others = walks(tiny_model, tmp_path, **settings)
    for walk in others:
        assert (walk.seen, walk.windows) == (expected.seen, expected.windows)
        for n in range(3, len(walk.windows)):
            assert walk.announced[n] == walk.windows[n + 1 : n + 1 + walk.level]


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


def test_a_run_that_is_stopped_lets_go_of_what_was_read_ahead(tiny_model, tmp_path):
    settings = {**SMALL, "num_generations": 2, "dataset": prompts(8), "max_steps": 4, "callbacks": [Stops()]}
    walk = run(Walk, tiny_model, tmp_path, **settings, async_level=2)
    assert [len(ahead) for ahead in walk.announced] == [2] and walk._reader.upcoming(0) == []


def test_a_stream_that_is_over_before_its_first_step_is_refused(tiny_model, tmp_path):
    """Transformers would read it again and again, sample from it, and never take a step."""
    for rows, ends in ((4, 4), (1, 0)):
        with pytest.raises(ValueError, match=f"ends after {ends} micro-.*_steps=6. .* 2 prompts make 2 micro-batches"):
            walks(tiny_model, tmp_path, **{**SMALL, "gradient_accumulation_steps": 6}, dataset=stream(rows))


# ---------------------------------------------------------------------- resume


RAGGED = {**SMALL, "gradient_accumulation_steps": 4, "steps_per_generation": 3, "max_steps": 4}
# name → (dataset, settings, `async_level` before and after)
RESUMED = {
    "a window is a step": (prompts(6), {**SMALL, "max_steps": 8, "save_steps": 3}, (2, 0)),
    "in the middle of a window": (prompts(8), {**SMALL, "steps_per_generation": 6, "max_steps": 7}, (2, 2)),
    "the last step of an epoch is shorter": (
        prompts(7),
        {**SMALL, "gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 3},
        (0, 3),
    ),
    "used twice": (prompts(4), {**SMALL, "num_iterations": 2, "max_steps": 7, "save_steps": 3}, (2, 0)),
    "a stream": (stream(7), {**SMALL, "max_steps": 8, "save_steps": 3}, (0, 3)),
    "a stream that ends within a step, and that within a window": (stream(6), RAGGED, (2, 2)),
    "saved when it has ended": (stream(6), {**RAGGED, "save_strategy": "epoch"}, (2, 2)),
}
GRID = [
    pytest.param(name, levels, marks=() if levels == RESUMED[name][2] else pytest.mark.exhaustive)
    for name in RESUMED
    for levels in ((2, 2), (2, 0), (0, 3))
]


@pytest.mark.parametrize("name, levels", GRID)
def test_no_prompt_is_lost_or_used_twice(tiny_model, tmp_path, name, levels):
    """From every checkpoint, with the same or another `async_level`."""
    dataset, settings, _ = RESUMED[name]
    settings = {"num_generations": 2, "dataset": dataset, "save_strategy": "steps", "save_steps": 1, **settings}
    whole = run(Walk, tiny_model, tmp_path, **settings, async_level=levels[0])
    checkpoints = {int(path.name.removeprefix("checkpoint-")): path for path in tmp_path.glob("checkpoint-*")}
    assert len(checkpoints) >= 2
    for step in checkpoints.keys() - {whole.state.global_step}:
        resume = {"resume": str(checkpoints[step]), "async_level": levels[1]}
        rest = run(Walk, tiny_model, tmp_path / "resumed", **settings, **resume)
        done = dict(whole.ends)[step]
        assert rest.seen == whole.seen[done:] and rest.state.global_step == whole.state.global_step, step
        begun = len(whole.windows) - len(rest.windows)
        assert rest.windows == whole.windows[begun:]
        assert rest.announced == [rest.windows[n : n + levels[1]] for n in range(1, len(rest.windows) + 1)]


# ---------------------------------------------------------------------- the reader alone


def reader(batches, level, window, **settings):
    """Over epochs of numbered rows, each window's in `window` micro-batches, and what was drawn of them."""
    drawn = []

    def epoch(number):
        for i in range(batches):
            drawn.append((number, i))
            yield [{"prompt": f"epoch {number}, window {i // window}"}]

    settings = {"window_batches": window, "step_batches": window, "sized": True, "open_epoch": epoch, **settings}
    return PromptReader(level, **settings), epoch, drawn


def test_no_more_is_read_than_prompts_have_to_be_known():
    one, epoch, drawn = reader(8, 2, 4)
    state = SimpleNamespace(global_step=0, max_steps=4, num_train_epochs=2)
    assert len(list(one.read(epoch(0), 4, step=0, state=state))) == 4
    assert drawn == [(0, i) for i in range(8)] + [(1, 0)]  # the second window, and the first row of the third
    assert [names(rows) for rows in one.upcoming(0)] == [["epoch 0, window 1"], ["epoch 1, window 0"]]


def test_nothing_is_held_when_it_is_closed():
    one, epoch, _ = reader(8, 2, 2)
    state = SimpleNamespace(global_step=0, max_steps=9, num_train_epochs=9)
    given = epoch(0)
    one.read(given, 2, step=0, state=state)
    assert len(one.upcoming(0)) == 2
    alive = weakref.ref(given)
    del given
    assert alive() is not None  # with the dataloader's workers
    one.close()
    assert alive() is None and one.upcoming(0) == []


def test_at_level_0_transformers_reads_itself():
    one, epoch, drawn = reader(8, 0, 2)
    given = epoch(0)
    assert one.read(given, 2, step=0, state=None) is given and drawn == [] and one.upcoming(0) == []


def test_an_epoch_is_opened_as_transformers_opens_it():
    told = []

    class Told(list):
        batch_sampler = SimpleNamespace(batch_sampler=SimpleNamespace(set_epoch=lambda epoch: told.append(epoch)))

        def set_epoch(self, epoch):
            told.append(epoch)

    assert list(open_epoch(Told("ab"), 3)) == ["a", "b"] and told == [3, 3]
    assert list(open_epoch(["c"], 3)) == ["c"]
