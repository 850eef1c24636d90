"""Layout: how the ranks of a worker group share one model and one batch, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """`pp` pipeline stages x `dp` data ranks x `tp` tensor-parallel ranks.

    Ranks are numbered with tensor-parallel neighbours adjacent and pipeline stages furthest apart (HybridFlow, Figure 8):
    `rank = (p * dp + d) * tp + t`. `gen_pp` and `gen_tp` are the sizes used for generation on the same ranks; each training
    replica of `pp * tp` shards then holds `micro_dp = pp * tp / (gen_pp * gen_tp)` generation replicas (HybridFlow, section
    5).
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    gen_pp: int = 1
    gen_tp: int = 1

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp", "gen_pp", "gen_tp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"layout {self}: {name} must be at least 1, not {getattr(self, name)}")
        if self.pp % self.gen_pp or self.tp % self.gen_tp:
            raise ConfigError(
                f"layout {self}: generation sizes gen_pp={self.gen_pp} and gen_tp={self.gen_tp} "
                f"must divide pp={self.pp} and tp={self.tp}"
            )

    def __str__(self) -> str:
        return f"pp{self.pp}dp{self.dp}tp{self.tp}"

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def micro_dp(self) -> int:
        """Generation replicas per training replica."""
        return (self.pp // self.gen_pp) * (self.tp // self.gen_tp)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(p, d, t) of a rank."""
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def rank(self, p: int, d: int, t: int) -> int:
        return (p * self.dp + d) * self.tp + t

    def micro_dp_index(self, rank: int) -> int:
        """Which generation replica of its training replica a rank serves.

        Generation groups take ranks at the interval tp / gen_tp (and pp / gen_pp), so micro data-parallel groups are neighbours
        and a rank's generation shard contains its training shard.
        """
        p, _, t = self.coordinates(rank)
        tp_interval, pp_interval = self.tp // self.gen_tp, self.pp // self.gen_pp
        return (p % pp_interval) * tp_interval + t % tp_interval
