"""What a rehearsal says about itself."""

from __future__ import annotations

from musa_titan.rl.rehearsal.summary import problems, read

LOG = """
(RolloutManager pid=1) noise
(Actor pid=2) rollout 0: {'rollout/raw_reward': 0.25, 'rollout/log_probs': -1.5}
(Actor pid=2) step 0: {'train/loss': 0.5, 'train/grad_norm': 2.0, 'train/train_rollout_logprob_abs_diff': 0.02}
(Actor pid=2) rollout 1: {'rollout/raw_reward': 0.5}
(Actor pid=2) step 1: {'train/loss': 0.5, 'train/grad_norm': 2.0, 'train/train_rollout_logprob_abs_diff': 0.2}
"""


def test_an_iteration_is_read_from_both_of_its_dictionaries() -> None:
    first, second = read(LOG.splitlines())
    assert (first.reward, first.loss, first.grad_norm, first.logprob_difference) == (0.25, 0.5, 2.0, 0.02)
    assert second.number == 1


def test_a_difference_beyond_the_limit_is_a_problem() -> None:
    found = problems(list(read(LOG.splitlines())), expected=2, limit=0.05)
    assert len(found) == 1
    assert found[0].startswith("iteration 1: trainer and rollout engine differ by 0.2000")


def test_a_run_that_stopped_early_is_a_problem() -> None:
    assert problems([], expected=3, limit=0.05) == ["0 of 3 iterations finished"]
