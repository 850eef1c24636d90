"""What every worker that trains a model can do with it: save, load, export."""

from __future__ import annotations

from pathlib import Path

from hybridrl.protocol.register import register
from hybridrl.protocol.transfer import ONE_TO_ALL
from hybridrl.workers.base import Worker
from hybridrl.workers.trainer import Trainer


class TrainedWorker(Worker):
    """A worker with a `trainer`. `version` counts the changes of its weights."""

    trainer: Trainer
    version: int = 0

    @register(ONE_TO_ALL)
    def save(self, folder: Path) -> None:
        """Write weights (Hugging Face form) and training state to `folder`."""
        self.trainer.save(folder)

    @register(ONE_TO_ALL, updates_weights=True)
    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, under this layout or another."""
        self.trainer.load(folder)
        self.version += 1

    @register(ONE_TO_ALL)
    def export(self, folder: Path) -> None:
        """Write the weights alone, as a Hugging Face model with its tokenizer."""
        self.trainer.export(folder)
        self.context.barrier()
