"""Makes the sections of the page about one run."""

from __future__ import annotations

import statistics

from raydl.checkpoint.manifest import Manifest
from raydl.core.progress import AXES
from raydl.core.scores import AVERAGED
from raydl.metrics import TAGS, TIME_PARTS
from raydl.metrics.charts import bar_in_page, words
from raydl.metrics.memberships import in_short
from raydl.metrics.tags import STACK
from raydl.text.formatting import clock_text
from raydl.tools.report.curves import charts_of_workers, worker_ids
from raydl.tools.report.facts import RunFacts, number, plain
from raydl.tools.report.html import Html, element, folded, swatch, table

_NONE = "-"
_OPEN_WORKERS, _OPEN_GENERATIONS = 12, 60
"""Rows of the tables of workers and generations that are shown without a click."""
_MOST_ROWS = 1000
"""Longer tables omit the rows in the middle: a run of days may have thousands of generations."""


def written(value: object, pattern: str) -> str:
    """Return the value in a format, or a dash if it is not a finite number."""
    finite = number(value)
    return _NONE if finite is None else pattern.format(finite)


def duration(value: object) -> str:
    """Return the text of a time in seconds: ``4.9 s``, ``2:03 min``, ``1:02:03 h``."""
    seconds = number(value)
    if seconds is None:
        return _NONE
    if round(seconds, 1) < 100:
        return f"{seconds:.1f} s"
    unit = "h" if round(seconds) >= 3600 else "min"  # rounded first: 3599.6 s are an hour
    return f"{clock_text(seconds, is_short=True)} {unit}"


def byte_size(value: object) -> str:
    """Return the text of a size in bytes, with a decimal unit."""
    size = number(value)
    if size is None:
        return _NONE
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= limit:
            return f"{size / limit:.3g} {unit}"
    return f"{size:.0f} bytes"


def subtitle(run: RunFacts) -> str:
    """Return a line with method, model and data."""
    names = (run.setting(name) for name in ("method.name", "model", "data"))
    return "{} · {} · {}".format(*names)


def worker_range(run: RunFacts) -> str:
    """Return the least and the greatest number of workers, or the number requested."""
    counts = [round(v) for v in run.curve("workers/count").values]
    if not counts:
        return f"{run.setting('scaling.num_workers')} requested"
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def headline(run: RunFacts) -> Html:
    """Return the most important figures."""
    count = len({g.number for g in run.generations})
    generations = f"{count} generation{'s' if count > 1 else ''}" if count else None
    resumes = run.history.num_starts - 1
    resumed = f"resumed {resumes} times" if resumes > 1 else "resumed once"
    epochs = run.curve("train/epoch").values
    seconds = duration(run.figure("seconds"))
    tiles: list[tuple[str, object, str | None]] = [
        _score(run),
        *_mean(run),
        *_best(run),
        ("Samples", written(run.figure("samples"), "{:,.0f}"),
         f"{epochs[-1]:.1f} epochs" if epochs else None),
        ("Training time", seconds, written(speed(run), "{:,.0f} samples/s")),
        ("Workers", worker_range(run), generations),
        ("Ended", run.ending, resumed if resumes > 0 else None),
    ]  # fmt: skip
    shown = [
        element("div", element("dt", name),
                element("dd", value, element("small", more) if more else None,
                        class_="long" if len(str(value)) > 16 else None))
        for name, value, more in tiles
    ]  # fmt: skip
    return element("dl", *shown, class_="tiles")


def _score(run: RunFacts) -> tuple[str, object, str | None]:
    """Return the tile of the center's accuracy, or of its loss if the task has no accuracy."""
    accuracy, loss = run.figure("center_accuracy"), number(run.figure("center_loss"))
    if accuracy is None and loss is not None:
        return "Center loss", written(loss, "{:.4g}"), _other_metrics(run)
    more = None if loss is None else written(loss, "loss {:.4g}")
    return "Center accuracy", written(accuracy, "{:.2%}"), more


def _other_metrics(run: RunFacts) -> str | None:
    """Return what else the task measures, at the last evaluation: ``absolute error 1,927``."""
    known = (*AXES, "loss")
    newest = (run.result.get("evaluations") or [{}])[-1]
    others = {
        name.replace("_", " "): v
        for name, v in newest.items()
        if name not in known and not name.startswith(AVERAGED)
    }
    return ", ".join(f"{name} {written(v, '{:,.4g}')}" for name, v in others.items()) or None


def score_text(run: RunFacts) -> object:
    """Return the center's accuracy, or its loss if the task has no accuracy, for a table."""
    title, value, _ = _score(run)
    return f"loss {value}" if title == "Center loss" else value


def _mean(run: RunFacts) -> list[tuple[str, object, str | None]]:
    """Return the tile of the mean of the newest centers, if it is scored."""
    newest = (run.result.get("evaluations") or [{}])[-1]
    count = number(newest.get(f"{AVERAGED}centers"))
    if count is None:
        return []
    accuracy, loss = (newest.get(f"{AVERAGED}{name}") for name in ("accuracy", "loss"))
    what = f"Mean of {count:.0f} centers"
    if accuracy is None:
        return [(f"{what}: loss", written(loss, "{:.4g}"), None)]
    return [(what, written(accuracy, "{:.2%}"), written(loss, "loss {:.4g}"))]


def _best(run: RunFacts) -> list[tuple[str, object, str | None]]:
    """Return the tile of the best center, if the run kept one."""
    best = run.result.get("best")
    if not best:
        return []
    after = written(best.get("samples"), "after {:,.0f} samples")
    metric = run.config.get("evaluation.metric") or AVERAGED
    is_mean = run.config.get("evaluation.average") and str(metric).startswith(AVERAGED)
    prefix, what = (AVERAGED, "Best mean of centers:") if is_mean else ("", "Best center")
    if "accuracy" in best:
        return [(f"{what} accuracy", written(best.get(f"{prefix}accuracy"), "{:.2%}"), after)]
    return [(f"{what} loss", written(best.get(f"{prefix}loss"), "{:.4g}"), after)]


def speed(run: RunFacts) -> float | None:
    """Return the samples per second of the whole run, or None if not recorded."""
    samples, seconds = number(run.figure("samples")), number(run.figure("seconds"))
    return samples / seconds if samples is not None and seconds else None


def notes(run: RunFacts) -> Html | None:
    """Return the warnings of the run and about its files, or None if there are none."""
    if not (sentences := [*run.notes, *run.result.get("warnings", [])]):
        return None
    return element("div", *(element("p", sentence) for sentence in sentences), class_="warn")


def time_parts(runs: list[RunFacts]) -> Html | None:
    """Return a bar per run and a table of the eight time parts, or None if not recorded."""
    parts_of_runs = [(run.name, run.time_parts) for run in runs]
    longest = max(sum(parts.values()) for _, parts in parts_of_runs)
    if longest <= 0:
        return None
    is_resumed = any(run.history.num_starts > 1 for run in runs)
    note = "Mean over the workers that trained at the end" + (
        "; of a resumed run, since its last start." if is_resumed else "."
    )
    bars: list[Html] = []
    for name, parts in parts_of_runs:
        before = element("b", name, " ") if len(runs) > 1 else None
        total = f"{sum(parts.values()):,.1f} s per worker"
        bar = bar_in_page(parts, longest=longest).svg(f"time parts of {name}", is_stretched=True)
        bars += [element("p", before, total, class_="over"), Html(bar)]
    return element(
        "div",
        element("div", *bars, class_="bars"),
        element("p", note, class_="note"),
        _part_table(parts_of_runs),
    )


def _part_table(parts_of_runs: list[tuple[str, dict[str, float]]]) -> Html:
    is_one = len(parts_of_runs) == 1
    names = ["seconds", "share"] if is_one else [name for name, _ in parts_of_runs]
    rows: list[list[object]] = []
    for part in STACK:
        seconds = [parts.get(part, 0.0) for _, parts in parts_of_runs]
        cells: list[object] = [f"{value:,.2f}" for value in seconds]
        if is_one:
            cells.append(f"{seconds[0] / sum(parts_of_runs[0][1].values()):.1%}")
        key = element("span", swatch(f"var(--{part})"), " ", words(part), class_="key")
        rows.append([_explained(key, TIME_PARTS[part]), *cells])
    return table(["part", *names], rows, numbers=tuple(names))


def _explained(name: object, sentence: str) -> Html:
    """Return a name with an explanation below it."""
    return element("span", name, element("small", sentence, class_="below"))


def exchange(run: RunFacts) -> Html:
    """Return a table of the cost of the exchanges."""
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
        _cost("Local steps per exchange", written(run.figure("period"), "{:,.1f}"),
              "exchange/period"),
        _cost("Staleness, mean", written(staleness, "{:.2f}"), "exchange/staleness"),
    ]  # fmt: skip
    pause = number(run.result.get("longest_pause_s"))
    if pause:
        name = _explained("Longest pause", "The longest time in which no worker trained.")
        rows.append([name, duration(pause)])
    allreduce = run.result.get("allreduce")
    if allreduce:
        seconds = written(allreduce.get("measured_s"), "{:.4g} s")
        label = f"All-reduce, {allreduce.get('algorithm')}"
        rows.append(_cost(label, seconds, "exchange/allreduce_s"))
    return table(["what", "value"], rows, numbers=("value",))


def _cost(name: str, value: str, tag: str) -> list[object]:
    return [_explained(name, TAGS[tag].sentence), value]


def workers(run: RunFacts) -> Html | None:
    """Return the curves of the workers and a table of their speeds, or None if not recorded."""
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
    is_open = len(rows) <= _OPEN_WORKERS
    shown = listed if is_open else folded(f"All {len(rows)} workers", listed)
    return element("div", *charts_of_workers(run), shown)


def timeline(run: RunFacts) -> Html:
    """Return a table of the generations and a folded table of the logged events."""
    has_starts = run.history.num_starts > 1
    rows: list[list[object]] = []
    for g in run.generations:
        names = f"{g.num_workers}: {', '.join(in_short(g.worker_ids))}"
        start: list[object] = [g.start] if has_starts else []
        rows.append([g.number, *start, duration(g.seconds), f"{g.samples:,}", names, g.reason])
    if not rows:
        return element("p", "No membership was recorded.", class_="note")
    head = ["generation", *(["start"] if has_starts else []), "at", "samples", "workers", "reason"]
    events: list[list[object]] = [
        [duration(e.seconds), f"{e.samples:,}", e.sentence] for e in run.history.events
    ]
    is_open = len(rows) <= _OPEN_GENERATIONS
    return element(
        "div",
        _long_table("generations", head, rows, is_open=is_open),
        _long_table("events", ["at", "samples", "event"], events, is_open=False),
    )


def _long_table(what: str, head: list[str], rows: list[list[object]], *, is_open: bool) -> Html:
    """Return a table of logged rows; of too many, only the first and the last."""
    title, half = f"All {what} ({len(rows)})", _MOST_ROWS // 2
    if len(rows) > _MOST_ROWS:
        title = f"The first and the last {half:,} of {len(rows):,} {what}"
        rows = [*rows[:half], *rows[-half:]]
    listed = table(head, rows, numbers=("start", "at", "samples"), kind="last")
    return listed if is_open else folded(title, listed)


def faults(run: RunFacts) -> Html:
    """Return a list of the faults that fired."""
    fired = run.faults
    if fired:
        return element("ul", *(element("li", sentence) for sentence in fired))
    plan = run.config.get("run.fault_plan")
    note = "No fault of the plan has fired." if plan else "No fault was planned."
    return element("p", note, class_="note")


def checkpoints(run: RunFacts) -> Html:
    """Return a table of the checkpoints."""
    if not run.checkpoints:
        return element("p", "There are no checkpoints.", class_="note")
    rows: list[list[object]] = [
        [name, f"{m['round']:,}", f"{m['num_samples']:,}", duration(m["seconds"]),
         str(m["generation"]), plain(m["workers"]), byte_size(_size(m))]
        for name, m in run.checkpoints
    ]  # fmt: skip
    head = ["name", "round", "samples", "at", "generation", "workers", "size"]
    return table(head, rows, numbers=("round", "samples", "at", "generation", "size"))


def _size(manifest: Manifest) -> int:
    return sum(file["bytes"] for file in manifest["files"].values())


def configuration(run: RunFacts) -> Html:
    """Return folded tables of the settings and of the versions."""
    versions: list[list[object]] = [[name, str(version)] for name, version in run.versions.items()]
    versions.append(["commit of raydl", element("code", run.commit or "unknown")])
    settings: list[list[object]] = [
        [element("code", name), plain(value)] for name, value in run.config.items()
    ]
    return element(
        "div",
        folded("All settings", table(["setting", "value"], settings, kind="facts")),
        folded("Versions", table(["what", "version"], versions, kind="facts")),
    )
