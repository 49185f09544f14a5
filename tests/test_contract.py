"""Every figure that TRL logs of a step and of an evaluation, `DASHTrainer` logs by its name with its value."""

import pytest

from tests.contract import SCENARIOS, check_contract


@pytest.mark.parametrize("name", SCENARIOS)
def test_everything_that_trl_logs(tiny_model, tmp_path, name):
    check_contract(tiny_model, tmp_path, SCENARIOS[name])
