"""The history of a run: one fact a line, in a file for each start."""

import json

import pytest
from controller_harness import ControllerHarness, collected, record, report, scored

import raydl
from raydl.core.membership import Membership
from raydl.core.reports import Outcome
from raydl.core.worker_group import Failed, HandedIn, Lost, Published, RunEnded, WorkerReady
from raydl.elastic import facts
from raydl.errors import NonFiniteCenterError
from raydl.run.history import HistoryWriter, read_lines
from raydl.storage import Storage
from raydl.tools.report import read_run


def written(folder, *found, epoch=1):
    writer = HistoryWriter(folder, epoch)
    for number, fact in enumerate(found):
        writer.write(fact, seconds=float(number), samples=10 * number)
    return read_lines(Storage(str(folder)))


def test_a_fact_is_a_line_with_its_name_its_values_and_when_it_was_noted(tmp_path):
    form = facts.Form(Membership(2, ("w0", "w1")), 40, "w1 joins", {"w1": "w3"})
    _, line = written(tmp_path, facts.Start("w1"), form)
    assert (line.start, line.kind, line.seconds, line.samples) == (1, "Form", 1.0, 10)
    assert line.values == {
        "membership": {"generation": 2, "worker_ids": ["w0", "w1"], "absent": []},
        "round": 40, "why": "w1 joins", "replicas": {"w1": "w3"},
    }  # fmt: skip


def test_the_starts_of_a_run_follow_each_other(tmp_path):
    for epoch in (3, 12):
        written(tmp_path, facts.Stop("SIGTERM"), epoch=epoch)
    assert [line.start for line in read_lines(Storage(str(tmp_path)))] == [1, 2]


def test_telemetry_is_no_history(tmp_path):
    telemetry = (report("w0", 3), Published((0, 3), (record(3),)), facts.Tick(), facts.Trained(7))
    assert written(tmp_path, *telemetry) == []


def test_what_is_large_or_a_users_own_object_is_left_out_or_a_text(tmp_path):
    error = NonFiniteCenterError(3)
    lines = written(
        tmp_path,
        collected(4, "w0", "w1"),
        HandedIn("w1", {"weights": object()}),
        Failed("w1", ValueError("a mistake\nof two lines")),
        RunEnded("w1", Outcome.BROKEN, 3, 1, error=error, score=scored(3)),
        scored(5),
    )
    assert lines[0].values == {"round": 4, "workers": ["w0", "w1"]}
    assert lines[1].values == {"worker_id": "w1"}
    assert "a mistake" in lines[2].values["error"]
    assert lines[3].values["outcome"] == "broken"
    assert lines[4].values == {"round": 5, "metrics": {"accuracy": 0.5}}


def test_credentials_are_not_written(tmp_path):
    written(tmp_path, Lost("w1", "s3://user:secret@bucket/data cannot be read"))
    [path] = tmp_path.glob("history-*.jsonl")
    assert "secret" not in path.read_text()


@pytest.mark.parametrize("cut", [1, 3, 30])
def test_a_last_line_that_a_crash_has_cut_is_left_out(tmp_path, cut):
    written(tmp_path, facts.Start("w0"), facts.Start("w1"))
    [path] = tmp_path.glob("history-*.jsonl")
    path.write_bytes(path.read_bytes()[:-cut])
    found = [line.values["worker_id"] for line in read_lines(Storage(str(tmp_path)))]
    assert found == (["w0", "w1"] if cut == 1 else ["w0"])


@pytest.mark.parametrize("row", ["", "7", "[]", '{"n": 1}', '{"n": 0, "seconds": 1, "samples": 2}'])
def test_a_damaged_line_is_left_out(tmp_path, row):
    written(tmp_path, facts.Start("w0"))
    [path] = tmp_path.glob("history-*.jsonl")
    path.write_text(f"{row}\n{path.read_text()}")
    assert len(read_lines(Storage(str(tmp_path)))) == 1


def test_the_controller_notes_each_event_that_is_news_and_each_action():
    harness = ControllerHarness().start()
    harness.step(Lost("w1", "it died"), Lost("w1", "again"), WorkerReady("w9"))
    kinds = [type(fact).__name__ for fact in harness.recorder.facts]
    assert kinds.count("Lost") == 1
    assert kinds[:2] == ["Start", "Start"]
    assert kinds.index("Form") < kinds.index("Lost") < len(kinds) - kinds[::-1].index("Start")
    assert "Abandon" in kinds


def test_a_run_has_a_history_from_which_the_report_takes_its_memberships(tmp_path):
    result = raydl.Trainer(
        "mlp",
        "synthetic:96",
        training=raydl.TrainingConfig(epochs=1),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    ).fit()
    lines = read_lines(Storage(str(tmp_path / "run")))
    kinds = [line.kind for line in lines]
    assert kinds[0] == "Start"
    assert {"WorkerReady", "Form", "RunEnded", "Collect", "Collected", "Enter"} <= {*kinds}
    assert len(lines) < 40
    [generation] = read_run(str(tmp_path / "run")).generations
    assert (generation.number, generation.worker_ids) == (1, ("w0",))
    assert lines[-1].samples == result.metrics["samples"]


def test_a_history_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "history-00000001.jsonl").mkdir()
    with pytest.raises(OSError, match="history"):
        HistoryWriter(tmp_path, 1).write(facts.Start("w0"), seconds=0.0, samples=0)


def test_a_line_is_small(tmp_path):
    written(tmp_path, Lost("w1", "its process was killed, or crashed"))
    [path] = tmp_path.glob("history-*.jsonl")
    assert len(path.read_bytes()) < 200
    assert json.loads(path.read_text())["n"] == 0
