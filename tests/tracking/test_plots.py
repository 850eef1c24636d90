"""The learning curve is drawn from whatever a run logged."""

import math

import pytest
from matplotlib.image import imread

from hybridrl.protocol.errors import DataError
from hybridrl.tracking.metrics import Metrics
from hybridrl.tracking.plots import Curve, Panel, learning_curve


def logged(tmp_path, lines):
    with Metrics(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as metrics:
        for step, line in enumerate(lines):
            metrics.log(step, line)
    return tmp_path / "metrics.jsonl"


def test_panels_without_curves_are_left_out(tmp_path):
    file = logged(tmp_path, [{"eval/exact_match": 0.1}, {"reward/mean": 0.2, "actor/loss": math.nan}, {"reward/mean": 0.3}])
    learning_curve(file, tmp_path / "two.png", "PPO")
    learning_curve(file, tmp_path / "one.png", panels=[Panel("Reward", (Curve("reward/mean", "reward"),))])
    two, one = imread(tmp_path / "two.png"), imread(tmp_path / "one.png")
    assert two.shape[1] == 2 * one.shape[1]
    assert two[..., :3].std() > 0.05  # something is drawn


def test_zeros_are_left_out_of_a_logarithmic_panel(tmp_path):
    file = logged(tmp_path, [{"kl": 0.0}, {"kl": 0.0}])
    learning_curve(file, tmp_path / "curve.png", panels=[Panel("KL", (Curve("kl", "policy from reference"),), log=True)])
    assert (tmp_path / "curve.png").exists()


def test_nothing_to_draw(tmp_path):
    with pytest.raises(DataError, match="none of the metrics to draw: reward/mean"):
        learning_curve(logged(tmp_path, [{"other": 1.0}]), tmp_path / "curve.png")
