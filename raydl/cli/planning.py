"""``raydl plan`` predicts the cost of a run before it starts."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from raydl.cli.options import parse, print_table
from raydl.config import MethodConfig, TrainConfig
from raydl.config.checks import require
from raydl.core.cost_model import Network
from raydl.errors import ConfigError
from raydl.metrics.charts import SUFFIXES, Chart, Line, lines_in_file, numbered
from raydl.text import seconds_text
from raydl.tools.plan import Plan, Prediction, best_period, doublings, parse_network, predict

if TYPE_CHECKING:
    from raydl.core.methods import Method
    from raydl.tasks import DataShape

_FEWEST_STEPS, _MOST_STEPS = 3, 30
_TIMED_FOR_S = 3.0
_BYTES = 4  # of a float32
_BAR = 50
"""Characters of a bar in the terminal."""


@dataclasses.dataclass(frozen=True)
class _PlanOptions:
    model: str = "lenet"
    """The network; `raydl models` lists them."""
    data_shape: str = "1x28x28"
    """Channels, height and width of the pictures."""
    classes: int = 10
    """Classes of the pictures."""
    parameters: int | None = None
    """Parameters of a network that is not in the list, instead of a model; needs --step-s."""
    step_s: float | None = None
    """Seconds of one local step of one worker; unset: some are timed here, on one thread."""
    method: str = "sync-easgd"
    """The training method; several by comma."""
    workers: str = "4:4096"
    """Workers: N, or FROM:TO for FROM, 2 FROM, 4 FROM, ... TO."""
    network: str = "10gbe"
    """fdr, qdr, 10gbe-iwarp, 1gbe, 10gbe, 25gbe, 100gbe, or LATENCY_S,SECONDS_PER_BYTE."""
    period: int | None = None
    """Local steps from one exchange to the next; unset: the method's own."""
    batch_size: int = 64
    """Samples in one step of one worker."""
    center_shards: int = 1
    """Nodes that the center is spread over, for the methods that are not synchronous."""
    target: float = 0.05
    """Share of communication, in (0, 1), that the best period keeps."""
    out: str | None = None
    """Draw a picture into this file: .png, .svg or .pdf."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print all that is predicted, as JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Outlook:
    """The predicted cost of one method, by number of workers."""

    method: str
    plan: Plan
    predictions: list[Prediction]
    best_periods: list[int | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Workload:
    """The workload, as far as the cost depends on it."""

    name: str
    parameters: int
    num_bytes: int
    step_s: float
    is_step_measured: bool


def plan(arguments: Sequence[str]) -> int:
    """Predict step time, communication and scaling of a run before it runs."""
    options = parse(_PlanOptions, arguments, prog="raydl plan", description=plan.__doc__)
    out = None if options.out is None else _check_out(options.out)
    network = parse_network(options.network)
    counts = _workers(options.workers)
    require(0 < options.target < 1, "target", "in (0, 1)", options.target)
    require(options.batch_size >= 1, "batch_size", "1 or more", options.batch_size)
    methods = _methods(options)
    workload = _workload(options, methods[0])
    outlooks = [_outlook(m, options, workload, network, counts) for m in methods]
    if options.json:
        print(json.dumps(_as_dict(options, workload, network, outlooks), indent=2))
    else:
        _print(options, workload, network, outlooks)
    if out is not None:
        title = f"{workload.name}, batch {options.batch_size} per worker, {options.network}"
        _draw(outlooks, title, out)
        if not options.json:
            print(f"picture: {out}")
    return 0


def _check_out(out: str) -> Path:
    """Return where the chart goes; raise a ConfigError if none can be written there."""
    path = Path(out)
    if path.suffix not in SUFFIXES:
        raise ConfigError("out", f"must end in {', '.join(SUFFIXES)}, got {out}")
    if not path.parent.is_dir():
        raise ConfigError("out", f"is in a folder that does not exist: {path.parent}")
    return path


def _workers(text: str) -> list[int]:
    """Return the numbers of workers that N or FROM:TO means."""
    low, _, high = text.partition(":")
    try:
        first, last = int(low), int(high or low)
    except ValueError:
        raise ConfigError("workers", f"must be N or FROM:TO, got {text}") from None
    require(first >= 1, "workers", "1 or more", first)
    return doublings(first, last)


def _methods(options: _PlanOptions) -> list[Method]:
    """Return the named methods with their defaults filled in, none twice."""
    from raydl.core.methods import resolve

    names = dict.fromkeys(name.strip() for name in options.method.split(","))
    return [
        resolve(TrainConfig(method=MethodConfig(name=name, period=options.period)))
        for name in names
    ]


def _workload(options: _PlanOptions, method: Method) -> _Workload:
    """Return the model to plan for; a step is timed where the user names no time."""
    if options.parameters is not None:
        require(options.parameters >= 1, "parameters", "1 or more", options.parameters)
        if options.step_s is None:
            raise ConfigError("step_s", "must be given with --parameters: there is no step to time")
        num_bytes = _BYTES * options.parameters
        return _Workload(
            name="a network", parameters=options.parameters, num_bytes=num_bytes,
            step_s=options.step_s, is_step_measured=False,
        )  # fmt: skip
    from raydl.core.flat import FlatModel
    from raydl.tasks import Classification

    shape = _data_shape(options)
    flat = FlatModel(Classification(options.model).build_model(shape), name=options.model)
    step_s = options.step_s
    return _Workload(
        name=options.model,
        parameters=flat.num_parameters,
        num_bytes=_BYTES * (flat.num_parameters + flat.num_buffers),
        step_s=measure_step_s(options.model, shape, method, options.batch_size)
        if step_s is None
        else step_s,
        is_step_measured=step_s is None,
    )


def _data_shape(options: _PlanOptions) -> DataShape:
    from raydl.tasks import DataShape

    sides = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", options.data_shape)
    if sides is None:
        rule = "CHANNELSxHEIGHTxWIDTH as in 1x28x28"
        raise ConfigError("data_shape", f"must be {rule}, got {options.data_shape}")
    require(options.classes >= 1, "classes", "1 or more", options.classes)
    channels, height, width = map(int, sides.groups())
    return DataShape((channels, height, width), options.classes)


def measure_step_s(model: str, shape: DataShape, method: Method, batch_size: int) -> float:
    """Return the median seconds of some local steps of a method, on this machine's CPU.

    One thread computes, as in a worker of one CPU. The batch is random numbers.
    """
    import torch

    from raydl.core.flat import FlatModel
    from raydl.core.optimizers import make_optimizer
    from raydl.core.replica import Replica
    from raydl.metrics import TimeParts
    from raydl.tasks import Classification

    task = Classification(model)
    network = task.build_model(shape)
    replica = Replica(
        FlatModel(network), task, rule=method.rule, time_parts=TimeParts(),
        make_optimizer=make_optimizer(method.inner, method.own_optimizer, network),
    )  # fmt: skip
    batch = (
        torch.randn(batch_size, *shape.input_shape),
        torch.arange(batch_size) % shape.num_classes,
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _median_s(lambda: replica.step(batch))
    finally:
        torch.set_num_threads(num_threads)


def _median_s(act: Callable[[], Any]) -> float:
    """Return the median seconds of 3 to 30 calls, after two that warm up."""
    times: list[float] = []
    for _ in range(2):
        act()
    while len(times) < _FEWEST_STEPS or (len(times) < _MOST_STEPS and sum(times) < _TIMED_FOR_S):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _outlook(
    method: Method,
    options: _PlanOptions,
    workload: _Workload,
    network: Network,
    counts: Sequence[int],
) -> _Outlook:
    """Return a method's expected cost with each number of workers."""
    from raydl.core.rules import Sends

    plan = Plan(
        strategy=method.strategy,
        period=method.period,
        overlaps=method.overlap
        and method.rule.sends is Sends.WEIGHTS
        and method.strategy != "round_robin",  # a rule of one's own; the model hides nothing there
        step_s=workload.step_s,
        num_bytes=workload.num_bytes,
        batch_size=options.batch_size,
        center_shards=1 if method.is_sync else options.center_shards,
    )
    return _Outlook(
        method=method.name,
        plan=plan,
        predictions=[predict(plan, network, count) for count in counts],
        best_periods=[best_period(plan, network, count, target=options.target) for count in counts],
    )


def _as_dict(
    options: _PlanOptions, workload: _Workload, network: Network, outlooks: Sequence[_Outlook]
) -> dict[str, Any]:
    """Return all that is predicted, ready for JSON."""
    return {
        "workload": dataclasses.asdict(workload),
        "network": {
            "name": options.network,
            "latency_s": network.latency_s,
            "seconds_per_byte": network.seconds_per_byte,
        },
        "target": options.target,
        "methods": [
            {
                "method": o.method,
                **dataclasses.asdict(o.plan),
                "predictions": [
                    {**dataclasses.asdict(prediction), "best_period": period}
                    for prediction, period in zip(o.predictions, o.best_periods, strict=True)
                ],
            }
            for o in outlooks
        ],
    }


def _print(
    options: _PlanOptions, workload: _Workload, network: Network, outlooks: Sequence[_Outlook]
) -> None:
    origin = "timed here, one thread" if workload.is_step_measured else "as given"
    print(
        f"{workload.name}: {workload.parameters:,} parameters, "
        f"{workload.num_bytes / 1e6:,.2f} MB a message\n"
        f"a local step of {options.batch_size} samples: "
        f"{seconds_text(workload.step_s)} ({origin})\n"
        f"network {options.network}: {seconds_text(network.latency_s)} a message, and "
        f"{network.seconds_per_byte * 1e9:.3g} ns a byte"
    )
    for outlook in outlooks:
        print(f"\n{outlook.method}, period {outlook.plan.period}{_sums(outlook)}")
        _print_outlook(outlook)
        print(f"\na worker's time: # computing, . waiting\n{_bars(outlook.predictions)}")
    print(
        "\nwaiting: share of a worker's time in communication, what is hidden left out\n"
        f"best period: the shortest with at most {options.target:.3g} of the time waiting"
    )


def _print_outlook(outlook: _Outlook) -> None:
    head = (
        "workers", "a step", "exchange", "hidden", "waiting", "samples/s", "scaling", "best period"
    )  # fmt: skip
    rows = [
        (
            f"{p.num_workers:,}", *map(seconds_text, (p.step_s, p.exchange_s, p.hidden_s)),
            f"{p.communication_share:.1%}", f"{p.samples_per_s:,.0f}", f"{p.efficiency:.1%}",
            "-" if period is None else f"{period:,}",
        )
        for p, period in zip(outlook.predictions, outlook.best_periods, strict=True)
    ]  # fmt: skip
    print_table(head, rows, numbers=head)


def _sums(outlook: _Outlook) -> str:
    """Return by which all-reduce the workers sum, with the fewest workers that take it."""
    first: dict[str, int] = {}
    for p in outlook.predictions:
        if p.algorithm != "center" and p.num_workers > 1:
            first.setdefault(p.algorithm, p.num_workers)
    told = [f"{name} from {count:,} workers" for name, count in first.items()]
    return f"; summed by {', '.join(told)}" if told else ""


def _bars(predictions: Sequence[Prediction]) -> str:
    """Return one bar per number of workers: computing ``#``, waiting ``.``"""
    width = max(len(f"{p.num_workers:,}") for p in predictions)
    lines = []
    for p in predictions:
        computing = round(_BAR * p.efficiency)
        bar = "#" * computing + "." * (_BAR - computing)
        lines.append(f"{p.num_workers:>{width},} {bar} {p.efficiency:6.1%}")
    return "\n".join(lines)


def _draw(outlooks: Sequence[_Outlook], title: str, path: Path) -> None:
    """Draw weak scaling and the share of communication over workers, a line per method."""
    figures = {
        "weak-scaling efficiency": "efficiency",
        "communication, share of a worker's time": "communication_share",
    }
    charts = [
        Chart(title=name, lines=_lines(outlooks, figure), x="workers", y="share")
        for name, figure in figures.items()
    ]
    lines_in_file(charts, title=title).save(path)


def _lines(outlooks: Sequence[_Outlook], figure: str) -> list[Line]:
    return [
        Line(o.method, [p.num_workers for p in o.predictions],
             [getattr(p, figure) for p in o.predictions], numbered(number))
        for number, o in enumerate(outlooks)
    ]  # fmt: skip
