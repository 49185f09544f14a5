"""Reading ahead: Transformers gets the same micro-batches as without it, and the prompts of the next windows are known.

The expected prompts are those of a run that does not read ahead (`async_level=0`, Transformers' own reading).
"""

import sys
import weakref
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from datasets import IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback, TrainerState

from dash_trl import DASHTrainer
from dash_trl.rollout import PromptReader, open_epoch
from tests.tiny import prompts, run


def names(rows):
    return [row["prompt"] for row in rows]


class Walk(DASHTrainer):
    """A trainer without a model that records the prompts of micro-steps.

    `ends` contains (optimizer step, number of micro-steps at its end).
    """

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.seen.append(names(inputs))
        self._step += 1
        return torch.zeros((), device=self.args.device)

    def get_batch_samples(self, *args):
        batches, num_items = super().get_batch_samples(*args)
        self.ends.append((self.state.global_step + 1, len(self.seen) + len(batches)))
        return batches, num_items

    def train(self, *args, **kwargs):
        self.seen, self.ends = [], []
        return super().train(*args, **kwargs)


def check(model, output, **settings):
    """Reading ahead changes nothing in what is handed out. Returns the number of windows."""
    walk = run(Walk, model, output, **{"num_generations": 2, **settings})
    seen, ends, walk.args.async_level = walk.seen, walk.ends, 2
    walk.train()
    assert (walk.seen, walk.ends) == (seen, ends), settings
    return len(seen[:: walk.args.steps_per_generation * walk.args.num_iterations])


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
    "by parts of epochs": (prompts(8), {**SMALL, "max_steps": -1, "num_train_epochs": 1.5}, 6),
    "prompts that fill no window": (prompts(7), {**SMALL, "max_steps": -1, "num_train_epochs": 3}, 9),
    "max_steps within a window": (prompts(8), {**SMALL, "steps_per_generation": 8, "max_steps": 5}, 2),
    "several windows of a step": (prompts(9), {**SMALL, "gradient_accumulation_steps": 6, "max_steps": 4}, 8),
    "the last step of an epoch is shorter": (
        prompts(10),
        {**SMALL, "gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 3},
        15,
    ),
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
    "a stream that fills no window": (stream(7), {**SMALL, "max_steps": 7}, 7),
    "a stream that ends within a step": (stream(10), {**SMALL, "gradient_accumulation_steps": 4, "max_steps": 4}, 9),
}


def test_what_is_handed_out_does_not_depend_on_reading_ahead(tiny_model, tmp_path):
    for name, (dataset, shape, expected) in TABLE.items():
        assert check(tiny_model, tmp_path, dataset=dataset, **shape) == expected, name


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
        settings = {"num_generations": 2, "dataset": read_once(10), "max_steps": 9, "async_level": level}
        seen.append(run(Walk, tiny_model, tmp_path, **SMALL, **settings).seen)
    assert len(seen[0]) == 10 and seen[0] == seen[1] == seen[2]


def test_the_next_epoch_of_a_stream_is_read_as_soon_as_its_prompts_have_to_be_known(tiny_model, tmp_path):
    """The micro-batches that are left at the end of an epoch make no step of their own."""
    trainers, begun = [], []

    def rows():
        begun.append(len(trainers[0].seen) if trainers else 0)
        yield from prompts(10)

    settings = {**SMALL, "gradient_accumulation_steps": 4, "max_steps": 3, "num_generations": 2, "async_level": 2}
    run(Walk, tiny_model, tmp_path, dataset=IterableDataset.from_generator(rows), prepare=trainers.append, **settings)
    assert begun[-1] == 4 and len(trainers[0].seen) == 14


class EndsTheEpoch(TrainerCallback):
    """At the second event of this name."""

    def __init__(self, event):
        setattr(self, event, self._end)

    def on_train_begin(self, args, state, control, **kwargs):
        self.events = 0

    def _end(self, args, state, control, **kwargs):
        self.events += 1
        control.should_epoch_stop = self.events == 2


def test_a_callback_ends_an_epoch(tiny_model, tmp_path):
    """What was read ahead of it is not trained on."""
    for dataset, event in ((prompts(8), "on_substep_end"), (prompts(2), "on_step_end"), (stream(8), "on_step_end")):
        check(tiny_model, tmp_path, **SMALL, max_steps=6, dataset=dataset, callbacks=[EndsTheEpoch(event)])


def test_a_stream_that_is_over_before_its_first_step_is_refused(tiny_model, tmp_path):
    """Transformers would read it again and again, sample from it, and never take a step."""
    for rows, ends in ((4, 4), (1, 0)):
        with pytest.raises(ValueError, match=f"ends after {ends} micro-.*_steps=6. .* 2 prompts make 2 micro-batches"):
            check(tiny_model, tmp_path, **{**SMALL, "gradient_accumulation_steps": 6}, dataset=stream(rows))


# ---------------------------------------------------------------------- resume


RAGGED = {**SMALL, "gradient_accumulation_steps": 4, "steps_per_generation": 3, "max_steps": 4}
# name → (dataset, settings, `async_level` before and after)
RESUMED = {
    "a window is a step": (prompts(6), {**SMALL, "max_steps": 8, "save_steps": 3}, (2, 0)),
    "in the middle of a window": (
        prompts(8),
        {**SMALL, "steps_per_generation": 6, "max_steps": 7, "save_steps": 2},
        (2, 2),
    ),
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


@pytest.mark.parametrize("name", RESUMED)
def test_no_prompt_is_lost_or_used_twice(tiny_model, tmp_path, name):
    """From every checkpoint, with the same or another `async_level`."""
    dataset, settings, levels = RESUMED[name]
    settings = {"num_generations": 2, "dataset": dataset, "save_strategy": "steps", "save_steps": 1, **settings}
    whole = run(Walk, tiny_model, tmp_path, **settings, async_level=levels[0])
    checkpoints = {int(path.name.removeprefix("checkpoint-")): path for path in tmp_path.glob("checkpoint-*")}
    assert len(checkpoints) >= 2
    for step in checkpoints.keys() - {whole.state.global_step}:
        resume = {"resume": str(checkpoints[step]), "async_level": levels[1]}
        rest = run(Walk, tiny_model, tmp_path / "resumed", **settings, **resume)
        done = dict(whole.ends)[step]
        assert rest.seen == whole.seen[done:] and rest.state.global_step == whole.state.global_step, step


# ---------------------------------------------------------------------- the reader alone


class Epochs:
    """Epochs of numbered rows: in each so many windows, each in `window` micro-batches."""

    def __init__(self, windows, window):
        self.windows, self.window = windows, window
        self.drawn = []

    def __call__(self, epoch):
        for i in range(self.windows * self.window):
            self.drawn.append((epoch, i))
            yield [{"prompt": f"epoch {epoch}, window {i // self.window}"}]

    def reader(self, level, accumulation=1, sized=True):
        settings = {"step_batches": accumulation, "sized": sized, "open_epoch": self}
        return PromptReader(level, window_batches=self.window, **settings)


def walk(level, epochs, accumulation, sized, max_steps, cut):
    """Reads as Transformers does, without a trainer.

    `cut` is the number of micro-steps after which a callback ends an epoch. Returns the prompts of each micro-step, and
    for each window its first micro-step and the prompts that are announced then.
    """
    steps = -(-epochs.windows * epochs.window // accumulation)  # of an epoch
    state = TrainerState(max_steps=max_steps, num_train_epochs=-(-max_steps // steps) if sized else sys.maxsize)
    reader, seen, announced = epochs.reader(level, accumulation, sized), [], []

    def micro_steps(given):
        for _ in range(steps + (not sized)):  # only reading finds the end of a stream
            if state.global_step < max_steps:
                read = list(islice(reader.read(given, accumulation, step=len(seen), state=state), accumulation))
                for number, rows in enumerate(read, 1):
                    state.global_step += number == len(read) and (sized or number == accumulation)
                    yield names(rows)

    for epoch in range(min(state.num_train_epochs, max_steps + 1)):
        for prompt in micro_steps(epochs(epoch)):
            if len(seen) % epochs.window == 0:
                announced.append((len(seen), list(map(names, reader.upcoming(len(seen))))))
            seen.append(prompt)
            if len(seen) == cut:
                break
    return seen, announced


@settings(derandomize=True)
@given(
    st.integers(1, 3),
    st.builds(Epochs, st.integers(1, 4), st.integers(1, 6)),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 9),
    st.integers(0, 30),
)
def test_what_is_announced_is_what_is_sampled(level, epochs, accumulation, is_stream, max_steps, cut):
    """From where a callback has ended an epoch on, too."""
    sized = not is_stream or epochs.windows * epochs.window < accumulation  # a stream that takes no step is refused
    seen, announced = walk(level, epochs, accumulation, sized, max_steps, cut)
    assert seen == walk(0, epochs, accumulation, sized, max_steps, cut)[0]
    windows = seen[:: epochs.window]
    for number, (step, known) in enumerate(announced, 1):
        assert known == windows[number : number + level] or step < cut, number


def test_no_more_is_read_than_prompts_have_to_be_known():
    epochs = Epochs(2, 4)
    reader, state = epochs.reader(2, accumulation=4), TrainerState(max_steps=4, num_train_epochs=2)
    assert len(list(reader.read(epochs(0), 4, step=0, state=state))) == 4
    assert epochs.drawn == [(0, i) for i in range(8)] + [(1, 0)]  # the second window, the first row of the third


def test_nothing_is_held_when_it_is_closed():
    epochs = Epochs(4, 2)
    reader, given = epochs.reader(2, accumulation=2), epochs(0)
    reader.read(given, 2, step=0, state=TrainerState(max_steps=9, num_train_epochs=9))
    assert len(reader.upcoming(0)) == 2
    alive = weakref.ref(given)
    del given
    assert alive() is not None  # with the dataloader's workers
    reader.close()
    assert alive() is None and reader.upcoming(0) == []


def test_at_level_0_transformers_reads_itself():
    epochs = Epochs(4, 2)
    reader, given = epochs.reader(0), epochs(0)
    assert reader.read(given, 2, step=0, state=None) is given and epochs.drawn == [] and reader.upcoming(0) == []


def test_an_epoch_is_opened_as_transformers_opens_it():
    told = []

    class Told(list):
        batch_sampler = SimpleNamespace(batch_sampler=SimpleNamespace(set_epoch=lambda epoch: told.append(epoch)))

        def set_epoch(self, epoch):
            told.append(epoch)

    assert list(open_epoch(Told("ab"), 3)) == ["a", "b"] and told == [3, 3]
    assert list(open_epoch(["c"], 3)) == ["c"]
