"""The actor: the policy that generates and is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hybridrl.algorithms.aggregation import Aggregation
from hybridrl.algorithms.kl import KLConfig, kl_estimate
from hybridrl.algorithms.policy_loss import PPOClip
from hybridrl.protocol.batch import Batch
from hybridrl.protocol.register import register
from hybridrl.protocol.transfer import DP_PROTO, THREE_D
from hybridrl.workers.base import RankContext
from hybridrl.workers.packed_model import ModelConfig, PackedCausalLM, load_causal_lm
from hybridrl.workers.packing import MicroBatch
from hybridrl.workers.rollout import HybridEngine, NativeRollout, RolloutConfig
from hybridrl.workers.trained import TrainedWorker
from hybridrl.workers.trainer import OptimizerConfig, Trainer


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """What an actor is made of. `kl` here is the penalty in the loss; a penalty in the reward is the step function's."""

    model: ModelConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=NativeRollout)
    loss: PPOClip = field(default_factory=PPOClip)
    kl: KLConfig = field(default_factory=KLConfig)
    aggregation: Aggregation = "token-mean"
    entropy_coef: float = 0.0


class Actor(TrainedWorker):
    """A causal language model: generation, log-probabilities, policy updates."""

    config: ActorConfig

    def __init__(self, config: ActorConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.lm = PackedCausalLM(load_causal_lm(config.model))
        self.trainer = Trainer(self.lm, config.model, context, config.optimizer)
        self.engine = HybridEngine(config.rollout, config.model, self.lm.model, context)

    @staticmethod
    def also_reads(config: ActorConfig, method: str) -> tuple[str, ...]:
        if method != "update":
            return ()
        return (*config.loss.reads, "ref_log_probs") if config.kl.placement == "loss" else config.loss.reads

    @register(DP_PROTO, reads=("prompts", "seed"), writes=("tokens", "response_mask", "rollout_log_probs"), rowwise=True)
    def generate(self, prompts: Batch, temperature: float | None = None) -> dict[str, Tensor]:
        """Draw a response to every prompt with the current weights; `temperature` 0 is greedy, None the configured one.

        prompts: ragged int64; seed: (B,) int64, one per row. A row's response depends on its prompt, its seed and the weights.
        """
        return self.engine.generate(prompts, self.version, temperature)

    @register(THREE_D, reads=("tokens", "response_mask"), writes=("old_log_probs",), rowwise=True)
    def log_probs(self, batch: Batch) -> dict[str, Tensor]:
        """Log-probability of every response token under the current weights, at the rollout's temperature."""
        return {"old_log_probs": self.trainer.infer(batch, lambda micro: self._score(micro)[0])}

    @register(
        THREE_D, reads=("tokens", "response_mask"), optional=("rollout_log_probs",), updates_weights=True, balance="tokens"
    )
    def update(self, batch: Batch, kl_coef: float = 0.0) -> dict[str, float]:
        """One optimizer step of the policy loss on these rows; the loss names the columns that it reads. Returns metrics."""
        metrics = self.trainer.update(
            batch, lambda micro, _: self._loss(micro, kl_coef), self.config.aggregation, self.config.rollout.max_new_tokens
        )
        self.version += 1
        return {f"actor/{name}": value for name, value in metrics.items()}

    def close(self) -> None:
        self.engine.close()

    def _score(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return self.trainer.root(micro.tokens_T, micro.rows, micro.index_S, self.config.rollout.temperature)

    def _loss(self, micro: MicroBatch, kl_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs_S, entropy_S = self._score(micro)
        loss_S, metrics = self.config.loss(log_probs_S, micro.columns)
        metrics["entropy"] = entropy_S.detach()
        if self.config.entropy_coef:
            loss_S = loss_S - self.config.entropy_coef * entropy_S
        if self.config.kl.placement == "loss":
            penalty_S = kl_estimate(log_probs_S, micro.columns["ref_log_probs"], self.config.kl.estimator)
            loss_S = loss_S + kl_coef * penalty_S
            metrics["kl"] = penalty_S.detach()
        return loss_S, metrics
