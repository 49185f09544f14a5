"""The pure parts of benchmarks/signal_sampling.py: the cost of a target, its ratios, and the simulation of rounds."""

import pytest

from benchmarks.signal_figures import Curve, best_rate, simulate_rounds, summary, to_target


def curve(accuracy: list[float], pace: float = 1.0) -> Curve:
    """Measured every 4 steps of `pace` seconds and 10 samples each."""
    steps = [4 * i for i in range(len(accuracy))]
    seconds = [pace * step for step in steps]
    return Curve(accuracy, seconds, seconds, steps, [10 * step for step in steps], {"kept": pace})


def test_the_target_is_interpolated():
    assert to_target(curve([0.2, 0.4, 0.8, 0.3]), 0.5) == {
        "cpu_seconds": pytest.approx(5),
        "seconds": pytest.approx(5),
        "steps": pytest.approx(5),
        "samples": pytest.approx(50),
    }
    assert to_target(curve([0.6, 0.4]), 0.5) == dict.fromkeys(("cpu_seconds", "seconds", "steps", "samples"), 0.0)
    assert to_target(curve([0.2, 0.4]), 0.5) is None


def test_ratios_are_paired_and_a_run_that_fails_counts_whole():
    plain = [curve([0.0, 0.5, 1.0]), curve([0.0, 1.0])]
    found = summary([curve([0.0, 1.0], pace=3.0), curve([0.0, 0.1, 0.2], pace=3.0)], plain, 0.5)
    assert found["not_reached"] == 1 and found["median"]["steps"] == 5 and found["figures"] == {"kept": 3.0}
    assert found["ratio"]["steps"] == pytest.approx([10 / 6, 0.5, 4.0])  # of two pairs, the bootstrap's ends are these
    assert found["ratio"]["seconds"][0] == pytest.approx(30 / 6)
    assert summary(plain, plain, 0.5)["ratio"]["samples"] == [1.0, 1.0, 1.0]


def test_seeds_that_differ_widen_no_interval_of_their_ratio():
    plain = [curve([0.0, 1.0], pace=2.0**seed) for seed in range(10)]
    twice_as_fast = [curve([0.0, 1.0], pace=2.0**seed / 2) for seed in range(10)]
    assert summary(twice_as_fast, plain, 0.5)["ratio"]["seconds"] == pytest.approx([0.5, 0.5, 0.5])


def test_the_best_rate_reaches_the_target_first():
    slow, fast, never = curve([0.0, 0.5, 1.0]), curve([0.0, 1.0]), curve([0.0, 0.4])
    assert best_rate({1.0: [slow, slow], 2.0: [fast, slow], 3.0: [fast, never]}, 0.9) == 2.0
    assert best_rate({1.0: [curve([0.0, 0.3])], 2.0: [never]}, 0.9) == 2.0


def test_simulated_rounds():
    small = {"training": 0.0, "groups": 8}
    plain, filled = (simulate_rounds(0, most, 0.5, **small) for most in (1, 8))
    assert plain["filled"] == pytest.approx(0.5, abs=0.1) and plain["sampled"] == 1
    assert filled["filled"] == 1 and filled["sampled"] == pytest.approx(2, abs=0.3)
    ahead = simulate_rounds(1, 8, 0.5, **small)
    assert ahead["kept"] > filled["kept"]  # the tail of a round is the next window's time
    every = simulate_rounds(1, 4, 0.0, **small)
    assert every["filled"] == every["sampled"] == 1
    assert simulate_rounds(1, 4, 1.0, **small) == {"kept": 0.0, "filled": 0.0, "sampled": 4}
