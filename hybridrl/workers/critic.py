"""The critic: a value for every state in which a response token is chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridrl.algorithms.aggregation import Aggregation
from hybridrl.algorithms.value_loss import ValueClip
from hybridrl.protocol.batch import Batch
from hybridrl.protocol.errors import ConfigError
from hybridrl.protocol.register import register
from hybridrl.protocol.transfer import THREE_D
from hybridrl.workers.base import RankContext
from hybridrl.workers.packed_model import ModelConfig, PackedValueModel, load_value_model
from hybridrl.workers.packing import MicroBatch
from hybridrl.workers.trained import TrainedWorker
from hybridrl.workers.trainer import OptimizerConfig, Trainer


@dataclass(frozen=True, slots=True)
class CriticConfig:
    """What a critic is made of."""

    model: ModelConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: ValueClip = field(default_factory=ValueClip)
    aggregation: Aggregation = "token-mean"
    max_tokens: int | None = None
    """The fixed length of "seq-mean-token-sum-norm": the most tokens that a response can have."""

    def __post_init__(self) -> None:
        if self.aggregation == "seq-mean-token-sum-norm" and self.max_tokens is None:
            raise ConfigError("aggregation 'seq-mean-token-sum-norm' needs max_tokens: give the rollout's max_new_tokens")


class Critic(TrainedWorker):
    """A language model's backbone with a value head."""

    config: CriticConfig

    def __init__(self, config: CriticConfig, context: RankContext) -> None:
        super().__init__(config, context)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed)  # the untrained head has to be the same on every rank
            self.values_of = PackedValueModel(load_value_model(config.model))
        self.trainer = Trainer(self.values_of, config.model, context, config.optimizer)

    @staticmethod
    def also_reads(config: CriticConfig, method: str) -> tuple[str, ...]:
        return config.loss.reads if method == "update" else ()

    @register(THREE_D, reads=("tokens", "response_mask"), writes=("values",), rowwise=True)
    def values(self, batch: Batch) -> dict[str, Tensor]:
        """The value of the state in which each response token is chosen."""
        return {"values": self.trainer.infer(batch, self._values)}

    @register(THREE_D, reads=("tokens", "response_mask"), updates_weights=True, balance="tokens")
    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step of the value loss on these rows. Returns metrics."""
        metrics = self.trainer.update(
            batch,
            lambda micro, _: self.config.loss(self._values(micro), micro.columns),
            self.config.aggregation,
            self.config.max_tokens,
        )
        return {f"critic/{name}": value for name, value in metrics.items()}

    def _values(self, micro: MicroBatch) -> Tensor:
        return self.trainer.root(micro.tokens_T, micro.rows, micro.index_S)
