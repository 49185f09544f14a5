"""The registry of advantage estimators, by name.

`DASHConfig(advantage_estimator=name)` uses the `outcome` form of an estimator, and
`ProcessRewardCallback(estimator=name)` its `credit` form. `dash_trl.update.advantages` registers the outcome forms, and
`dash_trl.process_rewards.credit` the credit forms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages. Register an estimator of your own before you make the config or the callback::

        ESTIMATORS["mine"] = Estimator(credit=function)

    Args:
        outcome: function (rewards [M, G]) → advantages [M, G], for M groups of G rows; NaN = the row is unscored. None
            = `DASHConfig` refuses the name.
        credit: function (`Rewards`, `CreditSettings`) → advantages [N, T]. None = `ProcessRewardCallback` refuses the
            name.
        settings: the fields of `CreditSettings` that `credit` uses. None = any.
        per_group: True = the advantages of a group depend on no other group. `reward_pipeline` and
            `max_num_gen_batches` need this.
    """

    outcome: Callable[[Tensor], Tensor] | None = None
    credit: Callable[[Any, Any], Tensor] | None = None
    settings: frozenset[str] | None = None
    per_group: bool = False

    def __call__(self, rewards: Any, settings: Any) -> Tensor:
        """Returns `credit(rewards, settings)`."""
        assert self.credit is not None, "`registered` refuses estimators without a credit form"
        return self.credit(rewards, settings)


ESTIMATORS: dict[str, Estimator] = {}


def registered(name: str, form: str, option: str) -> Estimator:
    """Returns the estimator that an option names.

    Args:
        name: the value of the option.
        form: "outcome" or "credit", the form that the option needs. "grpo" always has both, because the outcome form of
            GRPO is `group_advantages`, which takes more arguments.
        option: name of the option, for the error.
    Raises:
        ValueError: if no estimator with this name has this form.
    """
    known = [one for one, estimator in ESTIMATORS.items() if one == "grpo" or getattr(estimator, form, None)]
    if name not in known:
        raise ValueError(
            f"{option}={name!r} is unknown. Use one of {', '.join(map(repr, known))}, or register a function of your "
            f"own under a name: dash_trl.update.ESTIMATORS['mine'] = Estimator({form}=function)."
        )
    return ESTIMATORS[name]
