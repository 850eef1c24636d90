"""The native engine: continuous batching over a transformers model, its attention reading a preallocated key-value cache.

Requests sit in slots. A step feeds one token of every occupied slot and draws the next; a sample leaves as it finishes and a
waiting request takes its slot. A prompt is prefilled up to its last token, which the next step feeds as it feeds any other, so
there is one place where tokens are drawn. When samples run out, the rest move together and the batch shrinks with them; rows
of like length are kept together, so that a short one does not attend as far as the longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.parallel.attention import ATTENTION
from hybridrl.protocol.errors import ConfigError, DataError, ModelError, nearest
from hybridrl.rollout.engine import Request, Sample
from hybridrl.rollout.kv_cache import DecodeView, KeyValueCache, PrefillView, bucket, round_up
from hybridrl.rollout.slots import BLOCK, Slots

# The attended length is a multiple of this: 16 on average is attended in vain.
_LENGTH_STEP = 32
# Free slots are filled when they are one in this many. A prefill costs about a small step whatever it holds, and a free slot
# costs its share of each step that it waits; the sum is flat around here.
_REFILL_SHARE = 16


@dataclass(frozen=True, slots=True)
class NativeConfig:
    """`max_length`: prompt and response tokens of a sample at most. `max_batch`: samples decoded together.

    `prefill_tokens`: tokens of one prefill, each prompt counted as long as the longest beside it; a longer prompt goes alone.
    """

    max_length: int
    max_batch: int = 256
    prefill_tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("max_length", "max_batch", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")


class NativeEngine:
    """A `RolloutEngine` over `model`, a causal LM loaded with `attn_implementation=ATTENTION`, on its device and in its type.

    The model may share its parameters with a trainer, and then needs no `load_weights`. A sample depends on its own prompt,
    seed, sampling parameters and the weights, up to the rounding of the model's arithmetic, which may differ with the shape
    of the batch.
    """

    def __init__(self, model: PreTrainedModel, config: NativeConfig) -> None:
        _check_model(model, config)
        self._model = model.eval()
        self._config = config
        self._cache: KeyValueCache | None = None

    @property
    def cache_bytes(self) -> int:
        """What the cache holds between calls of `generate`."""
        return self._cache.nbytes if self._cache else 0

    def generate(self, requests: Iterable[Request]) -> Iterator[Sample]:
        """Draw every request; yield each sample as it finishes. Requests are taken from the iterable as slots become free.

        Raises DataError on a request that the model or `max_length` cannot hold, when it is taken from the iterable.
        """
        # The cache is taken, not borrowed: another `generate` that starts meanwhile makes its own.
        cache, self._cache = self._cache or KeyValueCache(), None
        rows = self._config.max_batch
        dtype = torch.promote_types(self._model.dtype, torch.float32)
        slots = Slots(rows, self._config.max_length, self._model.device, dtype)
        waiting, occupied, more = map(self._checked, requests), 0, True
        while more or occupied:
            free = rows - occupied
            if more and free * _REFILL_SHARE >= rows:
                fresh = list(islice(waiting, free))
                more = len(fresh) == free
                self._admit(cache, slots, fresh)
                occupied += len(fresh)
            if occupied:
                samples = self._step(cache, slots, occupied)
                occupied -= len(samples)
                yield from samples
        self._cache = cache

    def _checked(self, request: Request) -> Request:
        prompt, most = request.prompt, request.sampling.max_new_tokens
        if not prompt:
            raise DataError(
                f"request {request.index}: the prompt is empty; give it at least one token, such as the model's BOS"
            )
        if len(prompt) + most > self._config.max_length:
            raise DataError(
                f"request {request.index}: prompt ({len(prompt)} tokens) and max_new_tokens ({most}) exceed the engine's "
                f"max_length {self._config.max_length}; raise max_length, or shorten the prompt or the response"
            )
        vocabulary = self._model.config.get_text_config().vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise DataError(
                f"request {request.index}: prompt token ids must lie in 0..{vocabulary - 1}; use the model's own tokenizer"
            )
        return request

    @torch.inference_mode()
    def _admit(self, cache: KeyValueCache, slots: Slots, requests: list[Request]) -> None:
        """Seat the requests and fill the cache with their prompts, all but the last tokens."""
        if not requests:
            return
        self._arrange(cache, slots)
        requests = sorted(requests, key=lambda request: -len(request.prompt))
        rows = slots.admit(requests)
        length = max(len(request.prompt) + request.sampling.max_new_tokens for request in requests)
        cache.reserve(self._batch_rows(max(rows) + 1), round_up(length, _LENGTH_STEP))
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, request in zip(rows, requests, strict=True):
            rows_of.setdefault(tuple(request.prompt[:-1]), []).append(row)
        contexts = sorted((context for context in rows_of if context), key=len)
        for group in _groups(contexts, self._config.prefill_tokens):
            view = PrefillView(cache, group, [rows_of[context] for context in group], self._model.device)
            self._model.base_model(view.tokens_1T, position_ids=view.positions_1T, view=view, use_cache=False)

    @torch.inference_mode()
    def _step(self, cache: KeyValueCache, slots: Slots, occupied: int) -> list[Sample]:
        """Feed and draw one token of every row -> the samples that finish by it."""
        if self._batch_rows(occupied) < self._batch_rows(slots.extent):
            self._arrange(cache, slots)
        rows = self._batch_rows(slots.extent)
        position_B = slots.position_B[:rows]
        view = DecodeView(cache, position_B, _segments(slots.longest(), rows), self._model.dtype)
        output = self._model(slots.token_B[:rows, None], position_ids=position_B[:, None], view=view, use_cache=False)
        return slots.advance(output.logits[:, 0])

    def _arrange(self, cache: KeyValueCache, slots: Slots) -> None:
        cache.move(*slots.arrange(), max(slots.longest()))

    def _batch_rows(self, rows: int) -> int:
        return min(bucket(rows), self._config.max_batch)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy new weights into the model's, converted to their type, one tensor at a time.

        Raises ModelError on a name or shape that the model does not have, and, at the end, on weights that never came; the
        weights before the error have been copied. Of names that share a tensor (a tied head), one is enough.
        """
        own = self._model.state_dict(keep_vars=True)
        loaded: set[int] = set()
        for name, tensor in weights:
            if name not in own:
                raise ModelError(f"the rollout model has no weight '{name}'{nearest(name, own)}")
            if own[name].shape != tensor.shape:
                raise ModelError(
                    f"weight '{name}' has shape {tuple(tensor.shape)}, the rollout model's {tuple(own[name].shape)}"
                )
            own[name].copy_(tensor)
            loaded.add(id(own[name]))
        missing = [name for name, tensor in own.items() if id(tensor) not in loaded]
        if missing:
            raise ModelError(
                f"{len(missing)} of the rollout model's weights did not come, '{missing[0]}' among them; send them all"
            )

    def release(self) -> None:
        """Free the cache. The next `generate` allocates it anew."""
        self._cache = None

    def close(self) -> None:
        """Free what the engine holds beside the model, which is the caller's."""
        self.release()


def _check_model(model: PreTrainedModel, config: NativeConfig) -> None:
    text = model.config.get_text_config()
    if text._attn_implementation != ATTENTION:
        raise ModelError(
            f"the native engine needs a model loaded with attn_implementation='{ATTENTION}', not '{text._attn_implementation}'"
        )
    window = getattr(text, "sliding_window", None)
    if window is not None and window < config.max_length:
        raise ModelError(
            f"the model attends to a sliding window of {window} tokens, which the native engine does not; "
            f"set max_length ({config.max_length}) to {window} or less, or use the vllm engine"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and positions < config.max_length:
        raise ConfigError(f"max_length {config.max_length} exceeds the {positions} positions of the model; lower max_length")


def _segments(longest: list[int], rows: int) -> list[tuple[slice, int]]:
    """The blocks' first `rows` rows cut where the length to attend changes much: neighbours a quarter apart go together."""
    segments: list[tuple[slice, int]] = []
    for block in range(-(-rows // BLOCK)):
        length = round_up(max(longest[block], 1), _LENGTH_STEP)
        ends = slice(block * BLOCK, min((block + 1) * BLOCK, rows))
        if segments and 4 * min(length, segments[-1][1]) >= 3 * max(length, segments[-1][1]):
            before, other = segments.pop()
            ends, length = slice(before.start, ends.stop), max(length, other)
        segments.append((ends, length))
    return segments


def _groups(contexts: list[tuple[int, ...]], most: int) -> Iterator[list[tuple[int, ...]]]:
    """Contexts, shortest first, cut so that number x longest is at most `most`; one that is longer stands alone."""
    group: list[tuple[int, ...]] = []
    for context in contexts:
        if group and (len(group) + 1) * len(context) > most:
            yield group
            group = []
        group.append(context)
    if group:
        yield group
