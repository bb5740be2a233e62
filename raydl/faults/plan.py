"""The plan of faults: a YAML file, checked as a whole before any actor starts.

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

from raydl.errors import ConfigError

KINDS: dict[str, dict[str, bool]] = {
    "kill": {},
    "stop": {"for_s": False},
    "slow": {"by_s": True, "for_s": False},
    "drain": {"for_s": True},
    "partition": {"for_s": True},
}
"""The faults, and which times each takes: True where it can not do without."""

CENTER_KINDS = ("kill", "stop")
"""The faults of the center and its shards."""

_SETTING = "run.fault_plan"
_PLAN_KEYS = ("seed", "faults")
_FAULT_KEYS = ("fault", "target", "at", "for_s", "by_s")
_TARGETS = "w1, rank 0, any, center or shard 1"
_MOMENTS = "step N, round N (whole numbers from 0) or second S (above 0)"
_LONGEST_S = 86400
_DRAWS = 2**31


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once."""

    number: int
    """Its place in the plan, counted from 0; in all that users read, from 1."""
    kind: str
    """kill, stop, slow, drain or partition."""
    target: str
    """``w1``, ``rank 0``, ``any``, ``center`` or ``shard 1``."""
    when: str
    """The unit of ``at``: step, round or second."""
    at: float
    """Local steps of the target, rounds of the run, or seconds of training."""
    for_s: float | None = None
    """How long it lasts, in seconds; None: until the process ends."""
    by_s: float | None = None
    """How much longer a local step takes, in seconds; slow only."""
    draw: int = 0
    """For ``any``: modulo the number of workers it is the rank."""

    @property
    def sentence(self) -> str:
        """The fault in words, for the log: ``fault 2: stop rank 0 at round 90 for 8 s``."""
        by = "" if self.by_s is None else f" by {_plain(self.by_s)} s"
        lasts = "" if self.for_s is None else f" for {_plain(self.for_s)} s"
        moment = f"{self.when} {_plain(self.at)}"
        return f"fault {self.number + 1}: {self.kind} {self.target} at {moment}{by}{lasts}"

    @property
    def is_for_worker(self) -> bool:
        """Whether a worker is its target, rather than the center or a shard."""
        return not self.target.startswith(("center", "shard"))

    def hits(self, name: str, *, rank: int, num_workers: int) -> bool:
        """Tell whether it is meant for this process.

        Args:
            name: ``w1``, ``center`` or ``shard 1``.
            rank: of the worker; -1 for center and shards.
            num_workers: how many train now.
        """
        if self.target == "any":
            return rank == self.draw % num_workers
        return self.target in (name, f"rank {rank}")

    def is_due(self, before: float | None, now: float) -> bool:
        """Tell whether its moment has come since the last look.

        A step must be met exactly, so that a worker that starts later, further on, is left
        alone. Rounds and seconds may pass by in one go.

        Args:
            before: the count at the last look; None: this is the first.
            now: the count.
        """
        has_passed = self.when != "step" and before is not None and before < self.at < now
        return has_passed or now == self.at


@dataclass(frozen=True)
class FaultPlan:
    """All faults of a run, in the order of the file."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def read(cls, path: str) -> FaultPlan:
        """Read a plan.

        Raises:
            ConfigError: the file can not be read, or something in it is wrong.
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
        # Every fault draws, needed or not: a change to one leaves the others' ranks alone.
        draws = random.Random(seed)
        return cls(
            tuple(_fault(i, entry, draws.randrange(_DRAWS)) for i, entry in enumerate(entries))
        )

    @property
    def for_workers(self) -> tuple[Fault, ...]:
        """The faults of workers."""
        return tuple(f for f in self.faults if f.is_for_worker)

    @property
    def for_center(self) -> tuple[Fault, ...]:
        """The faults of the center and its shards."""
        return tuple(f for f in self.faults if not f.is_for_worker)

    def check(self, *, max_workers: int, num_shards: int) -> None:
        """Refuse a target that this run can not have.

        Args:
            max_workers: the most workers that train; 0: all is in the user's own process.
            num_shards: how many shards the center has, the center itself counted.

        Raises:
            ConfigError: names the fault.
        """
        if max_workers == 0:
            raise ConfigError(
                _SETTING,
                "needs workers in processes of their own: scaling.num_workers of 1 or more, got 0",
            )
        for fault in self.faults:
            word, _, count = fault.target.partition(" ")
            if word == "rank" and int(count) >= max_workers:
                raise _wrong(
                    fault.number,
                    f"target must be a rank below {max_workers}, the most of scaling.num_workers, "
                    f"got {fault.target!r}",
                )
            if word == "shard" and int(count) >= num_shards:
                raise _wrong(
                    fault.number,
                    f"target must be a shard below {num_shards}, which is exchange.center_shards, "
                    f"got {fault.target!r}",
                )


def _load(path: str) -> object:
    """Return the content of a YAML file as plain values."""
    import yaml  # not at the top: a run without a plan does without it

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(_SETTING, f"can not read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or no such date
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else path
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(_SETTING, f"is no YAML: {where}: {problem}") from error


def _refuse_repeated_keys(root: Any) -> None:
    """Find a key written twice, as by a forgotten dash: YAML itself keeps the last one.

    Args:
        root: the composed node of the file; None for an empty one.
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
                    f"each fault begins with a dash of its own",
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
    if target == "center" or target.startswith("shard"):
        _check_center(number, kind, target, entry["at"])
    for_s, by_s = (_duration(number, kind, key, entry.get(key)) for key in ("for_s", "by_s"))
    return Fault(number, kind, target, when, at, for_s, by_s, draw if target == "any" else 0)


def _check_center(number: int, kind: str, target: str, at: str) -> None:
    if kind not in CENTER_KINDS:
        raise _wrong(
            number, f"fault must be {_or(CENTER_KINDS)} where the target is {target}, got {kind!r}"
        )
    if at.strip().startswith("step"):
        raise _wrong(
            number,
            f"at must be round N or second S where the target is {target}, which takes no "
            f"steps, got {at!r}",
        )


def _target(number: int, value: object) -> str:
    """Return the target as it is known inside: shard 0 is the center itself."""
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
    takes = KINDS[kind]
    if value is None and not takes.get(key, False):
        return None
    if key not in takes:
        those = _or(name for name, keys in KINDS.items() if key in keys)
        raise _wrong(number, f"{key} is only for {those}; {kind} has none, got {_got(value)}")
    if _is_number(value) and 0 < value <= _LONGEST_S:
        return float(value)
    raise _wrong(number, f"{key} must be in (0, {_LONGEST_S}] seconds, got {_got(value)}")


def _wrong(number: int, problem: str) -> ConfigError:
    return ConfigError(_SETTING, f"fault {number + 1}: {problem}")


def _no_such_key(unknown: list[str], known: tuple[str, ...]) -> str:
    return f"has no key {', '.join(unknown)}; known: {', '.join(known)}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _got(value: object) -> str:
    return "nothing" if value is None else repr(value)


def _or(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else str(last)


def _plain(value: float) -> str:
    """Return a number as users write it: 8 rather than 8.0."""
    return f"{value:.15g}"
