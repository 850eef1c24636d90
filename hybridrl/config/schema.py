"""What a configuration class says of itself: its keys, their types, defaults and one-line meanings.

A component owns a frozen dataclass; a recipe's class nests them. The string under a field is its meaning. A field that may hold
one of several classes (an engine, say) is a *group*: `groups={"rollout": {"native": NativeConfig, "vllm": VLLMConfig}}`, where
`rollout` is a field of the recipe's class.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

Groups = Mapping[str, Mapping[str, type]]

REQUIRED = "???"
"""The value of a key that has no default, as OmegaConf writes it."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key that a user can set: `path` is dotted, `kind` the annotation, `default` plain (`REQUIRED` when there is none)."""

    path: str
    kind: Any
    default: object
    meaning: str


def keys(config_class: type, tree: Mapping[str, Any], prefix: str = "") -> Iterator[Key]:
    """The leaf keys of a class with the given defaults, in the order of the fields. Components are walked into.

    A field that is not in `tree` (a group, which `group_defaults` leaves out) is passed over.
    """
    hints, meanings = get_type_hints(config_class), field_meanings(config_class)
    for field in dataclasses.fields(config_class):
        if field.name not in tree:
            continue
        path, kind, default = prefix + field.name, hints[field.name], tree[field.name]
        component = component_of(kind)
        if component is not None and isinstance(default, Mapping):
            yield from keys(component, default, path + ".")
        else:
            yield Key(path, kind, default, meanings.get(field.name, ""))
            if component is not None:  # null by default, and made by setting a key of it
                yield from keys(component, defaults(component), path + ".")


def defaults(config_class: type) -> dict[str, Any]:
    """The plain tree of a class's defaults. A component without a default gives its own class's defaults."""
    hints = get_type_hints(config_class)
    tree: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        component = component_of(hints[field.name])
        if field.default is not dataclasses.MISSING:
            tree[field.name] = plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            tree[field.name] = plain(field.default_factory())
        else:
            tree[field.name] = REQUIRED if component is None else defaults(component)
    return tree


def group_defaults(config_class: type, groups: Groups) -> tuple[dict[str, Any], dict[str, str], dict[str, dict[str, Any]]]:
    """The defaults outside the groups, the default choice of each group, and per group the defaults of each choice.

    The default choice is the class of the field's default value; the first named where the field has none.
    """
    by_name = {field.name: field for field in dataclasses.fields(config_class)}
    chosen: dict[str, str] = {}
    trees: dict[str, dict[str, Any]] = {}
    for group, classes in groups.items():
        trees[group] = {name: defaults(component) for name, component in classes.items()}
        chosen[group] = next(iter(classes))
        factory = by_name[group].default_factory
        if factory is not dataclasses.MISSING:
            value = factory()
            chosen[group] = choice_of(value, classes)
            trees[group][chosen[group]] = plain(value)
    tree = {name: value for name, value in defaults(config_class).items() if name not in groups}
    return tree, chosen, trees


def choice_of(value: object, classes: Mapping[str, type]) -> str:
    """The name under which a group holds the class of `value`."""
    return {component: name for name, component in classes.items()}[type(value)]


def component_of(kind: Any) -> type | None:
    """The one dataclass in an annotation (`DataConfig`, `KLConfig | None`), if it has exactly one."""
    found = [arm for arm in (kind, *get_args(kind)) if dataclasses.is_dataclass(arm) and isinstance(arm, type)]
    return found[0] if len(found) == 1 else None


def plain(value: Any) -> Any:
    """A configuration value as dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def all_keys(config_class: type, groups: Groups | None = None) -> dict[str, Key]:
    """Every key that a user can set, by path: the leaves of every choice of every group too (one that choices share stands
    once).
    """
    groups = groups or {}
    tree, _, trees = group_defaults(config_class, groups)
    found = {key.path: key for key in keys(config_class, tree)}
    for group, classes in groups.items():
        for name, component in classes.items():
            found |= {key.path: key for key in keys(component, trees[group][name], f"{group}.")}
    return found


def count_keys(config_class: type, groups: Groups | None = None) -> int:
    """How many keys a user can set: `all_keys`, and each group's choice."""
    return len(all_keys(config_class, groups)) + len(groups or {})


def field_meanings(config_class: type) -> dict[str, str]:
    """The first paragraph of the string under each field, of the bases too; empty where there is no source to read."""
    meanings: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except OSError:  # typed at a prompt
            continue
        body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                meanings[statement.target.id] = _split(str(after.value.value))[0]  # type: ignore[union-attr]
    return meanings


def paragraphs(component: type | None) -> list[str]:
    """A class's own docstring; nothing for the signature that `dataclass` writes where there is none."""
    text = (component.__doc__ or "") if component else ""
    return [] if component and text.startswith(f"{component.__name__}(") else _split(text)


def _split(text: str) -> list[str]:
    """The paragraphs of a docstring, each on one line."""
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]
