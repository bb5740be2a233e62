"""The settings that bound what the control of a run decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from raydl.config import CheckpointConfig, ElasticConfig, TrainConfig
from raydl.core.method import Method


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Settings of a run, as its policies read them; see ``raydl.config`` for most of them."""

    is_sync: bool = True
    """Whether all workers exchange at once."""
    min_workers: int = 1
    max_workers: int = 1
    spares: int = 0
    spares_share: bool = False
    """Whether a spare that trains may share cores: it reserves no GPU, for example."""
    group_size: int = 1
    start_s: float = 600.0
    """The longest wait for workers (``scaling.start_timeout_s``)."""
    exchange_s: float = 60.0
    """The longest wait in an exchange (``exchange.timeout_s``)."""
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hands_over: bool = True
    """Whether a leaver's state is worth keeping. With rules that send weights each replica is
    distinct; otherwise it is a copy of the center, but the rule or the codec may keep something."""
    may_leave_out: bool = False
    """Whether compressed messages may leave something out for later ones."""
    is_scored_by_workers: bool = False
    is_in_process: bool = False
    """Whether the only worker runs in the driver's process."""

    @classmethod
    def of(cls, config: TrainConfig, method: Method) -> Limits:
        """Return the limits of a run."""
        scaling = config.scaling
        return cls(
            is_sync=method.is_sync,
            min_workers=max(1, scaling.min_workers),
            max_workers=max(1, scaling.max_workers),
            spares=scaling.spares,
            spares_share=scaling.spares > 0 and set(scaling.resources()) <= {"CPU"},
            group_size=config.method.group_size,
            start_s=scaling.start_timeout_s,
            exchange_s=config.exchange.timeout_s,
            elastic=config.elastic,
            checkpoint=config.checkpoint,
            hands_over=method.rule.ahead or bool(method.rule.keeps) or method.may_leave_out,
            may_leave_out=method.may_leave_out,
            is_scored_by_workers=config.evaluation.is_by_workers,
            is_in_process=scaling.max_workers == 0,
        )
