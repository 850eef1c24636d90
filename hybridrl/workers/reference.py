"""The reference: a frozen policy that the actor is kept near to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridrl.protocol.batch import Batch
from hybridrl.protocol.register import register
from hybridrl.protocol.transfer import THREE_D
from hybridrl.workers.base import RankContext, Worker
from hybridrl.workers.packed_model import ModelConfig, PackedCausalLM, load_causal_lm
from hybridrl.workers.trainer import Trainer


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """`temperature`: the rollout's, so that its log-probabilities compare with the actor's."""

    model: ModelConfig
    temperature: float = 1.0


class Reference(Worker):
    """A causal language model that only scores."""

    config: ReferenceConfig

    def __init__(self, config: ReferenceConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.trainer = Trainer(PackedCausalLM(load_causal_lm(config.model)), config.model, context)

    @register(THREE_D, reads=("tokens", "response_mask"), writes=("ref_log_probs",), rowwise=True)
    def log_probs(self, batch: Batch) -> dict[str, Tensor]:
        """Log-probability of every response token."""
        temperature = self.config.temperature
        return {
            "ref_log_probs": self.trainer.infer(
                batch, lambda micro: self.trainer.root(micro.tokens_T, micro.rows, micro.index_S, temperature)[0]
            )
        }
