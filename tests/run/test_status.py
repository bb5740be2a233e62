"""A run's status in its control channel, from its start to its end."""

import json
import math
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from raydl.config import RunConfig, ScalingConfig, TrainConfig, TrainingConfig
from raydl.core.center import Snapshot
from raydl.core.progress import Progress
from raydl.core.reports import Outcome, WorkerReport
from raydl.elastic.run_state import State
from raydl.elastic.state import Phase, Worker
from raydl.errors import ConfigError, RaydlError, ResourceError, SupersededError
from raydl.metrics import TIME_PARTS
from raydl.run import control_channel as run_control_channel
from raydl.run.control_channel import Request, read_status, request_removal
from raydl.run.progress_reporter import Silent
from raydl.run.status import WorkerStatus, to_json
from raydl.run.trainer import Trainer, open_control_channel, remove, run_to_end
from raydl.run.view import EventLog, RunView, end_state, worker_status
from raydl.storage import Storage
from raydl.tasks import Classification

START = Snapshot(
    Progress(round=12, generation=3, epoch=1.5, num_samples=150, local_step=40, seconds=9.0),
    True,
    None,
    None,
    {},
    {"num_samples": 100},
)


def trainer(path, *, epochs=2, **run):
    return Trainer(
        "lenet",
        "digits",
        training=TrainingConfig(epochs=epochs),
        scaling=ScalingConfig(num_workers=0),
        run=RunConfig(run_dir=str(path), progress="none", **run),
    )


def view(num_workers=(2, 3)):
    config = TrainConfig(scaling=ScalingConfig(num_workers=num_workers))
    return RunView(config, START, seconds_before=9.0, center_accuracy=0.75)


# whole runs in this process


def test_the_status_of_a_finished_run_has_the_figures_of_its_result(tmp_path):
    result = trainer(tmp_path / "a").fit()
    status = read_status(str(tmp_path / "a"))
    assert (status.state, status.num_workers, status.wanted) == ("finished", 0, "1")
    assert (status.progress.generation, status.progress.epoch, status.workers) == (1, 2.0, ())
    assert status.progress.num_samples == result.metrics["samples"]
    assert status.progress.round == result.metrics["rounds"]
    assert status.progress.seconds == result.metrics["seconds"]
    assert status.center_accuracy == result.metrics["center_accuracy"]
    assert any("generation 1" in line for line in status.events)
    assert all(line.startswith("0:00:") for line in status.events)


class Operator(threading.Thread):
    """Reads a run's status once its worker trains, requests two removals, and stops it."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.refusals, self.controller = folder, [], None

    def run(self):
        self.status = self._until_it_trains()
        for worker_id in ("w0", "w1"):
            try:
                request_removal(self.folder, worker_id, timeout_s=30)
            except RaydlError as error:
                self.refusals.append(str(error))
        self.controller.request_stop("a person")

    def _until_it_trains(self):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(RaydlError):  # there is no status yet
                status = read_status(self.folder)
                if status.workers and status.workers[0].local_step:
                    return status
            time.sleep(0.01)
        return None


def test_the_status_has_the_only_worker_which_can_not_be_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_control_channel, "EVERY_S", 0.05)
    operator = Operator(str(tmp_path / "a"))
    follow = RunView.follow

    def follow_and_keep(self, controller):
        operator.controller = controller
        follow(self, controller)

    monkeypatch.setattr(RunView, "follow", follow_and_keep)
    operator.start()
    result = trainer(tmp_path / "a", epochs=10_000).fit()
    operator.join()
    (worker,) = operator.status.workers
    assert (operator.status.state, operator.status.num_workers, worker.state) == (
        "training",
        1,
        "training",
    )
    assert 0 < worker.local_step <= result.metrics["samples"]
    assert worker.step_s > 0
    assert operator.refusals == [
        "w0 is the run's only process (--workers 0); to end the run, interrupt it",
        f"{tmp_path}/a has no worker 'w1'; it has w0",
    ]
    assert read_status(operator.folder).state == "stopped by a person"
    assert result.stopped_by == "a person"


class BrokenTask(Classification):
    """A task that fails in its tenth step."""

    def loss(self, model, batch):
        self.num_calls = getattr(self, "num_calls", 0) + 1
        if self.num_calls == 10:
            raise ArithmeticError("the tenth step")
        return super().loss(model, batch)


def test_the_status_of_a_failed_run_has_the_reason(tmp_path):
    failing = trainer(tmp_path / "a")
    failing.task = BrokenTask("lenet")
    with pytest.raises(ArithmeticError, match="the tenth step"):
        failing.fit()
    assert read_status(str(tmp_path / "a")).state == "failed: ArithmeticError: the tenth step"


def test_the_status_of_a_run_that_can_not_start_has_the_reason(tmp_path, monkeypatch):
    def no_room(job, dataset, prepare, non_trainable, storage):
        raise ResourceError("this machine holds 1")

    monkeypatch.setattr("raydl.run.trainer._make_worker_group", no_room)
    with pytest.raises(ResourceError):
        trainer(tmp_path / "a").fit()
    assert read_status(str(tmp_path / "a")).state == "failed: this machine holds 1"


def test_the_status_of_a_complete_run_stays_when_it_can_not_be_resumed(tmp_path):
    trainer(tmp_path / "a", epochs=1).fit()
    before = (tmp_path / "a/status.json").read_bytes()
    with pytest.raises(ConfigError, match="the run is complete"):
        trainer(tmp_path / "a", epochs=1, resume=True).fit()
    assert (tmp_path / "a/status.json").read_bytes() == before


def test_a_resumed_run_continues_its_counts(tmp_path):
    trainer(tmp_path / "a", epochs=1).fit()
    first = read_status(str(tmp_path / "a"))
    trainer(tmp_path / "a", epochs=2, resume=True).fit()
    second = read_status(str(tmp_path / "a"))
    assert (second.state, second.progress.epoch, second.progress.generation) == ("finished", 2.0, 2)
    assert second.progress.num_samples == 2 * first.progress.num_samples
    assert second.progress.seconds > first.progress.seconds


def test_only_curves_and_history_travel_between_the_local_folder_and_the_storage(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "far").mkdir()
    far = tmp_path / "far" / "a"
    trainer("a", epochs=1, storage_path=f"file://{tmp_path}/far").fit()
    assert read_status(f"file://{far}").state == "finished"
    (events,) = far.glob("events.*")
    first = "history-00000001.jsonl"
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [events.name, first]
    assert (far / first).read_bytes() == (tmp_path / "a" / first).read_bytes()
    old = events.read_bytes()
    (tmp_path / "a").rename(tmp_path / "lost")
    trainer("a", epochs=2, storage_path=f"file://{tmp_path}/far", resume=True).fit()
    assert (tmp_path / "a" / events.name).read_bytes() == old
    local = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert local == sorted(p.name for kind in ("events", "history") for p in far.glob(f"{kind}*"))
    assert local[-2:] == [first, "history-00000002.jsonl"]
    assert read_status(f"file://{far}").state == "finished"


# the status, from controller and recorder


def test_without_a_controller_the_status_has_the_start_of_the_run():
    status = view().status()
    at = status.progress
    assert (status.state, at.round, at.generation, at.epoch) == ("starting", 12, 3, 1.5)
    assert (at.num_samples, at.seconds, status.wanted) == (150, 9.0, "2:3")
    assert (status.workers, status.events, status.center_accuracy) == ((), (), 0.75)


def recorder(accuracy):
    progress = Progress(round=20, epoch=2.5, num_samples=250)
    return SimpleNamespace(
        last=SimpleNamespace(progress=progress),
        center_accuracy=accuracy,
        center_loss=accuracy,
        seconds=11.0,
        checkpoint_at=1_000.0,
    )


def controller(*entries, state=State.TRAINING, outcome=None, stop_reason=""):
    return SimpleNamespace(
        state=state, outcome=outcome, stop_reason=stop_reason, ended_because="",
        generation=5, num_workers=2, workers=[*entries],
    )  # fmt: skip


def test_a_run_that_starts_again_by_itself_shows_its_new_start():
    of_run = view()
    again = replace(START, progress=replace(START.progress, round=7))
    of_run.start_again(again, seconds_before=11.0)
    status = of_run.status()
    assert (status.state, status.progress.round, status.progress.seconds) == ("starting", 7, 11.0)
    assert status.center_accuracy == 0.75


def test_with_controller_and_recorder_the_status_is_their_newest():
    run_view = view()
    run_view.follow_recorder(recorder(0.5), EventLog(Silent()))
    run_view.follow(controller(Worker("w4", Phase.STARTING, 0.0)))
    status = run_view.status()
    assert (status.state, status.progress.generation, status.num_workers) == ("training", 5, 2)
    at = status.progress
    assert (at.round, at.epoch, at.seconds, status.center_accuracy) == (20, 2.5, 11.0, 0.5)
    assert [w.worker_id for w in status.workers] == ["w4"]


@pytest.mark.parametrize("accuracy", [math.nan, math.inf, None])
def test_no_accuracy_is_none_and_the_status_is_plain_json(accuracy):
    run_view = view()
    run_view.follow_recorder(recorder(accuracy), EventLog(Silent()))
    status = run_view.status()
    assert (status.center_accuracy, status.center_loss) == (None, None)
    assert json.dumps(asdict(status), allow_nan=False)


def test_numbers_of_numpy_become_plain_numbers():
    run_view = view()
    numbers = recorder(np.float32(0.5))
    numbers.last.progress = Progress(round=np.int64(20), num_samples=np.int64(250))
    run_view.follow_recorder(numbers, EventLog(Silent()))
    assert json.loads(to_json(run_view.status()))["num_samples"] == 250


def test_a_run_whose_last_files_are_written_has_not_finished_yet():
    run_view = view()
    run_view.follow(controller(state=State.DONE, outcome=Outcome.FINISHED))
    assert run_view.status().state == "finishing"
    assert not run_view.status().is_final
    assert run_view.end().state == "finished"
    assert (run_view.end().num_workers, run_view.end().is_final) == (0, True)


def test_a_run_that_was_stopped_names_the_signal():
    run_view = view()
    stopped = controller(state=State.DONE, outcome=Outcome.STOPPED, stop_reason="SIGTERM")
    run_view.follow(stopped)
    assert run_view.end().state == "stopped by SIGTERM"


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RaydlError("a sentence\nin two lines"), "failed: a sentence in two lines"),
        (ValueError("17"), "failed: ValueError: 17"),
        (ValueError(), "failed: ValueError"),
        (Exception("ray::f()\n  File a\nKeyError: 'x'\n"), "failed: KeyError: 'x'"),
        (KeyboardInterrupt(), "stopped by SIGINT at once, without a last checkpoint"),
        (SystemExit(15), "stopped by SIGTERM at once, without a last checkpoint"),
        (SystemExit(143), "stopped by SIGTERM at once, without a last checkpoint"),
        (SystemExit(129), "stopped by SIGHUP at once, without a last checkpoint"),
    ],
)
def test_an_error_becomes_one_line(error, state):
    assert end_state(error) == state


def test_a_second_signal_is_reported_by_the_name_of_the_first():
    state = end_state(KeyboardInterrupt(), stop_reason="SIGTERM")
    assert state == "stopped by SIGTERM at once, without a last checkpoint"


# workers


def worker_report(**figures):
    parts = dict.fromkeys(TIME_PARTS, 0.0) | {"device_device_parameters": 7.5}
    return WorkerReport("w2", 9, (), (), parts, **figures)


def test_the_status_of_a_worker_has_its_figures_and_the_end_of_its_nodes_id():
    entry = Worker("w2", Phase.TRAINING, 10.0, node="f" * 51 + "00002", in_loop=True)
    entry.report = worker_report(local_step=90, step_s=0.02)
    status = worker_status(entry, 14.0)
    assert status == WorkerStatus("w2", "training", "fff00002", 90, 9, 0.02, 7.5, 4.0)


def test_the_status_of_a_worker_without_a_report_has_zeros():
    status = worker_status(Worker("w2", Phase.STARTING, 10.0), 11.0)
    assert status == WorkerStatus("w2", "starting", "", 0, 0, 0.0, 0.0, 1.0)


def test_a_worker_between_two_generations_is_ready_since_its_last_change_of_state():
    entry = Worker("w2", Phase.TRAINING, 10.0, moved_at=30.0, in_loop=False)
    status = worker_status(entry, 32.0)
    assert (status.state, status.since_s) == ("ready", 2.0)


def test_a_figure_that_is_no_number_becomes_zero():
    entry = Worker("w2", Phase.TRAINING, 10.0, report=worker_report(step_s=math.nan), in_loop=True)
    assert worker_status(entry, 11.0).step_s == 0.0


# events


class EventCollector(Silent):
    def __init__(self):
        self.sentences = []

    def event(self, sentence):
        self.sentences.append(sentence)


def test_the_newest_eight_events_are_kept_with_their_time():
    now, reporter = [0.0], EventCollector()
    log = EventLog(reporter, clock=lambda: now[0])
    for number in range(10):
        now[0] = 3600.0 * (number == 9) + 65.0
        log.event(f"event {number}")
    assert len(log.lines) == 8
    assert log.lines[0] == "0:01:05 event 2"
    assert log.lines[-1] == "1:01:05 event 9"
    assert reporter.sentences == [f"event {n}" for n in range(10)]


# the loop and the control channel


class FakeController:
    """A controller that is done after three steps."""

    def __init__(self, state=State.TRAINING):
        self.state, self.removed, self.num_steps = state, [], 0
        self.num_workers, self.generation, self.stop_reason = 1, 1, ""
        self.outcome, self.workers = None, []

    def step(self):
        self.num_steps += 1
        return self.num_steps > 3

    def note_refused(self, process, refused):
        self.refused = refused

    def remove(self, worker_id):
        self.removed.append(worker_id)
        return True, f"{worker_id} leaves"


class FakeChannel:
    """A control channel with a request and a problem at the first step."""

    storage = SimpleNamespace(root="runs/x", unanswered=lambda: (0.0, ""))

    def __init__(self):
        self.requests, self.problem = [Request("r1", "w1")], "the folder failed"
        self.answers, self.reported = [], []

    def report(self, status, *, at_once=False):
        self.reported.append(status().state)

    def pop_requests(self):
        taken, self.requests = self.requests, []
        return taken

    def answer(self, request, sentence, *, ok):
        self.answers.append((request.id, sentence, ok))

    def pop_problem(self):
        problem, self.problem = self.problem, None
        return problem


class Epoch:
    """A driver epoch that is over after a number of checks."""

    def __init__(self, num_left=100):
        self.num_left = num_left

    def raise_if_over(self):
        self.num_left -= 1
        if self.num_left <= 0:
            raise SupersededError("runs/x", 1, 2, "process 7 on b since 2026")


def test_a_superseded_driver_ends_at_the_next_step():
    controller, reporter = FakeController(), EventCollector()
    reporter.checkpoints = SimpleNamespace(num_late=0)
    with pytest.raises(SupersededError) as caught:
        run_to_end(
            controller, reporter, FakeChannel(), view(), config=TrainConfig(), epoch=Epoch(2)
        )
    assert controller.num_steps == 2
    assert str(caught.value) == (
        "runs/x: process 7 on b since 2026 has taken over the run as driver epoch 2; "
        "this driver, of epoch 1, ends and changes nothing there"
    )


def test_between_two_steps_requests_are_answered_and_problems_are_logged():
    controller, control_channel, reporter = FakeController(), FakeChannel(), EventCollector()
    reporter.checkpoints = SimpleNamespace(num_late=2)
    run_to_end(controller, reporter, control_channel, view(), config=TrainConfig(), epoch=Epoch())
    assert controller.removed == ["w1"]
    assert controller.refused == {"checkpoints": 2}
    assert control_channel.answers == [("r1", "w1 leaves", True)]
    assert reporter.sentences == ["the folder failed"]
    assert control_channel.reported == ["training"] * 4


@pytest.mark.parametrize("state", [State.FINISHING, State.DONE])
def test_a_run_that_is_ending_removes_no_worker(state):
    controller = FakeController(state)
    ok, sentence = remove(controller, "w1", config=TrainConfig())
    assert (ok, sentence) == (False, "the run is about to end, and w1 with it")
    assert controller.removed == []


def test_a_control_channel_is_closed_however_the_run_ends(tmp_path):
    for number, error in enumerate([RaydlError("one"), KeyboardInterrupt(), None]):
        storage = Storage(str(tmp_path / str(number)))
        with suppress(RaydlError, KeyboardInterrupt), open_control_channel(storage, view()):
            if error:
                raise error
    states = [read_status(str(tmp_path / str(n))).state.split()[0] for n in range(3)]
    assert states == ["failed:", "stopped", "finished"]
