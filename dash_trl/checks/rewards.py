"""Checks reward functions before weights are loaded."""

from typing import Any

from dash_trl.checks.arguments import check_async
from dash_trl.rewards import RunnerReward, form_of, is_reward_model


def check_rewards(rewards: Any, args: Any, train_dataset: Any, eval_dataset: Any, own_rollouts: bool = False) -> None:
    """Check that the unpacked reward functions fit the datasets and the configuration.

    Raises:
        ValueError: if a needed column does not exist; if a function needs whole groups, but a group is spread over
            ranks; or if a function scores a whole batch, but `reward_pipeline` or `async_level` needs functions that
            score one completion.
    """
    evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    check_async(args, own_rollouts, all(isinstance(one, RunnerReward) for one in rewards or [None]))
    known = [getattr(dataset, "column_names", None) for dataset in (train_dataset, *evaluated)]
    size, rows = args.num_generations, args.per_device_train_batch_size * args.steps_per_generation
    batches = {"per_device_train_batch_size x steps_per_generation": (rows, size)}
    if eval_dataset is not None:
        batches["per_device_eval_batch_size"] = args.per_device_eval_batch_size, args.num_generations_eval or size
    for one in rewards or ():
        if args.reward_pipeline and not isinstance(one, RunnerReward):
            raise ValueError(
                f"reward_pipeline=True, but {getattr(one, '__name__', one)!r:.100} scores a whole batch at once. Use "
                "functions that score one completion: reward(completion, answer, ...)."
            )
        if is_reward_model(one):
            continue
        form = one.form if isinstance(one, RunnerReward) else form_of(one)
        for columns in known:
            if isinstance(columns, list) and not own_rollouts:  # a rollout_func may add columns
                form.check_columns(columns)
        for options, (rows, size) in batches.items():
            if form.post_process is not None and rows % size:
                raise ValueError(
                    f"'{form.name}' has post_process_scores for whole groups, but a process has {rows} completions "
                    f"({options}), which is not a multiple of num_generations={size}: change one of these options."
                )
