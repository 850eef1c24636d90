"""What the recipes promise of themselves: short, few keys, each with a meaning."""

import ast
from pathlib import Path

import pytest

from hybridrl.config import count_keys
from hybridrl.config.schema import all_keys
from recipes.ppo import ROLLOUT, PPOConfig
from recipes.sft import SFTConfig

RECIPES = Path(__file__).parents[2] / "recipes"


def test_the_ppo_step_is_twelve_lines_at_most():
    tree = ast.parse((RECIPES / "ppo.py").read_text())
    step = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "ppo_step")
    assert step.end_lineno - step.lineno + 1 <= 12


@pytest.mark.parametrize("recipe", ["ppo", "sft", "quickstart"])
def test_a_recipe_is_120_lines_at_most(recipe):
    assert len((RECIPES / f"{recipe}.py").read_text().splitlines()) <= 120


def test_ppo_has_under_80_keys():
    assert count_keys(PPOConfig, ROLLOUT) < 80


@pytest.mark.parametrize(("config", "groups"), [(PPOConfig, ROLLOUT), (SFTConfig, {})])
def test_every_key_says_what_it_means(config, groups):
    assert [path for path, key in all_keys(config, groups).items() if not key.meaning] == []
