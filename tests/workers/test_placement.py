"""One step function, its rollouts given, on every executor and placement: the same losses and the same weights."""

import pytest
import ray
import torch
from safetensors.torch import load_file

from hybridrl.algorithms.advantages import gae, whiten
from hybridrl.algorithms.kl import KLConfig, kl_estimate
from hybridrl.algorithms.rewards import token_rewards
from hybridrl.controller import Pool, Role, computes
from hybridrl.controller.local import LocalExecutor
from hybridrl.controller.ray import RayConfig, RayExecutor
from hybridrl.protocol.batch import batch, padded, unpadded
from hybridrl.workers import Actor, Critic, CriticConfig, ModelConfig, OptimizerConfig, Reference, ReferenceConfig
from tests.workers.ranks import actor_config
from tests.workers.tiny import make_batch, relative

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

PLACEMENTS = {"one rank": (1, False), "two ranks": (2, False), "two ranks, split": (2, True)}


@computes(reads=("response_mask", "scores", "values", "old_log_probs", "ref_log_probs"), writes=("advantages", "returns"))
def gains(data):
    mask, values, old, ref = (padded(data[n]) for n in ("response_mask", "values", "old_log_probs", "ref_log_probs"))
    rewards = token_rewards(data["scores"], mask, kl_estimate(old, ref, "k1"), 0.05)
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    return {"advantages": unpadded(whiten(advantages, mask), data["values"]), "returns": unpadded(returns, data["values"])}


def step(m, rows, seed):
    data = rows | m.actor.log_probs(rows) | m.critic.values(rows) | m.reference.log_probs(rows)
    data |= gains(data)
    return [m.critic.update(mini) | m.actor.update(mini, kl_coef=0.1) for mini in data.minibatches(5, 2, seed)]


def make_roles(path, ranks, split):
    main = Pool("main", ranks)
    second = Pool("second", ranks) if split else main
    model, optimizer = ModelConfig(path=path, micro_batch_tokens=20), OptimizerConfig(lr=1e-3)
    actor = actor_config(path, kl=KLConfig(placement="loss", estimator="k3"), clip_norm=1.0)
    return {
        "actor": Role(Actor, actor, main),
        "critic": Role(Critic, CriticConfig(model, optimizer), second),
        "reference": Role(Reference, ReferenceConfig(model, 0.9), second),
    }


def run(executor, path, ranks, split, out):
    """Metrics of every update of two steps, and the actor's and critic's weights after them."""
    given = make_batch()
    rows = batch({"tokens": given["tokens"], "response_mask": given["response_mask"], "scores": torch.linspace(-1, 1, 9)})
    with executor:
        m = executor.start(make_roles(path, ranks, split))
        metrics = [update.get() for seed in range(2) for update in step(m, executor.rows(rows), seed)]
        weights = {}
        for role in ("actor", "critic"):
            getattr(m, role).export(folder=out / role).get()
            weights |= {f"{role}.{name}": tensor for name, tensor in load_file(out / role / "model.safetensors").items()}
    return metrics, weights


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def local(models, tmp_path_factory):
    return run(LocalExecutor(), str(models / "llama"), 1, False, tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_losses_and_weights_do_not_depend_on_where_roles_run(placement, models, cluster, local, tmp_path):
    path = str(models / "llama")
    metrics, weights = run(RayExecutor(RayConfig(deadline_s=120.0)), path, *PLACEMENTS[placement], tmp_path)
    assert len(metrics) == len(local[0]) == 2 * 2 * 2
    for ours, theirs in zip(metrics, local[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    # The difference of weights: the L2 norm of the difference over that of the weights, all parameters of both roles together.
    assert relative(weights, local[1]) < 1e-5
    initial = load_file(models / "llama/model.safetensors")
    assert relative({n: local[1][f"actor.{n}"] for n in initial}, initial) > 1e-3  # they moved, by far more than they differ
