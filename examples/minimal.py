"""Train with a reward of your own: python examples/minimal.py (offline).

It shows the reward in a progress bar, and writes metrics.jsonl, run.png and checkpoints into outputs/minimal. Started
again, it goes on from the last checkpoint.
"""

from pathlib import Path

from dash_trl import DASHConfig, DASHTrainer
from dash_trl.monitoring import monitor
from dash_trl.toy import arithmetic_dataset, toy_defaults, toy_model


def right_and_short(completion, answer):  # called once for each completion
    text = completion[-1]["content"]
    return float(text.endswith(f"The answer is {answer}")) - 0.002 * len(text)


if __name__ == "__main__":
    trainer = DASHTrainer(
        model=toy_model(),  # or a model's name on the hub
        reward_funcs=right_and_short,
        args=DASHConfig(
            **toy_defaults() | {"output_dir": "outputs/minimal", "save_strategy": "steps", "save_steps": 20}
        ),
        train_dataset=arithmetic_dataset(),  # columns: prompt, answer
    )
    monitor(trainer)
    trainer.train(resume_from_checkpoint=any(Path("outputs/minimal").glob("checkpoint-*")))
    trainer.save_model()
