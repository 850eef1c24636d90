"""The help page has every key with its type, default and meaning."""

from pathlib import Path

from rich.console import Console

from hybridrl.config.help import help_page
from tests.config.example_recipe import GROUPS, ExampleConfig


def page() -> list[str]:
    console = Console(width=128, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(help_page(ExampleConfig, GROUPS, Path(__file__).parent / "config"))
    return [" ".join(line.split()) for line in captured.get().splitlines()]


def test_every_key_is_listed():
    lines = page()
    for expected in (
        "An example.",
        "rollout=native|vllm",
        "seed int 1 Of everything that is drawn.",
        "name str | null null",
        "amp bool false",
        "reward_weights {name: float} {}",
        "penalty PenaltyConfig | null null",
        "penalty: A penalty on the divergence from the reference.",
        "penalty.coefficient float 0.1",
        "data: Prompts, and how they are dealt.",
        "`batch_size` is counted in rows.",
        "data.path Path (required) A JSON-lines file of prompts.",
        "actor.adam.betas [float, float] [0.9, 0.95] Decay of the two moments.",
        "actor.loss ppo | gspo ppo The clipped objective, by token or by sequence.",
        "actor.layers [int, ...] []",
        "rollout=native (the default): The engine written in torch.",
        "rollout.temperature float 0.9 0 is greedy.",
        "rollout=vllm: vLLM in the worker's own process.",
        "rollout.memory_share float 0.5",
    ):
        assert expected in lines
    assert not any(line.startswith("rollout:") for line in lines)  # the choices have sections, the group itself has none
    assert any(line.startswith("--config-name NAME") and line.endswith("here: small") for line in lines)
