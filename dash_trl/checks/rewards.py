"""Reward functions, before a weight is loaded."""

from typing import Any

from dash_trl.checks.arguments import check_async
from dash_trl.rewards import RunnerReward, form_of, is_reward_model, scores_alone


def check_rewards(rewards: Any, args: Any, train_dataset: Any, eval_dataset: Any, own_rollouts: bool = False) -> None:
    """Refuse functions that ask for columns which there are not, or for groups that no rank has whole.

    Args:
        rewards: as `dash_trl.rewards.unpack` gives them.
    """
    evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    check_async(args, own_rollouts, all(map(scores_alone, rewards or [None])))
    known = [getattr(dataset, "column_names", None) for dataset in (train_dataset, *evaluated)]
    for one in rewards or ():
        if args.reward_pipeline and not scores_alone(one):
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
        if form.post_process is not None:
            _check_groups(
                form.name,
                args.per_device_train_batch_size * args.steps_per_generation,
                "per_device_train_batch_size x steps_per_generation",
                args.num_generations,
            )
            if eval_dataset is not None:
                size = args.num_generations_eval or args.num_generations
                _check_groups(form.name, args.per_device_eval_batch_size, "per_device_eval_batch_size", size)


def _check_groups(name: str, rows: int, options: str, size: int) -> None:
    if rows % size:
        raise ValueError(
            f"'{name}' has post_process_scores for whole groups, but a process has {rows} completions ({options}), no "
            f"multiple of num_generations={size}: change one of them."
        )
