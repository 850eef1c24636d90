"""The reward: a Python function, or a Hugging Face sequence-classification model, that scores finished responses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from hybridrl.protocol.batch import Batch, objects_of
from hybridrl.protocol.errors import ConfigError, ModelError
from hybridrl.protocol.register import register
from hybridrl.protocol.transfer import DP_PROTO
from hybridrl.rewards.function import load_reward, score
from hybridrl.workers.base import RankContext, Worker
from hybridrl.workers.packed_model import check_model


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Where scores come from: `function` or `model`, one of the two."""

    function: str = ""
    """package.module:name or path/to/file.py:name of f(prompts, completions, **columns) -> list of numbers."""
    model: str = ""
    """Folder of a sequence-classification model with one output, asked for prompt + response."""

    @property
    def label(self) -> str:
        """What a score means, in words: "exact match" for a function of that name."""
        return self.function.rpartition(":")[2].replace("_", " ") or "reward"


@dataclass(frozen=True, slots=True)
class RewardWorkerConfig:
    """A reward, and the tokenizer that turns the policy's tokens into text."""

    reward: RewardConfig
    tokenizer_path: str

    def __post_init__(self) -> None:
        if bool(self.reward.function) == bool(self.reward.model):
            raise ConfigError("set one of reward.function and reward.model: it says where rewards come from")


class Reward(Worker):
    """Scores rows. `tokenizer_path` is the policy's: responses are judged as text."""

    def __init__(self, config: RewardWorkerConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
        self.scorer = (
            FunctionScorer(config.reward.function) if config.reward.function else ModelScorer(config.reward.model, context)
        )

    @register(DP_PROTO, reads=("tokens", "response_mask", "fields"), writes=("scores",), rowwise=True)
    def score(self, batch: Batch) -> dict[str, Tensor]:
        """(B,) float32: one score per row, from its text and its data line's fields."""
        prompts, completions = texts(batch, self.tokenizer)
        fields = objects_of(batch["fields"])
        return {"scores": torch.tensor(self.scorer.score(prompts, completions, fields), dtype=torch.float32)}


def texts(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """(prompts, completions) of rows of `tokens` and `response_mask`, special tokens left out of the completions."""
    tokens, masks = batch["tokens"].unbind(), batch["response_mask"].unbind()
    prompts = [t[~m].tolist() for t, m in zip(tokens, masks, strict=True)]
    completions = [t[m].tolist() for t, m in zip(tokens, masks, strict=True)]
    if not prompts:  # for which `batch_decode` would answer one empty text
        return [], []
    return tokenizer.batch_decode(prompts), tokenizer.batch_decode(completions, skip_special_tokens=True)


class FunctionScorer:
    """Scores from the user's function; every entry of the data line is a column."""

    def __init__(self, spec: str) -> None:
        self._name, self._function = spec, load_reward(spec)

    def score(self, prompts: list[str], completions: list[str], fields: list[dict[str, object]]) -> list[float]:
        if not prompts:
            return []
        names = dict.fromkeys(name for row in fields for name in row)
        columns = {name: [row.get(name) for row in fields] for name in names}
        return score(self._function, self._name, prompts, completions, columns)


_ROWS = 64


class ModelScorer:
    """Scores from a sequence-classification model, which reads the text with its own tokenizer, one batch at a time."""

    def __init__(self, path: str, context: RankContext) -> None:
        check_model(path)
        if not (Path(path) / "tokenizer_config.json").is_file():
            raise ConfigError(f"the reward model at '{path}' has no tokenizer; save one beside it")
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        model, report = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        self._model = model.to(context.device).eval()
        if report["missing_keys"]:
            raise ModelError(f"the model at '{path}' has no trained '{min(report['missing_keys'])}'; give a reward model")
        if self._model.config.num_labels != 1:
            raise ConfigError(f"the reward model at '{path}' has {self._model.config.num_labels} outputs; it needs one")
        if self._tokenizer.pad_token_id is None:
            raise ConfigError(f"the tokenizer of the reward model at '{path}' has no padding token; set pad_token beside it")
        # The score is read at the last token that is not padding: both have to mean the same token by it.
        self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def score(self, prompts: list[str], completions: list[str], fields: list[dict[str, object]]) -> list[float]:
        whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        begun = bool(whole and self._tokenizer.bos_token) and whole[0].startswith(self._tokenizer.bos_token)
        scores: list[float] = []
        for start in range(0, len(whole), _ROWS):
            rows = whole[start : start + _ROWS]
            part = self._tokenizer(rows, return_tensors="pt", padding=True, add_special_tokens=not begun).to(self._model.device)
            with torch.no_grad():
                logits = self._model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
            scores += logits.squeeze(-1).float().tolist()
        return scores
