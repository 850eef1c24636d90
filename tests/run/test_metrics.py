"""Numbers of a step against sums written out."""

import math

import pytest
import torch

from hybridrl.protocol.batch import batch, ragged
from hybridrl.run import combined, rollout_metrics


def test_rollout_metrics_are_over_masked_tokens():
    mask = [[False, True, True], [False], [False, True]]
    trainer, engine, reference = (
        [[9.0, -1, -2], [9.0], [9.0, -3]],
        [[7.0, -1.5, -2], [7.0], [7.0, -2]],
        [[5.0, -1, -3], [5.0], [5.0, -3]],
    )
    data = batch(
        {
            "response_mask": ragged(mask, torch.bool),
            "scores": torch.tensor([1.0, 0.0, 0.5]),
            "old_log_probs": ragged(trainer),
            "rollout_log_probs": ragged(engine),
            "ref_log_probs": ragged(reference),
        }
    )
    found = rollout_metrics(data)
    assert found["reward/mean"] == pytest.approx(0.5)
    assert found["rollout/length_mean"] == 1 and found["rollout/length_max"] == 2
    assert found["rollout/log_prob_gap_mean"] == pytest.approx(0.5)
    assert found["rollout/log_prob_gap_max"] == pytest.approx(1.0)
    assert found["actor/kl_sequence"] == pytest.approx(1 / 3)
    assert found["actor/kl_reference"] == pytest.approx((math.exp(-1) - 1 + 1) / 3, rel=1e-6)


def test_a_batch_without_responses_has_numbers_too():
    empty = {name: ragged([[0.0]]) for name in ("old_log_probs", "rollout_log_probs")}
    found = rollout_metrics(batch({"response_mask": ragged([[False]], torch.bool), "scores": torch.zeros(1), **empty}))
    assert found["rollout/log_prob_gap_max"] == 0 and found["rollout/length_mean"] == 0


def test_combined_means_and_maxima():
    parts = [{"a": 1.0, "b_max": 1.0}, {"a": 3.0, "b_max": 0.5, "c": 2.0}]
    assert combined(parts) == {"a": 2.0, "b_max": 1.0, "c": 2.0}
