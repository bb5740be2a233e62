"""The sections of the page of one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, TypeVar

from raydl.metrics import TAGS, TIME_PARTS
from raydl.metrics.charts import bar_in_page, words
from raydl.metrics.tags import STACK
from raydl.text import clock_text
from raydl.tools.report.curves import charts_of_workers, worker_ids
from raydl.tools.report.facts import RunFacts, number, plain
from raydl.tools.report.html import Html, element, folded, swatch, table

_NONE = "-"
_Row = TypeVar("_Row")
_FOLDED_FROM = 12
"""A table of more workers is folded away."""
_MANY = 60
"""And so is one of more generations."""
_MOST_ROWS = 1000
"""Of longer tables the middle is left out: a run of days may have thousands of generations."""


def written(value: object, pattern: str) -> str:
    """Return a number in a format, or a dash for any other value."""
    found = number(value)
    return _NONE if found is None else pattern.format(found)


def duration(value: object) -> str:
    """Return seconds as a person reads them: ``4.9 s``, ``2:03 min``, ``1:02:03 h``."""
    seconds = number(value)
    if seconds is None:
        return _NONE
    if round(seconds, 1) < 100:
        return f"{seconds:.1f} s"
    unit = "h" if round(seconds) >= 3600 else "min"  # rounded first: 3599.6 s are an hour
    return f"{clock_text(seconds, is_short=True)} {unit}"


def byte_size(value: object) -> str:
    """Return bytes with a fitting unit, decimal."""
    size = number(value)
    if size is None:
        return _NONE
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= limit:
            return f"{size / limit:.3g} {unit}"
    return f"{size:.0f} bytes"


def subtitle(run: RunFacts) -> str:
    """Return method, model and data in one line."""
    names = (run.setting(name) for name in ("method.name", "model", "data"))
    return "{} · {} · {}".format(*names)


def most_workers(run: RunFacts) -> str:
    """Return the fewest and the most workers that trained, or what was asked for."""
    counts = [round(v) for v in run.curve("workers/count").values]
    if not counts:
        return f"{run.setting('scaling.num_workers')} asked for"
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def headline(run: RunFacts) -> Html:
    """Return the figures that a reader looks for first."""
    num_generations = len({g.number for g in run.generations})
    tiles: list[tuple[str, object, str | None]] = [
        _score(run),
        *_best(run),
        ("Samples", written(run.figure("samples"), "{:,.0f}"), _epochs(run)),
        (
            "Training time",
            duration(run.figure("seconds")),
            written(speed(run), "{:,.0f} samples/s"),
        ),
        ("Workers", most_workers(run), counted(num_generations, "generation")),
        ("Ended", run.ending, _resumed(run)),
    ]
    shown = [
        element("div", element("dt", name),
                element("dd", value, element("small", more) if more else None,
                        class_="long" if len(str(value)) > 16 else None))
        for name, value, more in tiles
    ]  # fmt: skip
    return element("dl", *shown, class_="tiles")


def _score(run: RunFacts) -> tuple[str, object, str | None]:
    """Return the center's accuracy with its loss, or the loss alone of a task without accuracy."""
    accuracy, loss = run.figure("center_accuracy"), number(run.figure("center_loss"))
    if accuracy is None and loss is not None:
        return "Center loss", written(loss, "{:.4g}"), None
    more = None if loss is None else written(loss, "loss {:.4g}")
    return "Center accuracy", written(accuracy, "{:.2%}"), more


def _best(run: RunFacts) -> list[tuple[str, object, str | None]]:
    """Return the score of the center that was kept as the best, if one was."""
    best = run.result.get("best")
    if not isinstance(best, dict):
        return []
    after = written(best.get("samples"), "after {:,.0f} samples")
    if "accuracy" in best:
        return [("Best center accuracy", written(best["accuracy"], "{:.2%}"), after)]
    return [("Best center loss", written(best.get("loss"), "{:.4g}"), after)]


def _epochs(run: RunFacts) -> str | None:
    epochs = run.curve("train/epoch").values
    return f"{epochs[-1]:.1f} epochs" if epochs else None


def _resumed(run: RunFacts) -> str | None:
    again = run.history.num_starts - 1
    return f"resumed {again} times" if again > 1 else "resumed once" if again == 1 else None


def counted(count: int, what: str) -> str | None:
    """Return ``3 generations``, ``1 generation``; None for none."""
    return f"{count} {what}{'s' if count > 1 else ''}" if count else None


def speed(run: RunFacts) -> float | None:
    """Return the samples per second over all of the run."""
    samples, seconds = number(run.figure("samples")), number(run.figure("seconds"))
    return samples / seconds if samples is not None and seconds else None


def notes(run: RunFacts) -> Html | None:
    """Return the section on missing or damaged files."""
    if not run.notes:
        return None
    return element("div", *(element("p", note) for note in run.notes), class_="warn")


def time_parts(runs: list[RunFacts]) -> Html | None:
    """Return the eight parts of the time, as bars and as a table with their sentences."""
    timed = [(run.name, run.time_parts) for run in runs]
    longest = max(sum(parts.values()) for _, parts in timed)
    if longest <= 0:
        return None
    again = any(run.history.num_starts > 1 for run in runs)
    note = "Mean over the workers that trained at the end" + (
        "; of a run that was resumed, since its last start." if again else "."
    )
    return element(
        "div", _bars(timed, longest), element("p", note, class_="note"), _part_table(timed)
    )


def _bars(timed: list[tuple[str, dict[str, float]]], longest: float) -> Html:
    drawn = []
    for name, parts in timed:
        before = element("b", name, " ") if len(timed) > 1 else None
        total = f"{sum(parts.values()):,.1f} s per worker"
        bar = bar_in_page(parts, longest=longest).svg(f"time parts of {name}", is_stretched=True)
        drawn += [element("p", before, total, class_="over"), Html(bar)]
    return element("div", *drawn, class_="bars")


def _part_table(timed: list[tuple[str, dict[str, float]]]) -> Html:
    names = ["seconds", "share"] if len(timed) == 1 else [name for name, _ in timed]
    rows: list[list[object]] = []
    for part in STACK:
        seconds = [parts.get(part, 0.0) for _, parts in timed]
        cells: list[object] = [f"{value:,.2f}" for value in seconds]
        if len(timed) == 1:
            cells.append(f"{seconds[0] / sum(timed[0][1].values()):.1%}")
        key = element("span", swatch(f"var(--{part})"), " ", words(part), class_="key")
        rows.append([explained(key, TIME_PARTS[part]), *cells])
    return table(["part", *names], rows, numbers=tuple(names))


def explained(name: object, sentence: str) -> Html:
    """Return a name with a sentence on it below."""
    return element("span", name, element("small", sentence, class_="below"))


def exchange(run: RunFacts) -> Html:
    """Return the section on the cost of the exchanges."""
    waits = run.curve("exchange/seconds").values
    staleness = run.result.get("staleness")
    if staleness is None and len(run.curve("exchange/staleness")):
        staleness = statistics.fmean(run.curve("exchange/staleness").values)
    median = written(statistics.median(waits), "{:.4g} s") if waits else _NONE
    rows = [
        _cost("Exchanges", written(run.figure("rounds"), "{:,.0f}"), "exchange/count"),
        _cost("Seconds, median", median, "exchange/seconds"),
        _cost("Bytes", byte_size(run.figure("exchange_bytes")), "exchange/bytes"),
        _cost("Communication share", written(run.figure("communication_share"), "{:.1%}"),
              "exchange/communication_share"),
        _cost("Local steps before each", written(run.figure("period"), "{:,.1f}"),
              "exchange/period"),
        _cost("Staleness, mean", written(staleness, "{:.2f}"), "exchange/staleness"),
    ]  # fmt: skip
    pause = number(run.result.get("longest_pause_s"))
    if pause:
        name = explained("Longest pause", "The longest time in which nobody trained.")
        rows.append([name, duration(pause)])
    return table(["what", "value"], rows + _allreduce(run), numbers=("value",))


def _cost(name: str, value: str, tag: str) -> list[object]:
    return [explained(name, TAGS[tag].sentence), value]


def _allreduce(run: RunFacts) -> list[list[object]]:
    found = run.result.get("allreduce")
    if not isinstance(found, dict):
        return []
    seconds = written(found.get("measured_s"), "{:.4g} s")
    return [_cost(f"All-reduce, {found.get('algorithm')}", seconds, "exchange/allreduce_s")]


def workers(run: RunFacts) -> Html | None:
    """Return the curves of the workers, and a table of their times and speeds."""
    rows: list[list[object]] = []
    for worker_id in worker_ids(run):
        steps = run.curve(f"worker_step_s/{worker_id}")
        waited = run.curve(f"worker_waited_s/{worker_id}").values
        rows.append([
            worker_id, duration(steps.seconds[0]), duration(steps.seconds[-1]),
            f"{statistics.median(steps.values) * 1e3:,.2f} ms",
            f"{statistics.median(waited) * 1e3:,.2f} ms" if waited else _NONE,
        ])  # fmt: skip
    if not rows:
        return None
    head = ["worker", "first seen", "last seen", "a step, median", "waited in a round, median"]
    listed = table(head, rows, numbers=tuple(head[1:]))
    shown = folded(f"All {len(rows)} workers", listed) if len(rows) > _FOLDED_FROM else listed
    return element("div", *charts_of_workers(run), shown)


def timeline(run: RunFacts) -> Html:
    """Return one row per generation with its reason, and below all that the run told."""
    has_starts = run.history.num_starts > 1
    rows: list[list[object]] = []
    generations, left_out = _ends(run.generations)
    for g in generations:
        who = f"{plain_count(g.num_workers)}{': ' if g.worker_ids else ''}{', '.join(g.worker_ids)}"
        start: list[object] = [g.start] if has_starts else []
        rows.append([g.number, *start, duration(g.seconds), f"{g.samples:,}", who, g.reason])
    if not rows:
        return element("p", "No membership was recorded.", class_="note")
    numbers = (*(["start"] if has_starts else []), "at", "samples")
    head = ["generation", *numbers, "workers", "reason"]
    listed = table(head, rows, numbers=numbers, kind="last")
    is_long = len(rows) > _MANY
    shown = folded(_title(len(rows), "generations", left_out), listed) if is_long else listed
    return element("div", shown, _all_told(run))


def _ends(rows: Sequence[_Row]) -> tuple[Sequence[_Row], int]:
    """Return the first and the last rows of a long table, and how many lie between."""
    if len(rows) <= _MOST_ROWS:
        return rows, 0
    half = _MOST_ROWS // 2
    return [*rows[:half], *rows[-half:]], len(rows) - _MOST_ROWS


def _title(count: int, what: str, left_out: int) -> str:
    if not left_out:
        return f"All {count} {what}"
    return f"The first and the last {count // 2:,} of {count + left_out:,} {what}"


def plain_count(count: int | None) -> str:
    """Return a number of workers, or a dash where a generation was over too soon to count."""
    return _NONE if count is None else str(count)


def _all_told(run: RunFacts) -> Html:
    told, left_out = _ends(run.history.told)
    rows: list[list[object]] = [[duration(t.seconds), f"{t.samples:,}", t.sentence] for t in told]
    listed = table(["at", "samples", "event"], rows, numbers=("at", "samples"), kind="last")
    return folded(_title(len(told), "events", left_out), listed)


def faults(run: RunFacts) -> Html:
    """Return the faults that fired."""
    fired = run.faults
    if fired:
        return element("ul", *(element("li", sentence) for sentence in fired))
    plan = run.config.get("run.fault_plan")
    said = "None of the plan has fired." if plan else "No fault was planned."
    return element("p", said, class_="note")


def checkpoints(run: RunFacts) -> Html:
    """Return the checkpoints that are kept."""
    if not run.checkpoints:
        return element("p", "None is there.", class_="note")
    rows: list[list[object]] = [
        [str(m["name"]), written(m.get("round"), "{:,.0f}"),
         written(m.get("num_samples"), "{:,.0f}"), duration(m.get("seconds")),
         written(m.get("generation"), "{:.0f}"), plain(m.get("workers")), byte_size(_size(m))]
        for m in run.checkpoints
    ]  # fmt: skip
    head = ["name", "round", "samples", "at", "generation", "workers", "size"]
    return table(head, rows, numbers=("round", "samples", "at", "generation", "size"))


def _size(manifest: Any) -> float | None:
    files = manifest.get("files")
    if not isinstance(files, dict):
        return None
    return sum(number(f.get("bytes")) or 0 for f in files.values() if isinstance(f, dict))


def configuration(run: RunFacts) -> Html:
    """Return versions and commit, and all settings folded away."""
    about: list[list[object]] = [[name, str(version)] for name, version in run.versions.items()]
    about.append(["commit of raydl", element("code", run.commit or "not known")])
    settings: list[list[object]] = [
        [element("code", name), plain(value)] for name, value in run.config.items()
    ]
    return element(
        "div",
        folded("All settings", table(["setting", "value"], settings, kind="facts")),
        folded("Versions", table(["what", "version"], about, kind="facts")),
    )
