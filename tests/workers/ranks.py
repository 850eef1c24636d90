"""Gloo ranks in processes of their own, and the program that each runs: everything that must not depend on their number."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from hybridrl.algorithms.aggregation import AGGREGATIONS
from hybridrl.algorithms.kl import KLConfig
from hybridrl.protocol.batch import batch
from hybridrl.protocol.layout import Layout
from hybridrl.workers import Actor, ActorConfig, Critic, CriticConfig, ModelConfig, NativeRollout, OptimizerConfig, RankContext
from tests.workers.tiny import gradients_of, make_batch, prompt_batch, rows_of, save_model, weights_of, whole


def run_ranks(world: int, program: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """`program(context, *args)` on `world` gloo ranks -> what each returned. A failure comes with the rank's own traceback."""
    folder.mkdir(parents=True)
    torch.multiprocessing.spawn(_rank, (world, program, folder, args), nprocs=world)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, program: Callable[..., Any], folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        torch.save(program(RankContext(rank, Layout(dp=world)), *args), folder / f"{rank}.pt")
    except Exception:
        traceback.print_exc()  # before the other ranks are told that this one has gone
        raise
    dist.destroy_process_group()


ROWS = 9
UPDATES = 3


def mine(context: RankContext, rows: int = ROWS, idle: bool = False) -> np.ndarray:
    """This rank's rows: neighbouring ones. With `idle` the last of several ranks has none."""
    busy = max(1, context.data_ranks - idle)
    parts = [*np.array_split(np.arange(rows), busy), *[np.arange(0)] * (context.data_ranks - busy)]
    return parts[context.rank]


def actor_config(path: str, **changes: Any) -> ActorConfig:
    """With every term that a loss can have, and gradients as they are (no clipping)."""
    model = {k: changes.pop(k) for k in ("precision", "activation_checkpointing", "micro_batch_tokens") if k in changes}
    optimizer = {k: changes.pop(k) for k in ("lr", "clip_norm", "warmup_steps") if k in changes}
    rollout = {"max_new_tokens": 12, "max_length": 64, "precision": "float32", "temperature": 0.9, **changes.pop("rollout", {})}
    return ActorConfig(
        model=ModelConfig(path=path, **{"micro_batch_tokens": 20, **model}),
        optimizer=OptimizerConfig(**{"lr": 1e-3, "clip_norm": 0.0, **optimizer}),
        rollout=NativeRollout(**rollout),
        **{"kl": KLConfig(placement="loss", estimator="k3"), "entropy_coef": 0.01, **changes},
    )


SCENARIOS: dict[str, dict[str, Any]] = {
    **{aggregation: {"model": "llama", "aggregation": aggregation} for aggregation in AGGREGATIONS},
    "biases": {"model": "qwen2"},
    "exact": {"model": "qwen3", "precision": "float64", "aggregation": "seq-mean-token-mean"},
    "recomputed": {"model": "qwen3", "activation_checkpointing": True, "micro_batch_tokens": 1},
    "tied": {"model": "tied", "micro_batch_tokens": 100_000},
    "clipped": {"model": "llama", "clip_norm": 0.05, "warmup_steps": 2},
    "idle rank": {"model": "llama", "idle": True},
    "one row": {"model": "llama", "rows": 1},
    "nothing to learn": {"model": "llama", "rows": 0},
}


FOUR_RANKS = ("token-mean", "exact", "tied", "idle rank", "one row")
"""Enough there: processes that start take longer than what they do."""


def save_models(folder: Path) -> None:
    for name in ("llama", "qwen2", "qwen3"):
        save_model(folder / name, name)
    save_model(folder / "tied", "qwen2", tie_word_embeddings=True)


def everything(context: RankContext, models: Path, out: Path) -> dict[str, Any]:
    """The results of one rank; checkpoints go to `out`. Run with one rank first: the others load what it saved."""
    chosen = FOUR_RANKS if context.data_ranks == 4 else SCENARIOS
    results: dict[str, Any] = {name: updated(context, models, **SCENARIOS[name]) for name in chosen}
    results["critic"] = updated_critic(context, models)
    results["checkpoint"] = checkpointed(context, models, out)
    rollouts = {"float32": {}, "bfloat16": {"precision": "bfloat16"}, "tied": {"model": "tied"}}
    results["rollout"] = {name: rolled_out(context, models, **settings) for name, settings in rollouts.items()}
    return results


def updated(
    context: RankContext, models: Path, model: str, idle: bool = False, rows: int = ROWS, **changes: Any
) -> dict[str, Any]:
    """Gradients and metrics of a first update, weights after some more, log-probabilities under these."""
    dtype = torch.float64 if changes.get("precision") == "float64" else torch.float32
    actor = Actor(actor_config(str(models / model), **changes), context)
    data = rows_of(make_batch(dtype=dtype), mine(context, rows, idle))
    gradients, metrics = (
        gradients_of(actor.trainer, lambda: actor.update(data, kl_coef=0.1)) if rows else ({}, actor.update(data))
    )
    later = [actor.update(data, kl_coef=0.1) for _ in range(UPDATES - 1)]
    log_probs = actor.log_probs(data)["old_log_probs"].values()
    return {"gradients": gradients, "metrics": [metrics, *later], "weights": weights_of(actor.trainer), "log_probs": log_probs}


def updated_critic(context: RankContext, models: Path) -> dict[str, Any]:
    config = CriticConfig(
        ModelConfig(path=str(models / "llama"), micro_batch_tokens=20), OptimizerConfig(lr=1e-3, clip_norm=0.0)
    )
    critic, data = Critic(config, context), rows_of(make_batch(), mine(context, idle=True))
    gradients, metrics = gradients_of(critic.trainer, lambda: critic.update(data))
    return {
        "gradients": gradients,
        "metrics": [metrics, critic.update(data)],
        "weights": weights_of(critic.trainer),
        "log_probs": critic.values(data)["values"].values(),
    }


def checkpointed(context: RankContext, models: Path, out: Path) -> dict[str, Any]:
    """Save here, load what one rank and what these ranks saved, go on from each."""
    results: dict[str, Any] = {}
    for model in ("llama", "tied"):
        data = rows_of(make_batch(), mine(context))
        config = actor_config(str(models / model), warmup_steps=4)
        actor = Actor(config, context)
        actor.update(data)
        folder = out / f"{model}-{context.data_ranks}"
        actor.save(folder)
        on = [actor.update(data)["actor/loss"] for _ in range(2)]
        results[model] = {"on": on, "weights": weights_of(actor.trainer), "saved": str(folder)}
        for origin in {1, context.data_ranks}:
            # Into an actor that has done other things since: nothing of them may stay.
            actor.log_probs(data)
            actor.load(out / f"{model}-{origin}")
            losses = [actor.update(data)["actor/loss"] for _ in range(2)]
            results[model][f"from {origin}"] = {"on": losses, "weights": weights_of(actor.trainer)}
    return results


def rolled_out(context: RankContext, models: Path, model: str = "qwen3", precision: str = "float32") -> dict[str, Any]:
    """Samples before and after an update, scored by the trainer with the weights of either time."""
    actor = Actor(actor_config(str(models / model), lr=3e-2, rollout={"precision": precision}), context)
    prompts = rows_of(prompt_batch(range(100, 113)), mine(context, 13))
    first = actor.generate(prompts)
    before = scored(actor, first)
    actor.update(rows_of(make_batch(), mine(context)))
    second = actor.generate(prompts)
    fresh, stale = scored(actor, second), scored(Actor(actor_config(str(models / model)), context), second)
    greedy = actor.generate(prompts, temperature=0.0)
    engine_has = {n: p.detach().clone() for n, p in actor.engine._engine._model.named_parameters()}
    return {
        "tokens": [t.tolist() for t in first["tokens"].unbind()],
        "gap before": _largest(first["rollout_log_probs"].values() - before),
        "gap after": _largest(second["rollout_log_probs"].values() - fresh),
        "gap if stale": _largest(second["rollout_log_probs"].values() - stale),
        "greedy": [t.tolist() for t in greedy["tokens"].unbind()],
        "shared": actor.engine._shared,
        "engine": engine_has,
        "weights": {n: whole(p.detach()) for n, p in actor.trainer.model.named_parameters()},
    }


def scored(actor: Actor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the trainer says of the samples: the values of the column, end to end."""
    return actor.log_probs(batch({name: columns[name] for name in ("tokens", "response_mask")}))["old_log_probs"].values()


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if len(values) else 0.0
