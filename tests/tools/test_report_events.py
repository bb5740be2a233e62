"""Curves and logged events of a run, read from its event files."""

import re
import struct

import pytest
from run_pages import PageParser, facts_of, formed, write_run

from raydl.core.membership import Membership
from raydl.elastic.facts import FaultFired, Form
from raydl.metrics import TensorBoardWriter
from raydl.run.history import HistoryWriter, Line
from raydl.tools.report import make_page, read_run
from raydl.tools.report.curves import charts_of
from raydl.tools.report.events import Curve, History, read_history


def event_files(folder):
    return [path.read_bytes() for path in sorted(folder.glob("events*"))]


def write_start(folder, points, *, sentences=(), purge_after=None, table=""):
    """Write the event file of one start, into its own folder."""
    writer = TensorBoardWriter(str(folder), purge_after=purge_after)
    for sentence in sentences:
        writer.text("events", sentence, num_samples=0)
    if table:
        writer.text("membership", table, num_samples=0)
    for samples, values in points:
        writer.scalars(values, num_samples=samples)
    writer.close()
    return event_files(folder)[0]


def test_curves_and_logged_events_are_read_from_the_event_files(tmp_path):
    points = [(10, {"train/loss": 2.0}), (20, {"train/loss": 1.5})]
    sentences = ["1 of 2 workers are ready", "generation 1: w0 starts"]
    history = read_history([write_start(tmp_path, points, sentences=sentences)])
    assert history.curves["train/loss"].samples == (10, 20)
    assert history.curves["train/loss"].values == (2.0, 1.5)
    assert [event.sentence for event in history.events] == sentences
    assert history.events[0].seconds == 0.0
    assert history.damage == ""


def test_a_resumed_start_replaces_the_points_after_its_checkpoint(tmp_path):
    first = write_start(tmp_path / "1", [(n, {"train/loss": 1.0}) for n in (10, 20, 30)])
    again = write_start(tmp_path / "2", [(25, {"train/loss": 2.0})], purge_after=20)
    history = read_history([first, again])
    curve = history.curves["train/loss"]
    assert curve.samples == (10, 20, 25)
    assert curve.values == (1.0, 1.0, 2.0)
    assert list(curve.seconds) == sorted(curve.seconds)
    assert history.num_starts == 2


def test_the_event_files_of_a_comparison_are_not_starts(tmp_path):
    folder = write_run(tmp_path / "a")
    start = write_start(tmp_path / "1", [(10, {"train/loss": 1.0})])
    added = write_start(tmp_path / "2", [(10, {"compare/accuracy": 1.0})])
    (folder / "events.out.tfevents.1.host").write_bytes(start)
    (folder / "events.out.tfevents.2.host.compare").write_bytes(added)
    run = read_run(str(folder))
    assert run.history.num_starts == 1
    assert "resumed" not in PageParser(make_page([run])).text


def test_the_line_of_workers_omits_generations_that_a_resumed_start_replaced():
    generations = [(1, 0.0), (2, 91.0), (3, 60.0), (4, 100.0)]
    counts = (2.0, 3.0, 1.0, 1.0)
    curves = {
        "workers/count": Curve((0, 1, 2, 3), (1.0, 92.0, 93.0, 101.0), counts),
        "workers/generation": Curve((0, 1, 2, 3), (1.0, 92.0, 93.0, 101.0), (1.0, 2.0, 3.0, 4.0)),
    }
    lines = tuple(
        formed(n, (f"w{i}" for i in range(int(counts[n - 1]))), "why", start=1 + n // 3, seconds=s)
        for n, s in generations
    )
    run = facts_of(history=History(curves, num_starts=2), lines=lines)
    [figure] = [f for f in charts_of([run]) if "Workers that train" in f]
    [line] = re.findall(r'stroke:var\(--c0\)[^"]*" d="([^"]*)"', figure)
    xs = [float(x) for x in re.findall(r"[ML]([\d.]+)", line)]
    assert len(xs) > 3
    assert xs == sorted(xs)
    assert re.findall(r"<title>generation (\d)", figure) == ["1", "3", "4"]


def test_the_memberships_are_read_from_the_history_of_the_run(tmp_path):
    folder = write_run(tmp_path / "a")
    for epoch, number, workers, why in ((1, 1, ("w0", "w1"), "w0, w1 start"),
                                        (3, 2, ("w1",), "w0 was lost")):  # fmt: skip
        writer = HistoryWriter(folder, epoch)
        fact = Form(Membership(number, workers), 0, why)
        writer.write(fact, seconds=float(number), samples=1280 * (number - 1))
    found = read_run(str(folder)).generations
    assert [(g.start, g.seconds) for g in found] == [(1, 1.0), (2, 2.0)]
    assert [(g.number, g.samples, g.worker_ids, g.num_workers, g.reason) for g in found] == [
        (1, 0, ("w0", "w1"), 2, "w0, w1 start"),
        (2, 1280, ("w1",), 1, "w0 was lost"),
    ]


@pytest.mark.parametrize(
    ("purge_after", "steps", "samples"),
    [
        (None, [0, 1, 2, 640, 641, 1280], [0, 0, 0, 640, 640, 1280]),
        (19_200, [19_201, 19_202, 25_600], [19_200, 19_200, 25_600]),
        (None, [0, 640, 641, 320, 321], [0, 640, 640, 320, 320]),
    ],
    ids=["a start", "a resumed start", "a center that went back"],
)
def test_simultaneous_events_have_the_same_number_of_samples(tmp_path, purge_after, steps, samples):
    writer = TensorBoardWriter(str(tmp_path), purge_after=purge_after)
    for step in steps:
        writer.text("events", f"at {step}", num_samples=step)
    writer.close()
    events = read_history(event_files(tmp_path)).events
    assert [event.samples for event in events] == samples


def test_a_score_has_the_time_of_its_samples_not_of_its_writing(tmp_path):
    points = [
        (10, {"train/epoch": 1.0}), (30, {"train/epoch": 3.0}), (20, {"center/accuracy": 0.5})
    ]  # fmt: skip
    curves = read_history([write_start(tmp_path, points)]).curves
    first_s, last_s = curves["train/epoch"].seconds
    assert curves["center/accuracy"].seconds[0] == pytest.approx((first_s + last_s) / 2)


@pytest.mark.parametrize("cut", [1, 3, 20])
def test_an_incomplete_last_record_is_ignored(tmp_path, cut):
    data = write_start(tmp_path, [(10, {"train/loss": 1.0}), (20, {"train/loss": 1.0})])
    samples = read_history([data[:-cut]]).curves["train/loss"].samples
    assert samples in ((10,), (10, 20))


def test_a_file_with_a_hole_is_read_up_to_the_hole(tmp_path):
    data = write_start(tmp_path, [(10, {"train/loss": 1.0})])

    def pieces():
        yield data
        yield bytes(1 << 20)
        raise AssertionError("the hole is read on")

    history = read_history([pieces()])
    assert history.curves["train/loss"].samples == (10,)
    assert history.damage == "1 of 1 event files are damaged and read in part"


@pytest.mark.parametrize("length", [1 << 40, (1 << 64) - 1])
def test_a_record_of_an_impossible_length_ends_a_file(tmp_path, length):
    data = write_start(tmp_path, [(10, {"train/loss": 1.0})])
    history = read_history([data + struct.pack("<QI", length, 0) + bytes(100)])
    assert history.curves["train/loss"].samples == (10,)
    assert "damaged" in history.damage


def test_records_that_are_cut_between_pieces_are_read_whole(tmp_path):
    data = write_start(tmp_path, [(10, {"train/loss": 1.0}), (20, {"train/loss": 2.0})])
    pieces = [data[i : i + 7] for i in range(0, len(data), 7)]
    assert read_history([pieces]) == read_history([data])


def test_nan_is_not_part_of_a_curve(tmp_path):
    points = [(10, {"train/loss": float("nan")}), (20, {"train/loss": 1.0})]
    assert read_history([write_start(tmp_path, points)]).curves["train/loss"].samples == (20,)


def test_the_faults_of_all_starts_are_listed():
    sentences = [f"fault {i}: kill w{i} at step 4" for i in (1, 2)]
    lines = tuple(Line(1, 0.0, 0, FaultFired.__name__, {"sentence": said}) for said in sentences)
    history = History(num_starts=2)
    run = facts_of(history=history, lines=lines, result={"faults_fired": ["fault 2"]})
    assert run.faults == sentences
