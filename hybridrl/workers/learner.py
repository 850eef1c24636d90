"""The learner: a language model trained on given responses (supervised fine-tuning)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hybridrl.protocol.batch import Batch
from hybridrl.protocol.register import register
from hybridrl.protocol.transfer import THREE_D
from hybridrl.workers.base import RankContext
from hybridrl.workers.packed_model import ModelConfig, PackedCausalLM, load_causal_lm
from hybridrl.workers.packing import MicroBatch
from hybridrl.workers.trained import TrainedWorker
from hybridrl.workers.trainer import OptimizerConfig, Trainer


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """What a learner is made of."""

    model: ModelConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


class Learner(TrainedWorker):
    """A causal language model that learns the tokens in `response_mask`."""

    def __init__(self, config: LearnerConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.trainer = Trainer(PackedCausalLM(load_causal_lm(config.model)), config.model, context, config.optimizer)

    @register(THREE_D, reads=("tokens", "response_mask"), updates_weights=True, balance="tokens")
    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step of the mean negative log-likelihood of the masked tokens. Returns metrics."""
        metrics = self.trainer.update(batch, self._loss, "token-mean")
        self.version += 1
        return {f"learner/{name}": value for name, value in metrics.items()}

    def _loss(self, micro: MicroBatch, _: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs_S, entropy_S = self.trainer.root(micro.tokens_T, micro.rows, micro.index_S)
        return -log_probs_S, {"entropy": entropy_S.detach()}
