"""The fault plan: a YAML file that is checked completely before any actor starts.

    seed: 7
    faults:
      - {fault: stop, target: rank 0, at: round 90, for_s: 8}

``docs/faults.md`` explains every key.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from raydl.config.run import BAD_MESSAGES
from raydl.errors import ConfigError

KINDS: dict[str, dict[str, bool]] = {
    "kill": {},
    "stop": {"for_s": False},
    "slow": {"by_s": True, "for_s": False},
    "drain": {"for_s": True},
    "partition": {"for_s": True},
    **{f"send_{kind}": {"for_s": False} for kind in BAD_MESSAGES},
}
"""The kinds of faults with the durations of each: True if required, False if optional."""

_CENTER_KINDS = ("kill", "stop")
"""The kinds of faults that the center and its shards may have."""
_SETTING = "run.fault_plan"
_PLAN_KEYS = ("seed", "faults")
_FAULT_KEYS = ("fault", "target", "at", "for_s", "by_s")
_TARGETS = "w1, rank 0, any, center or shard 1"
_MOMENTS = "step N, round N (whole numbers from 0) or second S (above 0)"
_LONGEST_S = 86400


@dataclass(frozen=True)
class Fault:
    """One fault, which fires once."""

    number: int
    """Position in the plan, counted from 0; in messages for users, from 1."""
    kind: str
    """kill, stop, slow, drain, partition, send_nan, send_zeros or send_reversed."""
    target: str
    """``w1``, ``rank 0``, ``any``, ``center`` or ``shard 1``."""
    when: str
    """The unit of ``at``: step, round or second."""
    at: float
    """Local steps of the target, rounds of the run, or seconds of training."""
    for_s: float | None = None
    """Duration in seconds, or None until the process ends."""
    by_s: float | None = None
    """Delay of each local step, in seconds; for ``slow`` only."""
    draw: int = 0
    """Random number for the target ``any``: its rank is this modulo the number of workers."""

    @property
    def sentence(self) -> str:
        """The fault as text for the log: ``fault 2: stop rank 0 at round 90 for 8 s``."""
        by = "" if self.by_s is None else f" by {_plain(self.by_s)} s"
        lasts = "" if self.for_s is None else f" for {_plain(self.for_s)} s"
        moment = f"{self.when} {_plain(self.at)}"
        return f"fault {self.number + 1}: {self.kind} {self.target} at {moment}{by}{lasts}"

    @property
    def is_for_worker(self) -> bool:
        """Whether the target is a worker, rather than the center or a shard."""
        return not self.target.startswith(("center", "shard"))

    def hits(self, name: str, *, rank: int, num_workers: int) -> bool:
        """Whether a process is the target.

        Args:
            name: ``w1``, ``center`` or ``shard 1``.
            rank: the rank of the worker; -1 for center and shards.
            num_workers: number of workers that train now.
        """
        if self.target == "any":
            return rank == self.draw % num_workers
        return self.target in (name, f"rank {rank}")

    def is_due(self, before: float | None, now: float) -> bool:
        """Whether the fault became due since the last check.

        A step must match exactly, so that the fault does not hit a worker which starts at a
        later step. Rounds and seconds may be skipped between two checks.

        Args:
            before: the count at the last check, or None at the first check.
            now: the count.
        """
        is_past = self.when != "step" and before is not None and before < self.at < now
        return is_past or now == self.at


@dataclass(frozen=True)
class FaultPlan:
    """All faults of a run, in the order of the file."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def read(cls, path: str) -> FaultPlan:
        """Read a plan from a file.

        Raises:
            ConfigError: the file cannot be read, or its content is not valid.
        """
        content = _load(path)
        if not isinstance(content, dict):
            raise ConfigError(
                _SETTING, f"must be a mapping of seed and faults, got {_got(content)} in {path}"
            )
        unknown = [str(key) for key in content if key not in _PLAN_KEYS]
        if unknown:
            raise ConfigError(_SETTING, _no_such_key(unknown, _PLAN_KEYS))
        seed, entries = content.get("seed", 0), content.get("faults")
        if type(seed) is not int or seed < 0:
            raise ConfigError(_SETTING, f"seed must be a whole number from 0, got {_got(seed)}")
        if not isinstance(entries, list) or not entries:
            raise ConfigError(
                _SETTING, f"faults must be a list of at least one fault, got {_got(entries)}"
            )
        # Each fault draws a number, so that a change to one does not change the ranks of others.
        draws = random.Random(seed)
        return cls(
            tuple(_fault(i, entry, draws.randrange(2**31)) for i, entry in enumerate(entries))
        )

    def with_bad_workers(self, share: float, kind: str, *, num_workers: int) -> FaultPlan:
        """Return the plan and, from the first step on, workers that send bad messages.

        They are those of the last ranks, at least one: rank 0 has further duties.

        Args:
            share: share of bad workers, in (0, 1].
            kind: what they send, one of ``raydl.config.run.BAD_MESSAGES``.
            num_workers: workers that train at least.
        """
        count = num_bad_workers(share, num_workers)
        bad = (
            Fault(len(self.faults) + number, f"send_{kind}", f"rank {rank}", "step", 0.0)
            for number, rank in enumerate(range(num_workers - count, num_workers))
        )
        return FaultPlan((*self.faults, *bad))

    @property
    def for_workers(self) -> tuple[Fault, ...]:
        """The faults of workers."""
        return tuple(f for f in self.faults if f.is_for_worker)

    @property
    def for_center(self) -> tuple[Fault, ...]:
        """The faults of the center and its shards."""
        return tuple(f for f in self.faults if not f.is_for_worker)

    def check(self, *, max_workers: int, num_shards: int) -> None:
        """Refuse a target that this run cannot have.

        Args:
            max_workers: upper limit of workers; 0 if the run is in the user's own process.
            num_shards: number of shards of the center, including the center itself.

        Raises:
            ConfigError: a fault has such a target.
        """
        if max_workers == 0:
            raise ConfigError(
                _SETTING,
                "needs workers in processes of their own: scaling.num_workers of 1 or more, got 0",
            )
        limits = {
            "rank": (max_workers, "the upper limit of scaling.num_workers"),
            "shard": (num_shards, "which is exchange.center_shards"),
        }
        for fault in self.faults:
            word, _, count = fault.target.partition(" ")
            if word in limits and int(count) >= limits[word][0]:
                limit, setting = limits[word]
                problem = f"target must be a {word} below {limit}, {setting}, got {fault.target!r}"
                raise _wrong(fault.number, problem)


def num_bad_workers(share: float, num_workers: int) -> int:
    """Return the number of bad workers, at least one."""
    return max(1, round(share * num_workers))


def _load(path: str) -> object:
    """Return the content of a YAML file as plain values."""
    import yaml  # not at the top: only a run with a plan needs it

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(_SETTING, f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or an invalid date
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else path
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(_SETTING, f"is not valid YAML: {where}: {problem}") from error


def _refuse_repeated_keys(root: Any) -> None:
    """Refuse a key written twice, as after a missing dash: YAML itself keeps the last value.

    Args:
        root: the composed node of the file, or None for an empty file.
    """
    if root is None or root.id != "mapping":
        return
    lists = [value for _, value in root.value if value.id == "sequence"]
    for mapping in [root, *(n for nodes in lists for n in nodes.value if n.id == "mapping")]:
        keys = [key.value for key, _ in mapping.value if key.id == "scalar"]
        for key in keys:
            if keys.count(key) > 1:
                line = mapping.start_mark.line + 1
                raise ConfigError(
                    _SETTING,
                    f"has {key} {keys.count(key)} times in the mapping of line {line}; "
                    f"begin each fault with a dash of its own",
                )


def _fault(number: int, entry: object, draw: int) -> Fault:
    if not isinstance(entry, dict):
        raise _wrong(number, f"must be a mapping of {', '.join(_FAULT_KEYS)}, got {_got(entry)}")
    unknown = [str(key) for key in entry if key not in _FAULT_KEYS]
    if unknown:
        raise _wrong(number, _no_such_key(unknown, _FAULT_KEYS))
    kind = entry.get("fault")
    if not isinstance(kind, str) or kind not in KINDS:
        raise _wrong(number, f"fault must be {_or(KINDS)}, got {_got(kind)}")
    target = _target(number, entry.get("target"))
    when, at = _moment(number, entry.get("at"))
    if target.startswith(("center", "shard")):
        if kind not in _CENTER_KINDS:
            problem = f"fault must be {_or(_CENTER_KINDS)} if the target is {target}, got {kind!r}"
            raise _wrong(number, problem)
        if when == "step":
            raise _wrong(
                number,
                f"at must be round N or second S if the target is {target}, which takes no steps, "
                f"got {entry['at']!r}",
            )
    for_s, by_s = (_duration(number, kind, key, entry.get(key)) for key in ("for_s", "by_s"))
    return Fault(number, kind, target, when, at, for_s, by_s, draw if target == "any" else 0)


def _target(number: int, value: object) -> str:
    """Return the normalized target: shard 0 is the center itself."""
    match = re.fullmatch(r"(any|center)|(w|rank +|shard +)([0-9]{1,9})", str(value).strip())
    if not isinstance(value, str) or match is None:
        raise _wrong(number, f"target must be {_TARGETS}, got {_got(value)}")
    name, word, count = match.groups()
    if name:
        return str(name)
    target = f"{word.strip()}{'' if word == 'w' else ' '}{int(count)}"
    return "center" if target == "shard 0" else target


def _moment(number: int, value: object) -> tuple[str, float]:
    match = re.fullmatch(
        r"(step|round) +([0-9]{1,15})|(second) +([0-9]{1,15}(?:\.[0-9]+)?)", str(value).strip()
    )
    if isinstance(value, str) and match is not None:
        when, at = (group for group in match.groups() if group is not None)
        if when != "second" or float(at) > 0:
            return when, float(at)
    raise _wrong(number, f"at must be {_MOMENTS}, got {_got(value)}")


def _duration(number: int, kind: str, key: str, value: Any) -> float | None:
    durations = KINDS[kind]
    if value is None and not durations.get(key, False):
        return None
    if key not in durations:
        kinds = _or(name for name, keys in KINDS.items() if key in keys)
        raise _wrong(number, f"{key} is only for {kinds}; {kind} has none, got {_got(value)}")
    if type(value) in (int, float) and 0 < value <= _LONGEST_S:  # a bool is no duration
        return float(value)
    raise _wrong(number, f"{key} must be in (0, {_LONGEST_S}] seconds, got {_got(value)}")


def _wrong(number: int, problem: str) -> ConfigError:
    return ConfigError(_SETTING, f"fault {number + 1}: {problem}")


def _no_such_key(unknown: list[str], known: tuple[str, ...]) -> str:
    return f"has no key {', '.join(unknown)}; known: {', '.join(known)}"


def _got(value: object) -> str:
    return "nothing" if value is None else repr(value)


def _or(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else str(last)


def _plain(value: float) -> str:
    """Return a number as users write it: 8, not 8.0."""
    return f"{value:.15g}"
