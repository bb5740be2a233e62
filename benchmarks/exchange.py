"""Compares the time of an exchange with its lower limit, for the vectors of LeNet and AlexNet.

Command:   python -m benchmarks.exchange            (--quick: fewer repeats, nothing across nodes)

Two workers with empty local steps exchange repeatedly, through the classes of a run (``crowd.py``).
Each figure is the ratio to a limit that the same processes measure in the same repeat:

- sync: the time until the sum has arrived, over the all-reduce of a bare gloo group of the same
  size. "whole" includes the updates of replica and center, which a bare all-reduce does not have.
- async and hogwild on one node: the time to update replica and center, over four passes over the
  vector, the time to copy it twice. Copies far larger than any cache measure the bandwidth. One
  worker is measured alone, then two simultaneously. "settled" includes the wait for the next
  assignment, which in a run overlaps a gradient.
- across two hosts, each with a link of 100 Mbit/s (``hosts.py``): the time of an exchange over the
  time that the link needs for its bytes: one way for sync (both directions at once), a round trip
  for async.
- TLS: the synchronous exchange across two hosts with certificates, over the same without, on links
  of 100 Mbit/s and of 1 Gbit/s.
- the memory that an exchange allocates and frees, of worker and center together, in vectors.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.certificates import environment_of, make_certificates
from benchmarks.crowd import Crowd
from benchmarks.hosts import Hosts, why_not
from benchmarks.measure import Figure, Report, Spread, interleaved, ratios
from benchmarks.parts import parser_of_parts, ray_here, run_part, write_answer
from benchmarks.programs import ROOT
from benchmarks.ray_on_hosts import start_ray
from raydl.config.tls import TlsFiles

SIZES = {"lenet": 431_080, "alexnet": 61_100_840}
COPIED = SIZES["alexnet"]
"""Floats of the copy that measures the memory bandwidth."""
MESSAGES = ("async-easgd", "hogwild-easgd")
METHODS = ("sync-easgd", *MESSAGES)
MBIT = 100.0
TLS_MBIT = (100.0, 1000.0)
TLS_TARGET = 1.15
FRESH_TARGET = 0.05
"""Vectors allocated per exchange; not 0, since the kernel's counters are not exact."""
_PART_S = 900.0
_ACROSS_S = 300.0

Series = dict[str, list[float]]
"""Seconds by case, one value per repeat."""


# within the cluster


def count_of(num_parameters: int) -> int:
    """Return the exchanges over which a time is averaged; more for small vectors."""
    return max(2, min(50, 20_000_000 // num_parameters))


def one_node(repeats: int) -> dict[str, Any]:
    """Measure all sizes on the node of this process; see ``one_size``."""
    return {name: one_size(num_parameters, repeats) for name, num_parameters in SIZES.items()}


def one_size(num_parameters: int, repeats: int) -> dict[str, Any]:
    """Return the series of a size, and the allocated vectors by method."""
    with Crowd(num_parameters, num_workers=2) as crowd:
        for method in METHODS:
            crowd.enter(method)
        count = count_of(num_parameters)
        measured = interleaved(cases(crowd, count), repeats=repeats + 1)
        fresh = {m: crowd.fresh_bytes(m, count) / (4 * num_parameters) for m in METHODS}
    return {"series": by_kind(measured), "fresh": fresh}


def cases(crowd: Crowd, count: int) -> dict[str, Callable[[], dict[str, float]]]:
    """Return functions that measure the exchanges and their limits, by case."""

    def exchange(method: str, num_workers: int) -> Callable[[], dict[str, float]]:
        return lambda: vars(crowd.exchange(method, count, num_workers=num_workers))

    by_case: dict[str, Callable[[], dict[str, float]]] = {
        "bare": lambda: {"s": crowd.allreduce(count)},
        "sync-easgd": exchange("sync-easgd", 2),
        "copy": lambda: {"s": crowd.copy(COPIED, 2, num_workers=1)},
        "copy both": lambda: {"s": crowd.copy(COPIED, 2)},
    }
    for method in MESSAGES:
        by_case[method] = exchange(method, 1)
        by_case[f"{method} both"] = exchange(method, 2)
    return by_case


def by_kind(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> Series:
    """Return the series of each case and kind of time, without the first repeat, a warm-up."""
    return {
        f"{case} {kind}": [values[kind] for values in repeats[1:]]
        for case, repeats in measured.items()
        for kind in repeats[0]
    }


def across(repeats: int) -> dict[str, Any]:
    """Measure LeNet's vector; the centers and the first worker share a node, the second does not.

    The asynchronous exchange is that of the second worker alone.
    """
    with Crowd(SIZES["lenet"], num_workers=2, is_spread=True) as crowd:
        crowd.enter("sync-easgd")
        crowd.enter("async-easgd")
        by_case: dict[str, Callable[[], dict[str, float]]] = {
            "sync-easgd": lambda: vars(crowd.exchange("sync-easgd", 3)),
            "async-easgd": lambda: vars(crowd.exchange("async-easgd", 3, only_last=True)),
        }
        return {"series": by_kind(interleaved(by_case, repeats=repeats + 1))}


def tls(repeats: int, folder: Path) -> dict[str, Any]:
    """Measure LeNet's vector across two nodes, with and without certificates."""
    files = TlsFiles(**{name: str(folder / f"{name}.pem") for name in ("cert", "key", "ca")})
    size = SIZES["lenet"]
    with (
        Crowd(size, num_workers=2, is_spread=True) as plain,
        Crowd(size, num_workers=2, is_spread=True, environment=environment_of(files)) as encrypted,
    ):
        crowds = {"plain": plain, "tls": encrypted}
        for crowd in crowds.values():
            crowd.enter("sync-easgd")

        def exchange(crowd: Crowd) -> Callable[[], dict[str, float]]:
            return lambda: vars(crowd.exchange("sync-easgd", 5))

        by_case = {name: exchange(crowd) for name, crowd in crowds.items()}
        return {"series": by_kind(interleaved(by_case, repeats=repeats + 1))}


# outside the cluster


def report_one_node(report: Report, name: str, answer: Mapping[str, Any]) -> None:
    """Report a size on one node."""
    series, share = answer["series"], SIZES[name] / COPIED
    bare = series["bare s"]
    report.add_figures(
        Figure(
            name=f"exchange.{name}.sync", value=ratios(series["sync-easgd message_s"], bare),
            target=1.1, is_better="less",
        ),
        Figure(
            name=f"exchange.{name}.sync-whole", value=ratios(series["sync-easgd whole_s"], bare)
        ),
    )  # fmt: skip
    for method in MESSAGES:
        kind = method.removesuffix("-easgd")
        limit = [2 * s * share for s in series["copy s"]]
        limit_both = [2 * s * share for s in series["copy both s"]]
        report.add_figures(
            Figure(
                name=f"exchange.{name}.{kind}", value=ratios(series[f"{method} moved_s"], limit),
                target=1.5, is_better="less",
            ),
            Figure(
                name=f"exchange.{name}.{kind}-both",
                value=ratios(series[f"{method} both moved_s"], limit_both),
            ),
            Figure(
                name=f"exchange.{name}.{kind}-settled",
                value=ratios(series[f"{method} whole_s"], limit),
            ),
        )  # fmt: skip
    for method, vectors in answer["fresh"].items():
        has_target = name == "alexnet"  # for a small vector, the allocator's cache dominates
        report.add_figures(
            Figure(
                name=f"exchange.{name}.{method.removesuffix('-easgd')}-fresh",
                value=Spread.of([vectors]), target=FRESH_TARGET if has_target else None,
                is_better="less",
            )
        )  # fmt: skip
    report.add_table(
        (f"{name}, {SIZES[name]:,} floats", "ms (least to greatest)"),
        [
            (case, Spread.of([1e3 * s for s in values]).text())
            for case, values in sorted(series.items())
        ],
    )


def on_two_hosts(part: str, repeats: int, *, mbit: float) -> tuple[Series, float]:
    """Measure a part on two hosts.

    Returns:
        The series, and the seconds that a link needs for LeNet's vector.
    """
    folder = Path(tempfile.mkdtemp(prefix="raydl-"))  # short: paths of Ray's sockets are limited
    answer = folder / "answer"
    command = [
        sys.executable, "-m", "benchmarks.exchange", "--part", part,
        "--repeats", str(repeats), "--answer", str(answer),
    ]  # fmt: skip
    try:
        with (
            mock.patch.dict(os.environ, {"PYTHONPATH": str(ROOT)}),  # Ray's workers inherit it
            Hosts(2, mbit=mbit) as hosts,
        ):
            if part == "tls":
                make_certificates(folder, [hosts.address(host) for host in range(2)])
            environment = start_ray(hosts, folder)
            hosts.run(0, command, env=environment, timeout_s=_ACROSS_S)
            link_s = 4 * SIZES["lenet"] * hosts.seconds_per_byte
            return json.loads(answer.read_text())["series"], link_s
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{part} on two hosts failed:\n{error.output[-4000:]}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report_across(report: Report, repeats: int) -> None:
    """Report LeNet's vector on two hosts."""
    series, link_s = on_two_hosts("across", repeats, mbit=MBIT)
    for method, ways in (("sync-easgd", 1), ("async-easgd", 2)):
        seconds = series[f"{method} whole_s"]
        report.add_figures(
            Figure(
                name=f"exchange.lenet.{method.removesuffix('-easgd')}-across",
                value=Spread.of([s / (ways * link_s) for s in seconds]),
                target=1.3, is_better="less",
            )
        )  # fmt: skip
    report.add_text(
        "Across hosts only lenet's vector: the object stores of `ray_on_hosts.py` hold 100 MB."
    )


def report_tls(report: Report, repeats: int) -> None:
    """Report the cost of TLS on two hosts, for each link rate."""
    for mbit in TLS_MBIT:
        series, _ = on_two_hosts("tls", repeats, mbit=mbit)
        report.add_figures(
            Figure(
                name=f"exchange.lenet.sync-tls-{mbit:.0f}mbit",
                value=ratios(series["tls whole_s"], series["plain whole_s"]),
                target=TLS_TARGET, is_better="less",
            )
        )  # fmt: skip
        report.add_table(
            (f"lenet across hosts, {mbit:.0f} Mbit/s", "ms (least to greatest)"),
            [(case, Spread.of([1e3 * s for s in series[case]]).text()) for case in sorted(series)],
        )


def main() -> None:
    """Measure and report."""
    only_tls = {"action": "store_true", "help": "measure only the cost of TLS"}
    options = parser_of_parts(__doc__, **{"only-tls": only_tls}).parse_args()
    repeats = options.repeats or (1 if options.quick else 7)
    if options.part:
        parts: dict[str, Callable[[int], dict[str, Any]]] = {
            "one-node": one_node,
            "across": across,
            "tls": functools.partial(tls, folder=options.answer.parent),
        }
        with ray_here():
            write_answer(options.answer, parts[options.part](repeats))
        return
    report = Report.of_command("exchange", options)
    if options.only_tls:
        report_tls(report, repeats)
        return report.close(options.out)
    arguments = ("--part", "one-node", "--repeats", str(repeats))
    answers = run_part("benchmarks.exchange", *arguments, timeout_s=_PART_S)
    for name, answer in answers.items():
        report_one_node(report, name, answer)
    if options.quick:
        report.add_text("The quick form measures nothing across hosts.")
    elif reason := why_not():
        report.add_text(f"Nothing is measured across hosts: {reason}.")
    else:
        report_across(report, repeats)
        report_tls(report, repeats)
    report.close(options.out)


if __name__ == "__main__":
    main()
