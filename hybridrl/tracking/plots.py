"""The learning curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hybridrl.protocol.errors import DataError
from hybridrl.tracking.metrics import read_metrics

_INK, _GRID = "#333333", "#e3e3e3"
_COLOURS = ("#2a6fbb", "#d9631e", "#2f9e5b", "#8a4fbf")


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric to draw. `points` marks each value (held-out evaluations, which are sparse); otherwise the values are drawn
    faint under their moving average."""

    key: str
    label: str
    points: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes. `log` draws the values on a logarithmic scale, leaving out those that are not above 0."""

    title: str
    curves: tuple[Curve, ...]
    log: bool = False


PANELS = (
    Panel(
        "Reward",
        (
            Curve("reward/mean", "reward, training samples"),
            Curve("eval/score", "held out, greedy", points=True),
        ),
    ),
    Panel(
        "Divergence (nats per token)",
        (Curve("actor/kl_reference", "policy from reference"), Curve("actor/kl_rollout", "trainer from rollout engine")),
        log=True,
    ),
    Panel("Loss", (Curve("actor/loss", "policy"), Curve("critic/loss", "value"), Curve("learner/loss", "supervised"))),
)
"""What `learning_curve` draws of the metrics that the recipes log."""


def learning_curve(metrics: Path, picture: Path, title: str = "", panels: Sequence[Panel] = PANELS) -> None:
    """Draw the panels side by side from a `metrics.jsonl` into a PNG.

    Curves that the run did not log are left out, and so are panels without any. Raises DataError when nothing is left.
    """
    lines = read_metrics(metrics)
    logged = {key for line in lines for key in line}
    drawn = [panel for panel in panels if any(curve.key in logged for curve in panel.curves)]
    if not drawn:
        wanted = ", ".join(curve.key for panel in panels for curve in panel.curves)
        raise DataError(f"{metrics} has none of the metrics to draw: {wanted}")
    figure = Figure(figsize=(4.4 * len(drawn), 3.5), dpi=150)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.06, wspace=0.04)
    for index, panel in enumerate(drawn):
        _draw(figure.add_subplot(1, len(drawn), index + 1), panel, lines)
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold", color=_INK, x=0.008, ha="left")
    figure.savefig(picture)


def _draw(axes: Axes, panel: Panel, lines: list[dict[str, float]]) -> None:
    for colour, curve in zip(_COLOURS, panel.curves, strict=False):
        found = [(line["step"], line[curve.key]) for line in lines if curve.key in line]
        steps, values = np.array(found, dtype=float).reshape(-1, 2).T
        usable = np.isfinite(values) & ((values > 0) | (not panel.log))
        steps, values = steps[usable], values[usable]
        if not len(steps):
            continue
        if curve.points:
            axes.plot(steps, values, color=colour, marker="o", markersize=4.5, linewidth=1.8, label=curve.label, zorder=3)
            last = (steps[-1], values[-1])
            axes.annotate(
                f"{values[-1]:.3g}", last, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8, color=colour
            )
        else:
            axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
            axes.plot(steps, _smooth(values), color=colour, linewidth=1.8, label=curve.label)
    if panel.log:
        axes.set_yscale("log")
    _dress(axes, panel.title)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over about a twentieth of the run; at the ends over what there is."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("step", fontsize=9, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.tick_params(colors=_INK, labelsize=8, length=0, which="both")
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_INK)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=True, framealpha=0.85, edgecolor="none", loc="best")
