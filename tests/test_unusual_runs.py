"""Runs beside the usual settings, each compared with TRL's or with a run that has to end alike."""

import math
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from accelerate.utils import DistributedType
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer, RewardRunner
from dash_trl.rollout import CreditedRollouts, joined
from tests.tiny import (
    ScriptedReward,
    ScriptedRollouts,
    packed_by_mask,
    parameters,
    prompts,
    relative_difference,
    run,
    save_tiny_model,
    with_flash_stand_in,
)


def odd(completion, completion_ids):
    return float(sum(completion_ids) % 2)


def long(completion, completion_ids):
    return float(len(completion_ids))


@pytest.fixture
def small_model(tmp_path):
    return save_tiny_model(tmp_path / "small", num_hidden_layers=1)


@pytest.fixture
def start(tiny_model):
    return parameters(AutoModelForCausalLM.from_pretrained(tiny_model))


def updates_are_equal(start, one, other):
    difference, update = relative_difference(start, parameters(one.model), parameters(other.model))
    assert update > 1e-3 and difference < 1e-5


# ------------------------------------------------------------------------------------------- beside the same run of TRL


def one_sample_when_traced(*args, **settings):
    """Attention that keeps packed samples apart, but in a trace."""
    if torch.compiler.is_compiling() and "cu_seq_lens_q" in settings:
        settings["cu_seq_lens_q"] = settings["cu_seq_lens_k"] = settings["cu_seq_lens_q"][[0, -1]]
    return packed_by_mask(*args, **settings)


@pytest.mark.parametrize("backend", ["EAGER", pytest.param("INDUCTOR", marks=pytest.mark.exhaustive)])
def test_a_compiled_model(small_model, tmp_path, monkeypatch, backend):
    """By the variable that `accelerate launch --dynamo_backend` sets, as `torch_compile` does."""
    settings = {"gradient_accumulation_steps": 2}
    plain = run(GRPOTrainer, small_model, tmp_path, **settings)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
    for attention in (None, packed_by_mask, one_sample_when_traced):
        torch.compiler.reset()  # what the runs before have traced counts towards its limit
        loaded = attention and with_flash_stand_in(small_model, attention)  # `None`: SDPA
        compiled = run(DASHTrainer, small_model, tmp_path, loaded=loaded, max_tokens_per_microbatch=150, **settings)
        updates_are_equal(parameters(small_model), plain, compiled)
        assert compiled.state.log_history[0]["packing/padding_free"] == (attention is packed_by_mask)


class EndsTheEpoch(TrainerCallback):
    """Within the second optimizer step."""

    def on_substep_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 1


def test_an_epoch_that_ends_within_an_optimizer_step(start, tiny_model, tmp_path):
    settings = {"max_steps": 4, "learning_rate": 1.0, "dataset": prompts(16), "callbacks": [EndsTheEpoch()]}
    updates_are_equal(start, *(run(kind, tiny_model, tmp_path, **settings) for kind in (GRPOTrainer, DASHTrainer)))


class CutsSteps(TrainerCallback):
    """Ends the epoch after a micro-step of an optimizer step: `cuts` names the step, once for each time."""

    def __init__(self, cuts):
        self.cuts, self.steps = list(cuts), max(cuts, default=0) + 1

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step in self.cuts:
            self.cuts.remove(state.global_step)
            control.should_epoch_stop = True

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.steps


class RowsThatRan(DASHTrainer):
    def _compute_loss(self, model, inputs):
        rows = zip(inputs["completion_ids"], inputs["completion_mask"].bool(), strict=True)
        self.rows = [*getattr(self, "rows", []), *(ids[mask].tolist() for ids, mask in rows if mask.any())]
        return super()._compute_loss(model, inputs)


def test_a_step_that_is_cut_behind_a_window_counts_that_window_in_its_log(tiny_model, tmp_path):
    """Windows of one micro-step: the first optimizer step has three of them instead of two."""
    settings = {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "entropy_coef": 0.1, "beta": 0.0}
    settings |= {"max_steps": 9, "dataset": prompts(4), "loss_type": "dapo"}
    trl, ours = (
        run(kind, tiny_model, tmp_path, callbacks=[CutsSteps([0])], **settings).state.log_history[0]
        for kind in (GRPOTrainer, DASHTrainer)
    )
    assert abs(trl["policy_loss"]) > 1e-3 and ours["policy_loss"] == pytest.approx(trl["policy_loss"], abs=1e-6)


def test_the_rest_of_a_stream_is_logged_with_the_step_that_it_joins(tiny_model, tmp_path):
    """Transformers makes no step of 2 micro-steps at the end of a stream. 4 more are to come."""
    settings = {"dataset": prompts(6).to_iterable_dataset(), "max_steps": 2}
    settings |= {"steps_per_generation": 1, "entropy_coef": 0.1}
    trl, ours = (
        run(kind, tiny_model, tmp_path, **settings).state.log_history[1] for kind in (GRPOTrainer, DASHTrainer)
    )
    assert abs(trl["policy_loss"]) > 1e-3 and ours["policy_loss"] == pytest.approx(trl["policy_loss"], abs=1e-6)


@pytest.mark.parametrize(("per_window", "cuts"), [(4, [0, 0]), (6, [0, 1])])
def test_mini_runs_every_row_once_though_steps_are_cut_while_rewards_are_awaited(
    start, tiny_model, tmp_path, per_window, cuts
):
    """Each cut makes an optimizer step longer by a micro-step."""

    def trained(piped):
        settings = {"steps_per_generation": per_window, "gradient_accumulation_steps": 2, "max_steps": 9}
        settings |= {"reward": RewardRunner(odd), "reward_pipeline": piped, "gradient_filter_threshold": None}
        settings |= {"dataset": prompts(per_window), "callbacks": [CutsSteps(cuts)], "learning_rate": 0.1}
        return run(RowsThatRan, tiny_model, tmp_path, **settings)

    plain, piped = trained(False), trained(True)
    assert len(plain.rows) == 4 * per_window and sorted(piped.rows) == sorted(plain.rows)
    if len(set(cuts)) == 1:  # else the order of arrival decides which step takes a row
        updates_are_equal(start, plain, piped)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_rows_that_run_after_a_cut_are_divided_by_all_that_the_step_keeps(start, tiny_model, tmp_path, loss_type):
    """The update is that of an uncut run: the next window, of which the step takes the first rows, has no signal."""

    def trained(cuts):
        settings = {"filter_denominator": "kept", "loss_type": loss_type, "max_tokens_per_microbatch": 30}
        settings |= {"dataset": prompts(8), "max_steps": 3, "callbacks": [CutsSteps(cuts)], "learning_rate": 0.1}
        return run(DASHTrainer, tiny_model, tmp_path, reward=ScriptedReward(silent=[1]), **settings)

    updates_are_equal(start, trained([]), trained([0]))


def test_the_adapter_that_training_began_with_is_the_reference(tiny_model, tmp_path):
    torch.manual_seed(1)
    adapter = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), adapter).save_pretrained(tmp_path / "adapter")

    def trained(kind, **own):
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        model = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)  # TRL copies it to "ref"
        before, settings = parameters(model), {"beta": 0.2, "max_steps": 2, "learning_rate": 0.3, **own}
        return before, parameters(run(kind, tiny_model, tmp_path, loaded=model, **settings).model)

    before, plain = trained(GRPOTrainer)
    _, ours = trained(DASHTrainer, gradient_filter_threshold=None)
    difference, update = relative_difference(before, plain, ours)
    assert update > 1e-3 and difference < 1e-5


class Modes(torch.optim.SGD):
    """Has modes, as schedule-free optimizers, which swap the weights with them."""

    mode = "train"

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"


def test_a_window_after_an_evaluation_is_sampled_by_the_weights_of_training(tiny_model, tmp_path):
    seen = []

    class Rollouts(ScriptedRollouts):
        def __call__(self, prompts, trainer):
            if trainer.model.training:
                seen.append(trainer.optimizer.optimizer.mode)
            return super().__call__(prompts, trainer)

    def prepare(trainer):
        trainer.optimizer = Modes(trainer.model.parameters(), lr=0.1)

    evaluation = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_dataset": prompts(4),
        "per_device_eval_batch_size": 4,
    }
    run(DASHTrainer, tiny_model, tmp_path, rollouts=Rollouts(), prepare=prepare, max_steps=3, **evaluation)
    assert seen == ["train"] * 3


# ---------------------------------------------------------------------------------------------------- what callbacks do


class EverySecondToken(DASHCallback):
    def on_rollouts_sampled(self, args, state, control, rollouts, **kwargs):
        rollouts.tool_mask = torch.arange(rollouts.completion_ids.shape[1]).expand_as(rollouts.completion_ids) % 2


class EnvMask(ScriptedRollouts):
    def __call__(self, prompts, trainer):
        sampled = super().__call__(prompts, trainer)
        return {**sampled, "env_mask": [[i % 2 for i in range(len(row))] for row in sampled["completion_ids"]]}


def test_a_callback_s_tool_mask_counts_as_that_of_a_rollout_func(start, tiny_model, tmp_path):
    one = run(DASHTrainer, tiny_model, tmp_path, callbacks=[EverySecondToken()])
    other = run(DASHTrainer, tiny_model, tmp_path, rollouts=EnvMask())
    updates_are_equal(start, one, other)
    assert one.state.log_history[0]["loss"] == pytest.approx(other.state.log_history[0]["loss"])


class TwiceTheTokens(EverySecondToken):
    def on_rollouts_sampled(self, args, state, control, rollouts, **kwargs):
        super().on_rollouts_sampled(args, state, control, rollouts)
        rollouts.tool_mask *= 2


def test_a_mask_of_other_numbers_than_0_and_1_is_refused(tiny_model, tmp_path):
    said = "TwiceTheTokens.on_rollouts_sampled left `tool_mask` unusable: it holds 2; a mask is 1 where a token counts"
    with pytest.raises(ValueError, match=said):
        run(DASHTrainer, tiny_model, tmp_path, callbacks=[TwiceTheTokens()])


def test_credit_per_token_in_some_groups_only():
    """The parts of a window, for its log: a row with one number has it at every token."""

    def part(rows, advantages):
        ids = torch.ones(rows, 3, dtype=torch.long)
        return CreditedRollouts(
            prompt_ids=ids,
            prompt_mask=ids,
            completion_ids=ids,
            completion_mask=ids,
            group=ids[:, 0],
            policy_version=ids[:, :2],
            rewards=torch.zeros(rows, 1),
            advantages=advantages,
        )

    per_token = torch.tensor([[1.0, 2.0, 3.0]])
    whole = joined([part(2, torch.tensor([4.0, 5.0])), part(1, per_token)])
    assert whole.advantages.tolist() == [[4.0] * 3, [5.0] * 3, [1.0, 2.0, 3.0]]
    with pytest.raises(RuntimeError, match="same number of dimensions"):
        joined([part(1, per_token), replace(part(1, per_token), rewards=torch.zeros(1))])


# ---------------------------------------------------------------------------------------------- rewards that come later


class ByMicroStep(ScriptedRollouts):
    """The same for a run that begins later."""

    def __call__(self, prompts, trainer):
        self.random.seed(trainer._step)
        return super().__call__(prompts, trainer)


class SavesBeforeTheStep(TrainerCallback):
    """As `enable_jit_checkpoint` does, when all passes of optimizer step `at` have run."""

    trainer = None

    def __init__(self, at):
        self.at = at

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


@pytest.mark.parametrize("at", [1, 3])  # 3: the window's last step
def test_a_checkpoint_from_within_a_step(start, tiny_model, tmp_path, at):
    """It holds the rows of that step."""
    save = SavesBeforeTheStep(at)
    settings = {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 4, "learning_rate": 0.1}
    settings |= {"reward": RewardRunner(odd), "reward_pipeline": True, "rollouts": ByMicroStep()}
    prepare = lambda trainer: setattr(save, "trainer", trainer)  # noqa: E731
    whole = run(DASHTrainer, tiny_model, tmp_path, callbacks=[save], prepare=prepare, **settings)
    rest = run(DASHTrainer, tiny_model, tmp_path / "rest", resume=str(tmp_path / f"checkpoint-{at}"), **settings)
    updates_are_equal(start, whole, rest)


class LaterTokensOfSomeGroups(DASHCallback):
    per_group = True

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        if rollouts.group[0] % 2:
            tokens = torch.arange(rollouts.completion_ids.shape[1])
            rollouts.advantages = rollouts.advantages.unsqueeze(1) * tokens / 10


def test_a_mini_run_with_credit_per_token_in_some_groups_is_resumed(start, tiny_model, tmp_path):
    """The checkpoint holds four of the five groups, so that both kinds of credit are in it."""
    settings = {"steps_per_generation": 5, "gradient_accumulation_steps": 1, "max_steps": 5, "learning_rate": 0.1}
    settings |= {"reward": RewardRunner(odd), "reward_pipeline": True, "gradient_filter_threshold": None}
    callbacks = [LaterTokensOfSomeGroups()]
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = run(DASHTrainer, tiny_model, tmp_path, callbacks=callbacks, **settings, **saving)
    checkpoint = str(tmp_path / "checkpoint-2")
    rest = run(DASHTrainer, tiny_model, tmp_path / "rest", callbacks=callbacks, resume=checkpoint, **settings)
    updates_are_equal(start, whole, rest)


class Prompts(DASHCallback):
    def __init__(self):
        self.windows = []

    def on_rollouts_sampled(self, args, state, control, rollouts, **kwargs):
        self.windows.append([row["prompt"] for row in rollouts.examples])


def test_a_checkpoint_does_not_hold_a_window_that_began_after_its_step(tiny_model, tmp_path):
    """The second optimizer step begins in the second window and is left in the third: the second is sampled again."""
    save, whole, rest = SavesBeforeTheStep(1), Prompts(), Prompts()
    settings = {"steps_per_generation": 3, "gradient_accumulation_steps": 4, "max_steps": 3}
    prepare = lambda trainer: setattr(save, "trainer", trainer)  # noqa: E731
    run(DASHTrainer, tiny_model, tmp_path, callbacks=[save, whole], prepare=prepare, **settings)
    run(DASHTrainer, tiny_model, tmp_path, callbacks=[rest], resume=str(tmp_path / "checkpoint-1"), **settings)
    assert rest.windows == whole.windows[1:]


@pytest.mark.parametrize("settings", [{"save_strategy": "steps", "save_steps": 1}, {"enable_jit_checkpoint": True}])
def test_a_failure_while_a_checkpoint_waits_leaves_none(tiny_model, tmp_path, monkeypatch, settings):
    """Half of one would be what `resume_from_checkpoint=True` picks."""
    monkeypatch.setattr("signal.signal", lambda *args: None)
    stepped = threading.Event()

    def fails_late(completion, completion_ids, prompt):
        if not prompt.startswith("0"):  # all groups but the one that the first optimizer step takes
            stepped.wait(60)
            raise ValueError("a failure")
        return odd(completion, completion_ids)

    class Steps(TrainerCallback):
        def on_optimizer_step(self, *args, **kwargs):
            stepped.set()
            for callback in self.callbacks:
                if isinstance(callback, JITCheckpointCallback):
                    callback.jit_manager.is_checkpoint_requested = True  # as a SIGTERM does

    with pytest.raises(RuntimeError, match="on_error='raise'"):
        run(
            DASHTrainer,
            tiny_model,
            tmp_path,
            reward=RewardRunner(fails_late, on_error="raise"),
            reward_pipeline=True,
            callbacks=[Steps()],
            prepare=lambda trainer: setattr(Steps, "callbacks", trainer.callback_handler.callbacks),
            shuffle_dataset=False,
            steps_per_generation=4,
            gradient_accumulation_steps=1,
            **settings,
        )
    assert stepped.is_set() and not (tmp_path / "checkpoint-1").exists()


@pytest.mark.parametrize(("order", "piped"), [((1, 0), False), ((1,), True), ((1, 0, 1), True)])
def test_columns_and_weights_are_those_of_reward_funcs(start, tiny_model, tmp_path, order, piped):
    """What a trainer has of a runner is called once for each completion, whatever its place, and nothing else is."""
    calls, functions = Counter(), [odd, long]

    def noted(number):
        def reward(completion, completion_ids):
            calls[number] += 1
            return functions[number](completion, completion_ids)

        return reward

    def trls(function):
        return lambda completion_ids, **_: [function(None, ids) for ids in completion_ids]

    settings = {"reward_weights": [0.25, 1.0, 0.5][: len(order)]}
    rewards = RewardRunner([noted(0), noted(1)]).rewards
    ours = {"reward_pipeline": piped, "gradient_filter_threshold": 0.0}
    one = run(DASHTrainer, tiny_model, tmp_path, reward=[rewards[i] for i in order], **settings, **ours)
    other = run(GRPOTrainer, tiny_model, tmp_path, reward=[trls(functions[i]) for i in order], **settings)
    updates_are_equal(start, one, other)
    assert calls == dict.fromkeys(order, 16)


@pytest.mark.parametrize("piped", [False, True])
def test_an_interrupt_while_the_next_window_is_sampled_ends_the_calls_of_this_one(tiny_model, tmp_path, piped):
    made, end, sampled = [], threading.Event(), []

    def waits(completion, completion_ids):
        made.append(completion)
        end.wait(60)
        return 0.0

    class Interrupted(DASHTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            sampled.append(None)
            if len(sampled) == 2:
                raise KeyboardInterrupt
            return super()._generate_single_turn(*args, **kwargs)

    runner = RewardRunner(waits, max_concurrency=1)
    settings = {"in_process": True, "async_level": 1, "loss_type": "aipo", "max_completion_length": 6, "max_steps": 3}
    with pytest.raises(KeyboardInterrupt):
        run(Interrupted, tiny_model, tmp_path, reward=runner, reward_pipeline=piped, **settings)
    end.set()
    runner.submit([{"completion": "last", "completion_ids": []}]).wait()  # the one thread comes to it after the others
    assert len(made) <= 2 and made[-1] == "last"


class GroupSizes:
    def __init__(self):
        self.seen = []

    def compute_score(self, completion, completion_ids):
        return float(len(completion_ids))

    def post_process_scores(self, scores):
        self.seen.append(len(scores))
        return scores


class Built(DASHTrainer):
    def train(self, **kwargs):
        pass


def test_a_runner_that_another_trainer_took_over_serves_an_evaluation_of_the_first(tiny_model, tmp_path):
    def own(completion, its_column):
        return 1.0

    sizes = GroupSizes()
    runner = RewardRunner(sizes)
    first = run(Built, tiny_model, tmp_path, reward=runner, num_generations=4, per_device_eval_batch_size=4)
    others = {"num_generations": 2, "dataset": prompts(16).add_column("its_column", [0] * 16)}
    run(Built, tiny_model, tmp_path, reward=[runner, RewardRunner(own)], **others)
    first.evaluate(prompts(2))
    assert sizes.seen == [4, 4]


# ------------------------------------------------------------------------------------------------- one run, and another


def test_a_step_without_signal_after_a_skipped_one_moves_the_schedule(tiny_model, tmp_path):
    """As with fp16, whose loss scaler accelerate offers on GPUs only."""

    class Reward(ScriptedReward):
        calls = 0

        def __call__(self, **kwargs):
            self.calls += 1
            return [1.0] * len(kwargs["prompts"]) if self.calls == 2 else super().__call__(**kwargs)

    class Overflows(DASHTrainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            return loss * torch.inf if self.state.global_step == 0 else loss

    def prepare(trainer):
        accelerator = trainer.accelerator
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        accelerator.unscale_gradients = lambda: accelerator.scaler.unscale_(trainer.optimizer.optimizer)

    rates = []

    class Rates(TrainerCallback):
        def on_step_end(self, args, state, control, lr_scheduler, **kwargs):
            rates.append(lr_scheduler.get_last_lr()[0])

    settings = {"lr_scheduler_type": "linear", "max_steps": 3, "max_grad_norm": 1.0, "callbacks": [Rates()]}
    run(Overflows, tiny_model, tmp_path, reward=Reward(constant=0.3), prepare=prepare, **settings)
    assert rates[0] == 1.0 > rates[1] > rates[2]


def test_sampling_from_another_distribution_is_refused_ahead(tiny_model, tmp_path, unloadable):
    settings = {"in_process": True, "async_level": 1, "loss_type": "aipo", "reward": RewardRunner(odd)}
    for others in ({"top_p": 0.9}, {"top_k": 5}, {"generation_kwargs": {"repetition_penalty": 1.1}}):
        with pytest.raises(ValueError, match="generate does not report them"):
            run(DASHTrainer, tiny_model, tmp_path, **settings, **others)


# ------------------------------------------------------------------------------- what the trainer asks of the libraries


def test_passes_without_gradient_are_not_checkpointed(tiny_model, tmp_path, monkeypatch):
    with_gradient = []

    def noted(*args, **kwargs):
        with_gradient.append(torch.is_grad_enabled())
        return checkpoint(*args, **kwargs)

    class Begins(DASHCallback):
        def on_rollouts_sampled(self, *args, **kwargs):
            with_gradient.clear()  # of passes that tried packing

    monkeypatch.setattr("transformers.modeling_utils.checkpoint", noted)
    run(DASHTrainer, tiny_model, tmp_path, num_iterations=2, gradient_checkpointing=True, callbacks=[Begins()])
    assert with_gradient and all(with_gradient)


class Passes(DASHTrainer):
    """Counts its passes with a gradient; a clock ticks with each."""

    passes = 0

    def _compute_loss(self, model, inputs):
        type(self).passes += 1
        return super()._compute_loss(model, inputs)


def test_a_step_s_time_and_synchronisation_are_those_of_all_its_passes(tiny_model, tmp_path, monkeypatch):
    Passes.passes, waited = 0, []
    monkeypatch.setattr("time.perf_counter", lambda: float(Passes.passes))

    def prepare(trainer):
        no_sync = trainer.accelerator.no_sync
        trainer.accelerator.no_sync = lambda model: waited.append(model) or no_sync(model)

    trainer = run(Passes, tiny_model, tmp_path, prepare=prepare, max_tokens_per_microbatch=30, constant=0.0)
    monkeypatch.undo()
    assert Passes.passes > 6 and trainer.state.log_history[0]["step_time"] == Passes.passes
    assert len(waited) == Passes.passes - 1, "gradients are synchronised with the last one"


def test_ranks_wait_as_long_as_collectives_do(tiny_model, tmp_path):
    assert run(Built, tiny_model, tmp_path, ddp_timeout=77).ranks.timeout == 77


def test_a_gradient_that_deepspeed_applied_though_it_is_not_finite(tiny_model, tmp_path, monkeypatch):
    trainer = run(DASHTrainer, tiny_model, tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(RuntimeError, match="DeepSpeed applied a gradient that is not finite"):
        trainer._get_grad_norm(trainer.model, math.nan)
