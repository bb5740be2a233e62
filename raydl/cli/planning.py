"""``raydl plan`` predicts the cost of a run before it starts."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydl.cli.options import Flag, parse, print_table
from raydl.cli.spot_planning import FleetPrediction, SpotOptions, SpotPlan, read_prices
from raydl.config import MethodConfig, TrainConfig
from raydl.config.checks import require
from raydl.core.cost_model import Network
from raydl.errors import ConfigError
from raydl.metrics.charts import SUFFIXES, Chart, Line, lines_in_file, numbered
from raydl.text.formatting import seconds_text
from raydl.tools.plan import Plan, Prediction, best_period, doublings, parse_network, predict

if TYPE_CHECKING:
    from raydl.core.method import Method
    from raydl.tasks import Classification, DataShape, LanguageModel

_MIN_STEPS, _MAX_STEPS = 3, 30
_MIN_TIMED_S = 3.0
_FLOAT32_BYTES = 4
_BAR_WIDTH = 50
"""Characters of a bar in the terminal."""


@dataclasses.dataclass(frozen=True)
class _PlanOptions:
    model: str = "lenet"
    """Network, as `raydl models` lists it."""
    data_shape: str | None = None
    """CHANNELSxHEIGHTxWIDTH of the images, 1x28x28 by default, or the tokens of the texts, by
    default as many as the model was made for."""
    classes: int | None = None
    """Classes of the images, 10 by default, or the vocabulary of the texts."""
    parameters: int | None = None
    """Number of parameters of another network, instead of a model; needs --step-s."""
    step_s: float | None = None
    """Seconds of one local step of one worker; unset: measured here, on one thread."""
    method: str = "sync-easgd"
    """Training methods, separated by commas."""
    workers: str = "4:4096"
    """Workers: N, or FROM:TO for FROM, 2 FROM, 4 FROM, ... TO."""
    network: str = "10gbe"
    """fdr, qdr, 10gbe-iwarp, 100mbe, 1gbe, 10gbe, 25gbe, 100gbe, or LATENCY_S,SECONDS_PER_BYTE."""
    period: int | None = None
    """Local steps between two exchanges; unset: the method's default."""
    batch_size: int = 64
    """Samples in one local step of one worker."""
    center_shards: int = 1
    """Shards of the center, one node each (methods that are not synchronous)."""
    target: float = 0.05
    """Largest share of communication, in (0, 1), with the best period."""
    preemptions: float | None = None
    """Preemptions of a machine per hour: also predict goodput, time and cost on spot machines."""
    spares: int = 0
    """Hot spares, with --preemptions."""
    samples: int | None = None
    """Samples that the run trains, with --preemptions: for its hours and its cost."""
    price: str | None = None
    """JSON file with the prices of a machine-hour, {"spot": 0.31, "on_demand": 1.01}."""
    spot: SpotOptions = dataclasses.field(default_factory=SpotOptions)
    out: str | None = None
    """Chart file to draw: .png, .svg or .pdf."""
    json: Flag = False
    """Print all predictions as JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MethodCost:
    """The predicted cost of one method, by number of workers."""

    method: str
    plan: Plan
    predictions: list[Prediction]
    best_periods: list[int | None]
    on_spot: list[FleetPrediction]
    """The predictions for machines that are preempted; empty without ``--preemptions``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Workload:
    """The properties of a network and its step that the cost depends on."""

    name: str
    parameters: int
    num_bytes: int
    step_s: float
    is_step_measured: bool


def plan(arguments: Sequence[str]) -> int:
    """Predict step time, communication and scaling of a run."""
    options = parse(_PlanOptions, arguments, prog="raydl plan", description=plan.__doc__)
    out = None if options.out is None else _check_out(options.out)
    network = parse_network(options.network)
    counts = _workers(options.workers)
    require(0 < options.target < 1, "target", "in (0, 1)", options.target)
    require(options.batch_size >= 1, "batch_size", "1 or more", options.batch_size)
    spot_plan = _spot_plan(options)
    from raydl.methods import resolve  # imports torch

    names = dict.fromkeys(name.strip() for name in options.method.split(","))
    given = [MethodConfig(name=name, period=options.period) for name in names]
    methods = [resolve(TrainConfig(method=method)) for method in given]
    has_center = any(not method.is_sync for method in methods)
    shards = options.center_shards
    require(shards == 1 or has_center, "center_shards", "1 for synchronous methods", shards)
    workload = _workload(options, methods[0])
    costs = [_predict_cost(m, options, workload, network, counts, spot_plan) for m in methods]
    if options.json:
        print(json.dumps(_as_dict(options, workload, network, costs, spot_plan), indent=2))
    else:
        _print(options, workload, network, costs, spot_plan)
    if out is not None:
        title = f"{workload.name}, batch {options.batch_size} per worker, {options.network}"
        _draw(costs, title, out)
        if not options.json:
            print(f"chart: {out}")
    return 0


def _spot_plan(options: _PlanOptions) -> SpotPlan | None:
    """Return the request about machines that are preempted, or None if there is none."""
    if options.preemptions is None:
        given = {"spares": options.spares, "samples": options.samples, "price": options.price}
        for name, value in given.items():
            require(not value, name, "given only with --preemptions", value)
        for field in dataclasses.fields(SpotOptions):
            value = getattr(options.spot, field.name)
            is_default = value == getattr(SpotOptions(), field.name)
            require(is_default, f"spot.{field.name}", "given only with --preemptions", value)
        return None
    return SpotPlan(
        preemptions=options.preemptions,
        spares=options.spares,
        options=options.spot,
        num_samples=options.samples,
        prices=None if options.price is None else read_prices(options.price),
    )


def _check_out(out: str) -> Path:
    """Return the path of the chart. Raises ConfigError if it cannot be written there."""
    path = Path(out)
    if path.suffix not in SUFFIXES:
        raise ConfigError("out", f"must end in {', '.join(SUFFIXES)}, got {out}")
    if not path.parent.is_dir():
        raise ConfigError("out", f"must be in a folder that exists, got {out}")
    return path


def _workers(text: str) -> list[int]:
    """Return the numbers of workers for N or FROM:TO."""
    low, colon, high = text.partition(":")
    try:
        first, last = int(low), int(high if colon else low)
    except ValueError:
        raise ConfigError("workers", f"must be N or FROM:TO, got {text}") from None
    require(first >= 1, "workers", "1 or more", first)
    return doublings(first, last)


def _workload(options: _PlanOptions, method: Method) -> _Workload:
    """Return the network to plan for; measure a step if the user gave no time."""
    step_s = options.step_s
    if options.parameters is not None:
        require(options.parameters >= 1, "parameters", "1 or more", options.parameters)
        if step_s is None:
            raise ConfigError(
                "step_s", "must be given with --parameters: without a model no step is measured"
            )
        num_bytes = _FLOAT32_BYTES * options.parameters
        return _Workload(
            name="a network", parameters=options.parameters, num_bytes=num_bytes,
            step_s=step_s, is_step_measured=False,
        )  # fmt: skip
    from raydl.core.flat import FlatModel

    shape = _data_shape(options)
    network = _task(options.model, shape).build_model(shape)
    flat = FlatModel(network, name=options.model)
    is_measured = step_s is None
    if step_s is None:
        step_s = measure_step_s(options.model, shape, method, options.batch_size)
    return _Workload(
        name=options.model,
        parameters=flat.num_parameters,
        num_bytes=_FLOAT32_BYTES * (flat.num_parameters + flat.num_buffers),
        step_s=step_s,
        is_step_measured=is_measured,
    )


def _data_shape(options: _PlanOptions) -> DataShape:
    from raydl.models import MODELS
    from raydl.tasks import DataShape

    row = MODELS.get(options.model)
    reads_texts = row is not None and row.reads_texts
    shape, num_classes = row.made_for if row is not None and reads_texts else ((1, 28, 28), 10)
    if options.data_shape is not None:
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*x[1-9]\d*)?", options.data_shape):
            rule = "CHANNELSxHEIGHTxWIDTH as in 1x28x28, or the tokens of a text as in 64"
            raise ConfigError("data_shape", f"must be {rule}, got {options.data_shape}")
        shape = tuple(map(int, options.data_shape.split("x")))
    if options.classes is not None:
        num_classes = options.classes
    require(num_classes >= 1, "classes", "1 or more", num_classes)
    return DataShape(shape, num_classes)


def _task(model: str, shape: DataShape) -> Classification | LanguageModel:
    from raydl.tasks import Classification, LanguageModel

    return LanguageModel(model) if len(shape.input_shape) == 1 else Classification(model)


def measure_step_s(model: str, shape: DataShape, method: Method, batch_size: int) -> float:
    """Return the median seconds of 3 to 30 local steps of a method, on the CPU of this machine.

    One thread computes, as in a worker with one CPU. The batch is random.
    """
    import torch

    from raydl.core.flat import FlatModel
    from raydl.core.optimizers import make_optimizer
    from raydl.core.replica import Replica
    from raydl.metrics import TimeParts
    from raydl.tasks import LanguageModel

    task = _task(model, shape)
    network = task.build_model(shape)
    replica = Replica(
        FlatModel(network), task, rule=method.rule, time_parts=TimeParts(),
        make_optimizer=make_optimizer(method.inner, method.own_optimizer, network),
    )  # fmt: skip
    if isinstance(task, LanguageModel):
        tokens = torch.randint(shape.num_classes, (batch_size, *shape.input_shape))
        batch = tokens, tokens
    else:
        images = torch.randn(batch_size, *shape.input_shape)
        batch = images, torch.arange(batch_size) % shape.num_classes
    times: list[float] = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(2):  # warm-up
            replica.step(batch)
        while len(times) < _MIN_STEPS or (len(times) < _MAX_STEPS and sum(times) < _MIN_TIMED_S):
            start = time.perf_counter()
            replica.step(batch)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(num_threads)
    return statistics.median(times)


def _predict_cost(
    method: Method,
    options: _PlanOptions,
    workload: _Workload,
    network: Network,
    counts: Sequence[int],
    spot_plan: SpotPlan | None,
) -> _MethodCost:
    """Return the predicted cost of a method with each number of workers."""
    plan = Plan(
        strategy=method.strategy,
        period=method.period,
        overlaps=method.overlap
        and method.rule.ahead
        and method.strategy != "round_robin",  # a custom rule; the cost model hides nothing there
        step_s=workload.step_s,
        num_bytes=_message_bytes(method, workload),
        batch_size=options.batch_size,
        is_gathered=method.is_sync and (method.compression != "none" or not method.rule.sums),
        center_shards=1 if method.is_sync else options.center_shards,
    )
    predictions = [predict(plan, network, count) for count in counts]
    return _MethodCost(
        method=method.name,
        plan=plan,
        predictions=predictions,
        best_periods=[best_period(plan, network, count, target=options.target) for count in counts],
        on_spot=[spot_plan.predict(method.name, plan, network, p) for p in predictions]
        if spot_plan
        else [],
    )


def _message_bytes(method: Method, workload: _Workload) -> int:
    """Return the bytes of a message; with a center elsewhere, the mean of message and answer."""
    from raydl.core.codecs import parse_codec

    rule, codec = method.rule, parse_codec(method.compression)
    num_lanes = sum(1 / rule.lane_rounds.get(lane, 1) for lane in rule.lanes)  # of a mean round
    buffers = workload.num_bytes - _FLOAT32_BYTES * workload.parameters
    of_lane = codec.num_bytes(workload.parameters)
    lanes = num_lanes * of_lane if method.is_sync else (num_lanes + 1) * of_lane / 2
    return int(lanes) + buffers


def _as_dict(
    options: _PlanOptions,
    workload: _Workload,
    network: Network,
    costs: Sequence[_MethodCost],
    spot_plan: SpotPlan | None,
) -> dict[str, Any]:
    """Return all predictions as nested plain values, for JSON."""
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
                "method": cost.method,
                **dataclasses.asdict(cost.plan),
                "predictions": [
                    {**dataclasses.asdict(prediction), "best_period": period}
                    for prediction, period in zip(cost.predictions, cost.best_periods, strict=True)
                ],
                "on_spot": [spot_plan.as_dict(fleet) for fleet in cost.on_spot]
                if spot_plan
                else [],
            }
            for cost in costs
        ],
    }


def _print(
    options: _PlanOptions,
    workload: _Workload,
    network: Network,
    costs: Sequence[_MethodCost],
    spot_plan: SpotPlan | None,
) -> None:
    origin = "measured here, one thread" if workload.is_step_measured else "as given"
    print(
        f"{workload.name}: {workload.parameters:,} parameters, "
        f"{workload.num_bytes / 1e6:,.2f} MB a message\n"
        f"a local step of {options.batch_size} samples: "
        f"{seconds_text(workload.step_s)} ({origin})\n"
        f"network {options.network}: {seconds_text(network.latency_s)} a message, and "
        f"{network.seconds_per_byte * 1e9:.3g} ns a byte"
    )
    head = (
        "workers", "a step", "exchange", "hidden", "waiting", "samples/s", "scaling", "best period"
    )  # fmt: skip
    for cost in costs:
        is_other = cost.plan.num_bytes != workload.num_bytes
        size = f", {cost.plan.num_bytes / 1e6:,.3g} MB a message" if is_other else ""
        how = "; gathered" if cost.plan.is_gathered else _allreduces(cost.predictions)
        print(f"\n{cost.method}, period {cost.plan.period}{size}{how}")
        rows = [
            (
                f"{p.num_workers:,}", *map(seconds_text, (p.step_s, p.exchange_s, p.hidden_s)),
                f"{p.communication_share:.1%}", f"{p.samples_per_s:,.0f}", f"{p.efficiency:.1%}",
                "-" if period is None else f"{period:,}",
            )
            for p, period in zip(cost.predictions, cost.best_periods, strict=True)
        ]  # fmt: skip
        print_table(head, rows, numbers=head)
        print(f"\n{_time_of_a_worker(cost.predictions)}")
        if spot_plan:
            spot_plan.print(cost.on_spot)
    print(
        "\nwaiting: share of a worker's time in communication that is not hidden\n"
        f"best period: the shortest with at most {options.target:.3g} of the time waiting"
    )


def _allreduces(predictions: Sequence[Prediction]) -> str:
    """Return the all-reduces that are used, each with the fewest workers that use it."""
    fewest: dict[str, int] = {}
    for p in predictions:
        if p.algorithm != "center" and p.num_workers > 1:
            fewest.setdefault(p.algorithm, p.num_workers)
    texts = [f"{name} from {count:,} workers" for name, count in fewest.items()]
    return f"; summed by {', '.join(texts)}" if texts else ""


def _time_of_a_worker(predictions: Sequence[Prediction]) -> str:
    """Return bars, or one sentence if all of them would be full."""
    if all(f"{p.efficiency:.1%}" == "100.0%" for p in predictions):
        return (
            "no worker waits: its exchanges pass while it computes gradients; a faster step "
            "(--step-s) or a slower --network would show where waiting begins"
        )
    return f"a worker's time: # computing, . waiting\n{_bars(predictions)}"


def _bars(predictions: Sequence[Prediction]) -> str:
    """Return one bar per number of workers: computing ``#``, waiting ``.``"""
    width = max(len(f"{p.num_workers:,}") for p in predictions)
    lines = []
    for p in predictions:
        computing = round(_BAR_WIDTH * p.efficiency)
        bar = "#" * computing + "." * (_BAR_WIDTH - computing)
        lines.append(f"{p.num_workers:>{width},} {bar} {p.efficiency:6.1%}")
    return "\n".join(lines)


def _draw(costs: Sequence[_MethodCost], title: str, path: Path) -> None:
    """Draw weak scaling and the share of communication over workers, a line per method."""
    figures = {
        "weak-scaling efficiency": "efficiency",
        "communication, share of a worker's time": "communication_share",
    }
    charts = []
    for name, figure in figures.items():
        lines = [
            Line(cost.method, [p.num_workers for p in cost.predictions],
                 [getattr(p, figure) for p in cost.predictions], numbered(number))
            for number, cost in enumerate(costs)
        ]  # fmt: skip
        charts.append(Chart(title=name, lines=lines, x="workers", y="share"))
    lines_in_file(charts, title=title).save(path)
