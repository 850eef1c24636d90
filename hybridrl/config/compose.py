"""A configuration from its defaults, a preset file and the command line's overrides, composed by Hydra.

Hydra brings the override grammar, config groups, presets and interpolation (`${data.batch_size}`); the class brings types and
checks. The recipe's own defaults are Hydra's config `base`. A preset is a YAML file that starts from it:

    defaults:
      - base
      - override rollout: vllm    # a group's choice, if not the default one
      - _self_
    data:
      batch_size: 64
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hybridrl.config.build import build
from hybridrl.config.schema import Groups, group_defaults, keys
from hybridrl.protocol.errors import ConfigError, nearest

T = TypeVar("T")


def load(
    config_class: type[T],
    overrides: Sequence[str] = (),
    groups: Groups | None = None,
    config_name: str | None = None,
    config_dir: Path | None = None,
) -> T:
    """The configuration that a command line would give: `load(PPOConfig, ["data.batch_size=64", "rollout=vllm"], GROUPS)`.

    `config_name` is a preset, the stem of a YAML file in `config_dir`. Raises ConfigError.
    """
    groups = groups or {}
    parsed = [_parse(text) for text in overrides]
    selections = [_checked_choice(override, groups) for override in parsed if override.key_or_group in groups]
    trees = _register(config_class, groups)
    with _search_in(config_name, config_dir):
        _, choices = _compose(config_name, selections, groups)
        settings = _checked_settings(parsed, config_class, groups, choices, trees)
        tree, choices = _compose(config_name, [*selections, *settings], groups)
    absent = {field.name for field in dataclasses.fields(config_class)} - set(tree)  # type: ignore[arg-type]
    if absent:
        raise ConfigError(
            f"the preset '{config_name}' lacks {', '.join(sorted(absent))}: begin it with 'defaults: [base, _self_]'"
        )
    return build(config_class, tree, chosen={group: groups[group][name] for group, name in choices.items()})


def preset_names(config_dir: Path) -> list[str]:
    """The presets in a directory."""
    return sorted(file.stem for file in config_dir.glob("*.yaml"))


def _parse(text: str) -> Override:
    key, equals, _ = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"'{text}' is not key=value, such as seed=1: --help lists the keys")
    try:
        override: Override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"'{text}' cannot be read; put quotes around a text with signs in it: {key}=\"'...'\"") from error
    if override.is_sweep_override():
        raise ConfigError(f"'{text}' gives several values: a run takes one; write a list as {key}=[...]")
    if override.is_add() or override.is_delete():
        raise ConfigError(f"'{text}' adds or removes a key: write key=value, without + or ~")
    return override


def _checked_choice(override: Override, groups: Groups) -> str:
    group, choice, names = override.key_or_group, override.value(), list(groups[override.key_or_group])
    if choice not in names:
        hint = nearest(choice, names) if isinstance(choice, str) else ""
        raise ConfigError(f"{group} must be one of {', '.join(map(repr, names))}, not {choice!r}{hint}")
    return f"{group}={choice}"


def _checked_settings(
    parsed: list[Override], config_class: type, groups: Groups, choices: dict[str, str], trees: dict[str, Any]
) -> list[str]:
    """The overrides that set keys, as Hydra takes them; ConfigError for a key that nothing has."""
    leaves = list(keys(config_class, trees["base"]))
    for group, name in choices.items():
        leaves += keys(groups[group][name], trees[group][name], f"{group}.")
    known = {key.path for key in leaves}
    components = {path[:dot] for path in known for dot in range(len(path)) if path[dot] == "."}
    settings = []
    for override in parsed:
        key = override.key_or_group
        if key in groups:
            continue
        inside = any(key.startswith(f"{path}.") for path in known)  # a name in a mapping
        if key not in known and key not in components and not inside:
            raise ConfigError(f"unknown key '{key}'{_elsewhere(key, groups, choices, trees) or nearest(key, known)}")
        settings.append(f"++{override.input_line}")  # with ++ Hydra leaves to us what may be set: new names in mappings may
    return settings


def _elsewhere(key: str, groups: Groups, choices: dict[str, str], trees: dict[str, Any]) -> str:
    """What to say of a key that another choice of its group has."""
    group, _, rest = key.partition(".")
    for name, component in groups.get(group, {}).items():
        if any(rest == leaf.path for leaf in keys(component, trees[group][name])):
            return f" of {group}={choices[group]} ({group}={name} has it)"
    return ""


def _register(config_class: type, groups: Groups) -> dict[str, Any]:
    """Put the defaults where Hydra finds them; returns them too: the `base` tree and, per group, those of each choice."""
    base, chosen, trees = group_defaults(config_class, groups)
    store = ConfigStore.instance()
    store.store(name="base", node={"defaults": ["_self_", *({group: name} for group, name in chosen.items())], **base})
    for group, by_name in trees.items():
        for name, tree in by_name.items():
            store.store(group=group, name=name, node=tree)
    return {"base": base, **trees}


def _search_in(config_name: str | None, config_dir: Path | None) -> AbstractContextManager[Any]:
    if config_name is None:
        return initialize(config_path=None, version_base="1.3")
    names = preset_names(config_dir) if config_dir else []
    if config_dir is None or config_name not in names:
        listing = f"it has {', '.join(names)}" if names else "it has none"
        raise ConfigError(
            f"no preset '{config_name}' in {config_dir}{nearest(config_name, names)}: {listing}; see --config-dir"
        )
    return initialize_config_dir(str(config_dir.resolve()), version_base="1.3")


def _compose(config_name: str | None, overrides: list[str], groups: Groups) -> tuple[dict[str, Any], dict[str, str]]:
    """The plain composed tree, and the choice made of each group."""
    try:
        composed = compose(config_name or "base", overrides, return_hydra_config=True)
        choices = composed.hydra.runtime.choices
        chosen = {group: choices[group] for group in groups if group in choices}
        ours = OmegaConf.masked_copy(composed, [str(name) for name in composed if name != "hydra"])
        return OmegaConf.to_container(ours, resolve=True), chosen  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:  # ValueError: a malformed defaults list
        preset, key = config_name and f"preset '{config_name}'", getattr(error, "full_key", None)
        said = " ".join(re.split(r"\n\s*full_key|\nConfig search path", str(error))[0].split())
        raise ConfigError(": ".join(filter(None, [preset, key, said]))) from error
