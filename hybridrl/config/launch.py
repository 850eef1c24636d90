"""The command line of a recipe: `if __name__ == "__main__": launch(PPOConfig, run)`.

    python -m recipes.ppo data.batch_size=64 rollout=vllm          # keys and group choices, in any order
    python -m recipes.ppo --config-name gsm8k                      # a preset: config/gsm8k.yaml beside the recipe
    python -m recipes.ppo --config-dir runs/1 --config-name config # the configuration of an earlier run
    python -m recipes.ppo --print-config > mine.yaml               # the resolved configuration, itself a preset
    python -m recipes.ppo --help

Exit status: 0 done; 2 the input cannot be used (one message, no traceback); 1 a worker failed (the message has the worker's own
traceback) or any other exception; 130 interrupted.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from rich.console import Console
from rich.text import Text

from hybridrl.config.build import to_yaml
from hybridrl.config.compose import load
from hybridrl.config.help import help_page
from hybridrl.config.schema import Groups
from hybridrl.protocol.errors import ConfigError, DeadlineError, UserError, WorkerError

T = TypeVar("T")


def launch(config_class: type[T], main: Callable[[T], None], groups: Groups | None = None) -> None:
    """Build the configuration from the command line and call `main` with it; ends the process where the status is not 0."""
    try:
        _launch(config_class, main, groups or {})
    except UserError as error:
        _end(2, f"{error}")
    except (WorkerError, DeadlineError) as error:
        _end(1, f"{error}")
    except KeyboardInterrupt:
        _end(130, "interrupted")


def _launch(config_class: type[T], main: Callable[[T], None], groups: Groups) -> None:
    beside = Path(inspect.getfile(main)).resolve().parent / "config"
    options = _parser(beside).parse_intermixed_args()
    if options.help:
        Console(width=None if sys.stdout.isatty() else 128).print(help_page(config_class, groups, options.config_dir))
        return
    config = load(config_class, options.overrides, groups, options.config_name, options.config_dir)
    if options.print_config:
        sys.stdout.write(to_yaml(config, groups))
        return
    main(config)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def _parser(beside: Path) -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("--config-name", metavar="NAME")
    parser.add_argument("--config-dir", metavar="DIR", type=Path, default=beside)
    return parser


def _end(status: int, message: str) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    sys.exit(status)
