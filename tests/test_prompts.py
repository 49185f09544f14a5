"""A queue of prompts: Transformers gets the same micro-batches as without it (`async_level=0`, its own reading)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import prompts, refused
from tests.walks import check, walked

SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 2}


def stream(rows):
    return prompts(rows).to_iterable_dataset()


# name → (dataset, settings)
TABLE = {
    "rows of tensors": (prompts(8).add_column("weights", [[0.5, 0.5]] * 8).with_format("torch"), {"max_steps": 5}),
    "workers that stay": (
        prompts(4),
        {"max_steps": 5, "dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    ),
    "a stream that fills no window": (stream(7), {"max_steps": 7}),
}


def test_what_is_handed_out_does_not_depend_on_the_queue(tiny_model, tmp_path):
    for dataset, length in TABLE.values():
        check(tiny_model, tmp_path, dataset=dataset, **SMALL, **length)


@settings(max_examples=12, derandomize=True)
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
)
def test_any_shape(tiny_model, tmp_path_factory, shapes, windows, more, length):
    per_window = shapes["per_device_train_batch_size"] * shapes["steps_per_generation"] // 2
    rows = per_window * windows + min(more, per_window - 1)
    if isinstance(length, float):
        duration = {"max_steps": -1, "num_train_epochs": length}
    else:
        duration = {"max_steps": length}
    check(tiny_model, tmp_path_factory.mktemp("any"), dataset=prompts(rows), **shapes, **duration)


def test_a_stream_that_is_over_before_its_first_step_is_refused(tiny_model, tmp_path):
    """Transformers would read it again and again, sample from it, and never take a step."""
    for rows, ends in ((4, 4), (1, 0)):
        refused(
            f"ends after {ends} micro-.*_steps=6. .* 2 prompts make 2 micro-batches",
            walked,
            tiny_model,
            tmp_path,
            **{**SMALL, "gradient_accumulation_steps": 6},
            dataset=stream(rows),
        )


# ---------------------------------------------------------------------- resume


RAGGED = {**SMALL, "gradient_accumulation_steps": 4, "steps_per_generation": 3, "max_steps": 4}
# name → (dataset, settings, `async_level` before and after)
RESUMED = {
    "a window is a step": (prompts(6), {**SMALL, "max_steps": 8, "save_steps": 3}, (2, 0)),
    "the last step of an epoch is shorter": (
        prompts(7),
        {**SMALL, "gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 3},
        (0, 3),
    ),
    "used twice": (prompts(4), {**SMALL, "num_iterations": 2, "max_steps": 7, "save_steps": 3}, (2, 2)),
    "a stream that ends within a step, and that within a window": (stream(6), RAGGED, (2, 2)),
}


@pytest.mark.parametrize("name", RESUMED)
def test_no_prompt_is_lost_or_used_twice(tiny_model, tmp_path, name):
    """From every checkpoint, with the same or another `async_level`."""
    dataset, settings, levels = RESUMED[name]
    settings = {"dataset": dataset, "save_strategy": "steps", "save_steps": 1, **settings}
    whole = walked(tiny_model, tmp_path, **settings, level=levels[0])
    checkpoints = {int(path.name.removeprefix("checkpoint-")): path for path in tmp_path.glob("checkpoint-*")}
    assert len(checkpoints) >= 2
    for step in checkpoints.keys() - {whole.state.global_step}:
        resume = {"resume": str(checkpoints[step]), "level": levels[1]}
        rest = walked(tiny_model, tmp_path / "resumed", **settings, **resume)
        done = dict(whole.ends)[step]
        assert rest.seen == whole.seen[done:] and rest.state.global_step == whole.state.global_step, step
