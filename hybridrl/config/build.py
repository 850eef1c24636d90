"""From a plain tree to typed, frozen dataclasses, bottom-up, so that every complaint carries the dotted key of the user.

OmegaConf's own structured configs are not used for this: they refuse to change a frozen dataclass and do not know `Literal`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from hybridrl.config.schema import REQUIRED, Groups, choice_of, component_of, plain
from hybridrl.protocol.errors import ConfigError, nearest

T = TypeVar("T")

_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", Path: "a path", type(None): "null"}


def build(config_class: type[T], tree: object, path: str = "", chosen: Mapping[str, type] | None = None) -> T:
    """The dataclass from its tree. `chosen` names the class of the fields that are groups.

    Raises ConfigError for a key that the class has not, one without a value, and a value of the wrong type; a ConfigError of
    the class's own checks is raised again with the dotted path before the name of the field.
    """
    if not isinstance(tree, Mapping):
        raise _mismatch(config_class, tree, path)
    prefix = f"{path}." if path else ""
    hints = {**get_type_hints(config_class), **(chosen or {})}
    names = [field.name for field in dataclasses.fields(config_class)]  # type: ignore[arg-type]
    for name in tree:
        if name not in names:
            raise ConfigError(f"unknown key '{prefix}{name}'{nearest(f'{prefix}{name}', [prefix + known for known in names])}")
    values = {name: _convert(hints[name], tree[name], prefix + name) for name in names if name in tree}
    try:
        return config_class(**values)
    except ConfigError as error:
        raise ConfigError(_with_path(str(error), path, names)) from error


def to_yaml(config: object, groups: Groups | None = None) -> str:
    """The configuration as YAML that `--config-name` takes back. With `groups`, the choice made of each is kept too."""
    chosen = {group: choice_of(getattr(config, group), classes) for group, classes in (groups or {}).items()}
    header = ["base", *({f"override {group}": name} for group, name in chosen.items()), "_self_"]
    return OmegaConf.to_yaml(OmegaConf.create({"defaults": header, **plain(config)}))


def _with_path(message: str, path: str, names: list[str]) -> str:
    """ "batch_size must be ..." of the component `data` becomes "data.batch_size must be ..."."""
    if not path:
        return message
    word = re.match(r"\w+", message)
    return f"{path}.{message}" if word and word[0] in names else f"{path}: {message}"


def _convert(kind: Any, value: Any, path: str) -> Any:
    if value == REQUIRED:
        raise ConfigError(f"{path} has no value: add {path}=... to the command or the preset")
    origin, arms = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _convert_union(kind, value, path)
    if origin is Literal and any(value == arm and type(value) is type(arm) for arm in arms):
        return value
    if origin in (tuple, list) and isinstance(value, list):
        return _convert_list(kind, value, path)
    if origin is dict and isinstance(value, dict):
        return {name: _convert(arms[1], inner, f"{path}.{name}") for name, inner in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return build(kind, value, path)
    cast = _CASTS.get((kind, type(value)))
    if cast is None:
        raise _mismatch(kind, value, path)
    return cast(value)


# Which plain value makes which field. A name made of digits reaches us as an integer, 1 for 1.0 too; nothing else is converted.
_CASTS: dict[tuple[Any, type], Callable[[Any], Any]] = {
    (int, int): int,
    (float, float): float,
    (float, int): float,
    (bool, bool): bool,
    (str, str): str,
    (str, int): str,
    (Path, str): Path,
    (type(None), type(None)): lambda value: value,
}


def _convert_union(kind: Any, value: Any, path: str) -> Any:
    component = component_of(kind)
    if component is not None and isinstance(value, Mapping):
        return build(component, value, path)
    for arm in get_args(kind):
        if not dataclasses.is_dataclass(arm):
            try:
                return _convert(arm, value, path)
            except ConfigError:
                continue
    raise _mismatch(kind, value, path)


def _convert_list(kind: Any, value: list[Any], path: str) -> Any:
    arms = get_args(kind)
    if get_origin(kind) is list or arms[-1] is Ellipsis:
        arms = (arms[0],) * len(value)
    if len(arms) != len(value):
        raise _mismatch(kind, value, path)
    return get_origin(kind)(
        _convert(arm, inner, f"{path}[{i}]") for i, (arm, inner) in enumerate(zip(arms, value, strict=True))
    )


def _mismatch(kind: Any, value: object, path: str) -> ConfigError:
    hint = nearest(value, map(str, get_args(kind))) if get_origin(kind) is Literal and isinstance(value, str) else ""
    shown = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return ConfigError(f"{path or 'the configuration'} must be {_describe(kind)}, not {shown}{hint}")


def _describe(kind: Any) -> str:
    origin, arms = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(arm) for arm in arms)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arms))}" if len(arms) > 1 else repr(arms[0])
    if origin in (tuple, list):
        whole = origin is list or arms[-1] is Ellipsis
        return f"a list, each {_describe(arms[0])}" if whole else f"a list of {len(arms)}, [{', '.join(map(_describe, arms))}]"
    if origin is dict:
        return f"a mapping of names, each to {_describe(arms[1])}"
    if dataclasses.is_dataclass(kind):
        return f"a group of keys ({', '.join(field.name for field in dataclasses.fields(kind))})"
    return _WORDS.get(kind) or str(kind)
