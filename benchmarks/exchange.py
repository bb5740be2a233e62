"""What one exchange takes beside what it can not take less than, in a vector of AlexNet and LeNet.

Command:   python -m benchmarks.exchange            (--quick: fewer repeats, nothing across nodes)

Two workers exchange through the classes of a run (``crowd.py``), again and again; their local step
is empty. Each figure is the ratio to a limit that the same processes measured in the same repeat:

- sync: until the sum is there, over the all-reduce of a bare gloo group of the same size. With the
  moves of replica and center, which a bare all-reduce has not, it is told as "whole".
- async and hogwild on one node: all that moves replica and center, over the time of four passes
  over the vector. Two copies of a vector are four passes; the bandwidth is that of copies far
  larger than any cache. One worker is measured alone, then both at once. With the answer to its
  settlement, which passes behind a gradient in a run and behind nothing here, it is "settled".
- across two hosts, each with a link of 100 Mbit/s (``hosts.py``): all of an exchange over the time
  that the link takes for its bytes, there in sync (both ways at once), there and back in async.
- TLS: the synchronous exchange across two hosts by certificates, over the same without them, on
  links of 100 Mbit/s and of 1 Gbit/s.
- memory that comes and goes with each exchange, worker and center together, in vectors.
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
from benchmarks.parts import connected, parser_of_parts, ray_here, write_answer
from benchmarks.programs import ROOT
from benchmarks.ray_on_hosts import start_ray
from raydl.config.tls import TlsFiles

SIZES = {"lenet": 431_080, "alexnet": 61_100_840}
COPIED = SIZES["alexnet"]
"""Floats of a copy that measures the bandwidth of memory."""
MESSAGES = ("async-easgd", "hogwild-easgd")
METHODS = ("sync-easgd", *MESSAGES)
MBIT = 100.0
TLS_MBIT = (100.0, 1000.0)
TLS_TARGET = 1.15
FRESH_TARGET = 0.05
"""Vectors that may come and go: what a kernel counts is no exact count."""
_PART_S = 900.0
_ACROSS_S = 300.0

Series = dict[str, list[float]]
"""Seconds by case, one value per repeat."""


# within the cluster


def count_of(num_parameters: int) -> int:
    """Return how many exchanges a time is the mean of: of small vectors more."""
    return max(2, min(50, 20_000_000 // num_parameters))


def one_node(repeats: int) -> dict[str, Any]:
    """Measure all sizes on the node of this process; see ``one_size``."""
    return {name: one_size(num_parameters, repeats) for name, num_parameters in SIZES.items()}


def one_size(num_parameters: int, repeats: int) -> dict[str, Any]:
    """Return the series of a size, and by method the vectors that come and go."""
    with Crowd(num_parameters, num_workers=2) as crowd:
        for method in METHODS:
            crowd.enter(method)
        count = count_of(num_parameters)
        measured = interleaved(cases(crowd, count), repeats=repeats + 1)
        fresh = {m: crowd.swing_bytes(m, count) / (4 * num_parameters) for m in METHODS}
    return {"series": by_kind(measured), "fresh": fresh}


def cases(crowd: Crowd, count: int) -> dict[str, Callable[[], dict[str, float]]]:
    """Return what each repeat takes: every exchange, and what it is compared with."""

    def exchange(method: str, num_workers: int) -> Callable[[], dict[str, float]]:
        return lambda: vars(crowd.exchange(method, count, num_workers=num_workers))

    found: dict[str, Callable[[], dict[str, float]]] = {
        "bare": lambda: {"s": crowd.allreduce(count)},
        "sync-easgd": exchange("sync-easgd", 2),
        "copy": lambda: {"s": crowd.copy(COPIED, 2, num_workers=1)},
        "copy both": lambda: {"s": crowd.copy(COPIED, 2)},
    }
    for method in MESSAGES:
        found[method] = exchange(method, 1)
        found[f"{method} both"] = exchange(method, 2)
    return found


def by_kind(measured: Mapping[str, Sequence[Mapping[str, float]]]) -> Series:
    """Return the series of each case and kind of time, without the first repeat: a warm-up."""
    return {
        f"{case} {kind}": [values[kind] for values in repeats[1:]]
        for case, repeats in measured.items()
        for kind in repeats[0]
    }


def across(repeats: int) -> dict[str, Any]:
    """Measure the smaller size; the second worker is on another node than first and centers."""
    with Crowd(SIZES["lenet"], num_workers=2, is_spread=True) as crowd:
        crowd.enter("sync-easgd")
        crowd.enter("async-easgd")
        found: dict[str, Callable[[], dict[str, float]]] = {
            "sync-easgd": lambda: vars(crowd.exchange("sync-easgd", 3)),
            "async-easgd": lambda: vars(crowd.exchange("async-easgd", 3, far=True)),
        }
        return {"series": by_kind(interleaved(found, repeats=repeats + 1))}


def tls(repeats: int, folder: Path) -> dict[str, Any]:
    """Measure the smaller size across two nodes, with certificates and without, in turn."""
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

        found = {name: exchange(crowd) for name, crowd in crowds.items()}
        return {"series": by_kind(interleaved(found, repeats=repeats + 1))}


# outside


def tell_one_node(report: Report, name: str, answer: Mapping[str, Any]) -> None:
    """Judge a size on one node."""
    series, share = answer["series"], SIZES[name] / COPIED
    bare = series["bare s"]
    report.judge(
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
        report.judge(
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
        is_judged = name == "alexnet"  # of a small one, what an allocator keeps hides the rest
        report.judge(
            Figure(
                name=f"exchange.{name}.{method.removesuffix('-easgd')}-fresh",
                value=Spread.of([vectors]), target=FRESH_TARGET if is_judged else None,
                is_better="less",
            )
        )  # fmt: skip
    report.table(
        (f"{name}, {SIZES[name]:,} floats", "ms (least to greatest)"),
        [
            (case, Spread.of([1e3 * s for s in values]).text())
            for case, values in sorted(series.items())
        ],
    )


def on_two_hosts(part: str, repeats: int, folder: Path, *, mbit: float) -> tuple[Series, float]:
    """Measure a part on two hosts.

    Returns:
        The series, and the seconds that a link takes for LeNet's vector.
    """
    answer = folder / "answer"
    words = [
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
            hosts.run(0, words, env=environment, timeout_s=_ACROSS_S)
            return json.loads(answer.read_text())["series"], 4 * SIZES[
                "lenet"
            ] * hosts.seconds_per_byte
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"across hosts:\n{error.output[-4000:]}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_folder() -> Path:
    """Return a folder for ``on_two_hosts``, which removes it; its path is short."""
    return Path(tempfile.mkdtemp(prefix="raydl-"))


def tell_across(report: Report, repeats: int) -> None:
    """Judge LeNet's vector on two hosts."""
    series, link_s = on_two_hosts("across", repeats, new_folder(), mbit=MBIT)
    for method, ways in (("sync-easgd", 1), ("async-easgd", 2)):
        seconds = series[f"{method} whole_s"]
        report.judge(
            Figure(
                name=f"exchange.lenet.{method.removesuffix('-easgd')}-across",
                value=Spread.of([s / (ways * link_s) for s in seconds]),
                target=1.3, is_better="less",
            )
        )  # fmt: skip
    report.say(
        "Across hosts only lenet's vector: the object stores of `ray_on_hosts.py` hold 100 MB."
    )


def tell_tls(report: Report, repeats: int, *, mbit: float) -> None:
    """Judge what TLS costs on two hosts."""
    series, _ = on_two_hosts("tls", repeats, new_folder(), mbit=mbit)
    report.judge(
        Figure(
            name=f"exchange.lenet.sync-tls-{mbit:.0f}mbit",
            value=ratios(series["tls whole_s"], series["plain whole_s"]),
            target=TLS_TARGET, is_better="less",
        )
    )  # fmt: skip
    report.table(
        (f"lenet across hosts, {mbit:.0f} Mbit/s", "ms (least to greatest)"),
        [(case, Spread.of([1e3 * s for s in series[case]]).text()) for case in sorted(series)],
    )


def measure_tls(report: Report, repeats: int) -> None:
    """Judge what TLS costs, on each rate of link."""
    for mbit in TLS_MBIT:
        tell_tls(report, repeats, mbit=mbit)


def main() -> None:
    """Measure, and print tables and a line of JSON per figure."""
    only_tls = {"action": "store_true", "help": "measure what TLS costs, and nothing else"}
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
        measure_tls(report, repeats)
        return report.close(options.out)
    words = ("--part", "one-node", "--repeats", str(repeats))
    answers = connected("benchmarks.exchange", *words, timeout_s=_PART_S)
    for name, answer in answers.items():
        tell_one_node(report, name, answer)
    if options.quick:
        report.say("Nothing is measured across nodes in the quick form.")
    elif reason := why_not():
        report.say(f"Nothing is measured across nodes: {reason}.")
    else:
        tell_across(report, repeats)
        measure_tls(report, repeats)
    report.close(options.out)


if __name__ == "__main__":
    main()
