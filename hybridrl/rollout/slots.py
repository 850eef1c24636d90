"""The rows that the native engine decodes together: per-row state on the device, and the little the host must know.

Every occupied row advances by one token each step, so the host knows all lengths without asking; the one thing that it reads
back each step is which rows have finished. What a step draws after feeding the token at position p is kept in column p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.protocol.errors import ModelError
from hybridrl.rollout.engine import Request, Sample
from hybridrl.rollout.sampling import SamplingTable, uniforms

# Rows of a block attend together, to the length of the longest.
BLOCK = 32
_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class _Occupant:
    request: Request
    since: int  # the step count when it came

    @property
    def first(self) -> int:
        """The column of its first drawn token: that of the prompt's last."""
        return len(self.request.prompt) - 1


class Slots:
    """`rows` rows of up to `length` tokens, prompt included.

    `token_B` is what each row feeds next, at `position_B`; `last_B` is the position at which its last token is drawn. A free
    row stands still (`advance_B` 0) and never finishes; what it computes is nobody's.
    """

    def __init__(self, rows: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.token_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position_B = torch.zeros_like(self.token_B)
        self._advance_B = torch.zeros_like(self.token_B)
        self._last_B = torch.full_like(self.token_B, _NEVER)
        self._stop_BS = torch.full((rows, 1), -1, device=device)
        self._uniform_BM = torch.zeros(rows, length, dtype=torch.float64, device=device)
        self._tokens_BM = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self._log_probs_BM = torch.zeros(rows, length, dtype=dtype, device=device)
        self._sampling = SamplingTable(rows, device)
        self._occupants: dict[int, _Occupant] = {}
        self._steps = 0

    @property
    def extent(self) -> int:
        """Rows up to the last occupied one."""
        return max(self._occupants) + 1

    def longest(self) -> list[int]:
        """Of every block of rows, the tokens of its longest row, the one that it feeds next included; 0 when it is empty."""
        longest = [0] * -(-len(self.token_B) // BLOCK)
        for row, occupant in self._occupants.items():
            longest[row // BLOCK] = max(longest[row // BLOCK], self._length(occupant))
        return longest

    def _length(self, occupant: _Occupant) -> int:
        return len(occupant.request.prompt) + self._steps - occupant.since

    def admit(self, requests: list[Request]) -> list[int]:
        """Seat requests in free rows, lowest first -> their rows."""
        rows = [row for row in range(len(self.token_B)) if row not in self._occupants][: len(requests)]
        device = self.token_B.device
        row_N = torch.tensor(rows, device=device)
        for row, request in zip(rows, requests, strict=True):
            self._occupants[row] = _Occupant(request, self._steps)
        params = [request.sampling for request in requests]
        first_N = torch.tensor([len(r.prompt) - 1 for r in requests], device=device)
        most = torch.tensor([p.max_new_tokens for p in params], device=device)
        self.token_B[row_N] = torch.tensor([r.prompt[-1] for r in requests], device=device)
        self.position_B[row_N] = first_N
        self._advance_B[row_N] = 1
        self._last_B[row_N] = first_N + most - 1
        self._put_stops(row_N, [p.stop_token_ids for p in params])
        columns = torch.arange(max(len(r.prompt) + r.sampling.max_new_tokens for r in requests), device=device)
        self._uniform_BM[row_N, : len(columns)] = uniforms([p.seed for p in params], columns - first_N[:, None])
        self._sampling.put(row_N, params)
        return rows

    def _put_stops(self, row_N: Tensor, stops: list[tuple[int, ...]]) -> None:
        missing = max(len(stop) for stop in stops) - self._stop_BS.shape[1]
        if missing > 0:
            self._stop_BS = torch.nn.functional.pad(self._stop_BS, (0, missing), value=-1)
        width = self._stop_BS.shape[1]
        padded = [(*stop, *[-1] * (width - len(stop))) for stop in stops]
        self._stop_BS[row_N] = torch.tensor(padded, device=self._stop_BS.device)

    def advance(self, logits_BV: Tensor) -> list[Sample]:
        """Draw a token for each of the first B rows, and free the rows that finish by it -> their samples."""
        rows = len(logits_BV)
        token_B, position_B = self.token_B[:rows], self.position_B[:rows]
        column_B1 = position_B[:, None]
        drawn_B, log_prob_B = self._sampling.draw(logits_BV, self._uniform_BM[:rows].gather(1, column_B1)[:, 0])
        token_B.copy_(drawn_B)
        self._tokens_BM[:rows].scatter_(1, column_B1, token_B[:, None])
        self._log_probs_BM[:rows].scatter_(1, column_B1, log_prob_B[:, None])
        finished_B = (token_B[:, None] == self._stop_BS[:rows]).any(1) | (position_B >= self._last_B[:rows])
        position_B += self._advance_B[:rows]
        self._steps += 1
        finished = finished_B.nonzero().flatten().tolist()
        return self._take(finished) if finished else []

    def _take(self, rows: list[int]) -> list[Sample]:
        occupants = [self._occupants[row] for row in rows]
        counts = [self._steps - occupant.since for occupant in occupants]
        device = self.token_B.device
        row_N = torch.tensor(rows, device=device)
        first_N = torch.tensor([occupant.first for occupant in occupants], device=device)
        column_NM = first_N[:, None] + torch.arange(max(counts), device=device)
        column_NM.clamp_(max=self._tokens_BM.shape[1] - 1)
        tokens = self._tokens_BM[row_N[:, None], column_NM].tolist()
        log_probs = self._log_probs_BM[row_N[:, None], column_NM].tolist()
        self._vacate(rows)
        return [_sample(o.request, t[:n], p[:n]) for o, n, t, p in zip(occupants, counts, tokens, log_probs, strict=True)]

    def _vacate(self, rows: list[int]) -> None:
        row_N = torch.tensor(rows, dtype=torch.int64, device=self.token_B.device)
        self._advance_B[row_N] = 0
        self._last_B[row_N] = _NEVER
        self._stop_BS[row_N] = -1
        for row in rows:
            del self._occupants[row]

    def arrange(self) -> tuple[Tensor, Tensor]:
        """Close the holes and order the blocks by length, longest first -> (from, to) of the rows that moved.

        Rows are in no order within a block, so a hole costs one move a block, not one a row.
        """
        count = len(self._occupants)
        order = sorted(self._occupants, key=lambda row: -self._length(self._occupants[row]))
        staying = {row for rank, row in enumerate(order) if row < count and row // BLOCK == rank // BLOCK}
        moved = [row for row in order if row not in staying]
        holes = [row for row in range(count) if row not in staying]
        source_N, target_N = (torch.tensor(rows, dtype=torch.int64, device=self.token_B.device) for rows in (moved, holes))
        own = [self.token_B, self.position_B, self._advance_B, self._last_B, self._stop_BS]
        for tensor in [*own, self._uniform_BM, self._tokens_BM, self._log_probs_BM, *self._sampling.tensors()]:
            tensor[target_N] = tensor[source_N]
        self._occupants |= dict(zip(holes, [self._occupants[row] for row in moved], strict=True))
        self._vacate([row for row in self._occupants if row >= count])
        return source_N, target_N


def _sample(request: Request, tokens: list[int], log_probs: list[float]) -> Sample:
    if any(log_prob != log_prob for log_prob in log_probs):
        raise ModelError(
            f"request {request.index}: the model's logits are NaN; its weights are not finite or overflow their type"
        )
    stopped = tokens[-1] in request.sampling.stop_token_ids
    return Sample(request.index, tokens, log_probs, "stop" if stopped else "length")
