"""The page of `--help`: every key, its type, default and meaning, by component."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybridrl.config.compose import preset_names
from hybridrl.config.schema import REQUIRED, Groups, Key, component_of, group_defaults, keys, paragraphs


def help_page(config_class: type, groups: Groups, config_dir: Path) -> RenderableType:
    """Everything that a user of the recipe can set. One section per component, one per choice of a group."""
    sections = list(_sections(config_class, groups))
    rows = [("key", "type", "default"), *(_cells(key) for _, _, section in sections for key in section)]
    widths = [min(max(map(len, column)), limit) for column, limit in zip(zip(*rows, strict=True), (48, 30, 28), strict=True)]
    body: list[RenderableType] = []
    for title, more, section in sections:
        table = Table(box=None, show_header=not body, pad_edge=False, header_style="dim")
        for name, width, style in zip(rows[0], widths, ("cyan", "", "green"), strict=True):
            table.add_column(name, width=width, overflow="fold", style=style)
        table.add_column("meaning", overflow="fold")
        for key in section:
            table.add_row(*map(Text, (*_cells(key), key.meaning)))
        body += [Text(f"\n{title}" if title else "", style="bold"), *(Text(line, style="dim") for line in more), table]
    return Group(*_head(config_class, groups, config_dir), *body)


def _sections(config_class: type, groups: Groups) -> Iterator[tuple[str, list[str], list[Key]]]:
    """A title, what more there is to say, and the keys: of the recipe's own, each component's, each choice's."""
    tree, chosen, trees = group_defaults(config_class, groups)
    everything = list(keys(config_class, tree))
    yield "", [], [key for key in everything if "." not in key.path]
    hints = get_type_hints(config_class)
    for name in dict.fromkeys(key.path.split(".")[0] for key in everything if "." in key.path):
        yield *_title(name, component_of(hints[name])), [key for key in everything if key.path.startswith(f"{name}.")]
    for group, classes in groups.items():
        for name, component in classes.items():
            title = f"{group}={name}{' (the default)' if name == chosen[group] else ''}"
            yield *_title(title, component), list(keys(component, trees[group][name], f"{group}."))


def _head(config_class: type, groups: Groups, config_dir: Path) -> Iterator[Text]:
    for index, paragraph in enumerate(paragraphs(config_class)):
        yield Text(f"{paragraph}\n", style="dim" if index else "bold")
    yield Text(f"usage: {Path(sys.argv[0]).name} [key=value ...] [group=choice ...] [options]\n")
    yield Text(f"  --config-name NAME   start from a preset; here: {', '.join(preset_names(config_dir)) or 'none'}")
    yield Text(f"  --config-dir DIR     where presets are looked for, instead of {config_dir}")
    yield Text("  --print-config       print the resolved configuration, which is itself a preset, and stop")
    yield Text("  --help               this page")
    for group, classes in groups.items():
        yield Text(f"  {group}={'|'.join(classes)}")


def _title(name: str, component: type | None) -> tuple[str, list[str]]:
    """The heading of a section, with the first paragraph of the class's docstring, and the other paragraphs."""
    first, *more = paragraphs(component) or [""]
    return f"{name}: {first}" if first else name, more


def _cells(key: Key) -> tuple[str, str, str]:
    return key.path, _label(key.kind), _default(key.default)


def _default(value: object) -> str:
    if value == REQUIRED:
        return "(required)"
    return json.dumps(value) if value in (None, "") or isinstance(value, bool) else str(value)


def _label(kind: Any) -> str:
    origin, arms = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " | ".join(_label(arm) for arm in arms)
    if origin is Literal:
        return " | ".join(map(str, arms))
    if origin in (tuple, list):
        return f"[{_label(arms[0])}, ...]" if origin is list or arms[-1] is Ellipsis else f"[{', '.join(map(_label, arms))}]"
    if origin is dict:
        return f"{{name: {_label(arms[1])}}}"
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))
