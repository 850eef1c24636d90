"""Proximal policy optimisation of a language model (Schulman et al., 2017; Ouyang et al., 2022), from prompts and a reward.

python -m recipes.ppo model.path=MODEL data.path=train.jsonl reward.function=hybridrl.rewards.math:exact_match
python -m recipes.ppo --config-name gsm8k model.path=MODEL data.path=gsm8k/train.jsonl executor=ray ranks=2 rollout=vllm
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

import hybridrl.workers as workers
from hybridrl.algorithms.advantages import gae, whiten
from hybridrl.algorithms.aggregation import Aggregation
from hybridrl.algorithms.kl import KLConfig, kl_estimate
from hybridrl.algorithms.policy_loss import PPOClip
from hybridrl.algorithms.rewards import token_rewards
from hybridrl.algorithms.value_loss import ValueClip
from hybridrl.config import launch
from hybridrl.controller import Groups, Result, Role, computes
from hybridrl.protocol.batch import Batch, padded, unpadded
from hybridrl.protocol.errors import at_least
from hybridrl.protocol.reference import Reference
from hybridrl.run import ROLLOUT, RecipeConfig, Run, combined, rollout_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """PPO's own numbers."""

    minibatch_size: int = 128
    """Rows per optimizer step."""
    epochs: int = 1
    """Passes over a step's rows."""
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """GAE's trade of bias for variance."""
    whiten: bool = True
    """Advantages of a step to mean 0 and standard deviation 1."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    aggregation: Aggregation = "token-mean"
    """How tokens weigh in both losses."""

    def __post_init__(self) -> None:
        at_least(self, minibatch_size=1, epochs=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig(RecipeConfig):
    """PPO on prompts and a reward."""

    ppo: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    policy_loss: PPOClip = field(default_factory=PPOClip)
    value_loss: ValueClip = field(default_factory=ValueClip)
    actor: workers.OptimizerConfig = field(default_factory=workers.OptimizerConfig)
    critic: workers.OptimizerConfig = field(default_factory=workers.OptimizerConfig)
    reward: workers.RewardConfig = field(default_factory=workers.RewardConfig)
    rollout: workers.RolloutConfig = field(default_factory=workers.NativeRollout)


@computes(
    reads=("response_mask", "scores", "values", "old_log_probs"), optional=("ref_log_probs",), writes=("advantages", "returns")
)
def advantages(batch: Batch, config: PPOConfig, kl_coef: float) -> dict[str, Tensor]:
    mask, values, old = (padded(batch[name]) for name in ("response_mask", "values", "old_log_probs"))
    reference = padded(batch["ref_log_probs"]) if config.kl.placement == "reward" else old
    rewards = token_rewards(batch["scores"], mask, kl_estimate(old, reference, config.kl.estimator), kl_coef)
    gains, returns = gae(rewards, values, mask, config.ppo.gamma, config.ppo.lam)
    gains = whiten(gains, mask) if config.ppo.whiten else gains
    return {"advantages": unpadded(gains, batch["values"]), "returns": unpadded(returns, batch["values"])}


def ppo_step(m: Groups, prompts: Reference, config: PPOConfig, kl_coef: float, seed: int) -> tuple[Reference, list[Result]]:
    batch = prompts | m.actor.generate(prompts)
    batch |= m.actor.log_probs(batch) | m.critic.values(batch) | m.reward.score(batch)
    if config.kl.placement != "off":
        batch |= m.reference.log_probs(batch)
    batch |= advantages(batch, config=config, kl_coef=kl_coef)
    updates = [rollout_metrics(batch)]
    for mini in batch.minibatches(config.ppo.minibatch_size, config.ppo.epochs, seed):
        updates.append(m.critic.update(mini) | m.actor.update(mini, kl_coef=kl_coef))
    return batch, updates


def roles(config: PPOConfig) -> dict[str, Role]:
    (main, second), model, numbers = config.pools(), config.model, config.ppo
    actor = workers.ActorConfig(
        model, config.actor, config.rollout, config.policy_loss, config.kl, numbers.aggregation, numbers.entropy_coef
    )
    critic = workers.CriticConfig(model, config.critic, config.value_loss, numbers.aggregation, config.rollout.max_new_tokens)
    made = {
        "actor": Role(workers.Actor, actor, main),
        "critic": Role(workers.Critic, critic, second),
        "reward": Role(workers.Reward, workers.RewardWorkerConfig(config.reward, model.path), main),
        "reference": Role(workers.Reference, workers.ReferenceConfig(model, config.rollout.temperature), second),
    }
    return {name: role for name, role in made.items() if name != "reference" or config.kl.placement != "off"}


def ppo(config: PPOConfig) -> None:
    kl, run = config.kl.first(), Run(config, ROLLOUT, roles(config), saved=("actor", "critic"), goal=config.reward.label)
    run.check(partial(ppo_step, config=config, kl_coef=kl.coef, seed=0))
    run.check_rollouts(config.rollout, config.reward)
    with run:
        kl = replace(kl, coef=run.state.get("kl_coef", kl.coef))
        for step in run.steps():
            batch, updates = ppo_step(run.m, run.prompts(step), config, kl.coef, seed=step)
            metrics = combined([update.get() for update in updates]) | {"actor/kl_coef": kl.coef}
            kl = kl.update(metrics.get("actor/kl_sequence", 0.0), len(batch))
            run.finish_step(step, batch, metrics, kl_coef=kl.coef)
        run.finish()


if __name__ == "__main__":
    launch(PPOConfig, ppo, ROLLOUT)
