"""Measures the share of a GPU's speed that remains when raydl's workers train on it.

Command:   python -m benchmarks.gpu                 (--quick: LeNet, one case, once; --device cpu:
           the same programs without a GPU)

The limit is the samples per second of plain PyTorch on the same GPU, in one process or in two at
once. It is compared with raydl: one worker that has the GPU (``--gpus-per-worker 1``), and two that
share it (``--gpus-per-worker 0.5``) and exchange in host memory. LeNet, batch 64, whose steps take
longer to launch than to compute, and VGG-16 for pictures of 32 x 32, batch 128, with 14.7 M
parameters; random pictures, float32, SGD without momentum. As in ``efficiency.py`` the figure is
steady speed without starts, evaluations and checkpoints, raydl clips gradients by default and the
plain process does not, and both sides read decoded pictures from memory, copy them through pinned
memory, and normalize them on the GPU.

Each network takes about five minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks import efficiency
from benchmarks.measure import Figure, Report, Spread, interleaved, options_of, ratios
from benchmarks.runs import NO_SCORES, Workplace, workplace

SECONDS, QUICK_SECONDS = 6.0, 4.0
SKIPPED_S = 2.0
"""Seconds at the start of each run that are not measured."""


@dataclass(frozen=True)
class Network:
    """A network with its random pictures and batch size."""

    data: str
    batch_size: int


@dataclass(frozen=True)
class Setting(efficiency.Setting):
    """A method with a period and a number of workers on one GPU."""

    num_workers: int

    @property
    def name(self) -> str:
        """METHOD-pPERIOD-WORKERS."""
        return f"{super().name}-{self.num_workers}"


NETWORKS = {
    "lenet": Network("synthetic:6400x1x28x28", 64),
    "vgg16-cifar": Network("synthetic:6400x3x32x32", 128),
}
SETTINGS = (
    Setting("sync-easgd", 10, 0.95, num_workers=1),
    Setting("sync-easgd", 10, 0.95, num_workers=2),
    Setting("async-easgd", 10, 0.95, num_workers=2),
    Setting("diloco", 50, 0.95, num_workers=2),
)


def limit_name(num_workers: int) -> str:
    """Return the name of the case with plain processes."""
    return f"plain-{num_workers}"


def cases_of(
    place: Workplace, model: str, device: str, seconds: float, settings: Sequence[Setting]
) -> dict[str, Callable[[], float]]:
    """Return functions that measure samples per second, by case, the limits first."""
    network = NETWORKS[model]
    data = place.arrays(network.data, num_test=500)
    common = (
        "--model", model, "--data", data, "--batch-size", str(network.batch_size),
        "--seconds", str(seconds),
    )  # fmt: skip

    def plain(num_workers: int) -> float:
        runs = place.plain(*common, "--device", device, copies=num_workers)
        return efficiency.total_speed([run.points for run in runs], skipped=SKIPPED_S)

    def raydl(setting: Setting) -> float:
        share = 1 / setting.num_workers if device == "cuda" else 0
        run = place.train(
            *common, *NO_SCORES, "--method", setting.method, "--period", str(setting.period),
            "--workers", str(setting.num_workers), "--gpus-per-worker", str(share),
        )  # fmt: skip
        return efficiency.total_speed([run.points], skipped=SKIPPED_S)

    numbers = sorted({setting.num_workers for setting in settings})
    limits = {limit_name(number): partial(plain, number) for number in numbers}
    return {**limits, **{setting.name: partial(raydl, setting) for setting in settings}}


def add_results(
    report: Report,
    model: str,
    speeds: Mapping[str, Sequence[float]],
    settings: Sequence[Setting] = SETTINGS,
) -> None:
    """Add the table and the figures of a model to a report."""
    shares = {
        setting.name: ratios(speeds[setting.name], speeds[limit_name(setting.num_workers)])
        for setting in settings
    }
    rows = [
        (name, Spread.of(values).text(",.0f"), shares[name].text(".3f") if name in shares else "")
        for name, values in speeds.items()
    ]
    report.add_figures(
        *(
            Figure(name=f"gpu.{model}.{each.name}", value=shares[each.name], target=each.target)
            for each in settings
        )
    )
    report.add_text(f"{model}, batch {NETWORKS[model].batch_size}; case: method, period, workers")
    report.add_table(("case", "samples per second", "of plain processes"), rows)


def main() -> None:
    """Measure and report."""
    options = options_of(
        __doc__,
        models={"default": None, "help": "lenet, vgg16-cifar, or both with a comma"},
        device={"default": "cuda", "help": "cuda, or cpu to try the programs without a GPU"},
        seconds={"type": float, "help": "seconds of training of each case"},
    ).parse_args()
    models = (options.models or ("lenet" if options.quick else ",".join(NETWORKS))).split(",")
    settings = SETTINGS[:1] if options.quick else SETTINGS
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    report = Report.of_command("gpu", options)
    with workplace() as place:
        for model in models:
            cases = cases_of(place, model, options.device, seconds, settings)
            repeats = options.repeats or (1 if options.quick else 2)
            add_results(report, model, interleaved(cases, repeats=repeats), settings)
    report.close(options.out)


if __name__ == "__main__":
    main()
