"""A configuration class tells its keys, defaults and meanings."""

from hybridrl.config.schema import count_keys, defaults, field_meanings, keys
from tests.config.example_recipe import GROUPS, ActorConfig, ExampleConfig, VLLMConfig


def test_defaults_are_plain_and_say_what_is_required():
    tree = defaults(ExampleConfig)
    assert tree["data"] == {"path": "???", "batch_size": 32}
    assert tree["actor"]["adam"] == {"lr": 1e-6, "betas": [0.9, 0.95]}
    assert tree["rollout"] == {"temperature": 0.9}
    assert tree["penalty"] is None


def test_keys_are_dotted_and_walk_into_components():
    assert [key.path for key in keys(ActorConfig, defaults(ActorConfig), "actor.")] == [
        "actor.adam.lr",
        "actor.adam.betas",
        "actor.loss",
        "actor.layers",
        "actor.checkpoint_every",
    ]


def test_meanings_are_the_first_paragraph_under_a_field_inherited_too():
    assert field_meanings(ActorConfig) == {"loss": "The clipped objective, by token or by sequence."}
    assert field_meanings(VLLMConfig) == {"temperature": "0 is greedy."}


def test_count_keys():
    # 5 at the top, 1 of penalty, 2 of data, 5 of actor, the group itself, and its temperature and memory_share
    assert count_keys(ExampleConfig, GROUPS) == 16
    assert count_keys(ActorConfig) == 5
