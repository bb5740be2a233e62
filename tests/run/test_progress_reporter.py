"""The progress of a run fits the terminal and shows all values."""

import dataclasses
import io
import json
import logging

import pytest
from rich.console import Console

from raydl.core.progress import Progress
from raydl.metrics import TimeParts, communication_share
from raydl.run.progress_reporter import JsonLines, PlainLines, ProgressView, panel
from raydl.run.view import EventLog

VIEW = ProgressView(
    state="training",
    elapsed_s=75.0,
    progress=Progress(generation=3, epoch=1.5, num_samples=90_000, local_step=700),
    num_epochs=5,
    num_steps=None,
    share_done=0.3,
    samples_per_s=4200.0,
    train_loss=0.104,
    center_accuracy=0.9861,
    center_loss=0.0512,
    workers={"training": 3, "starting": 1, "left out": 1},
    wanted_workers="2:8",
    communication_share=0.06,
)
NOTHING = dataclasses.replace(
    VIEW,
    samples_per_s=None,
    train_loss=None,
    center_accuracy=None,
    center_loss=None,
    communication_share=None,
    share_done=0.0,
)


def rendered(view, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(panel(view, "generation 3: w1 joins " + "x" * 200))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("view", [VIEW, NOTHING])
def test_the_panel_fits_the_terminal(view, width):
    lines = rendered(view, width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 8


def test_the_panel_shows_all_values():
    text = rendered(VIEW, 80)
    values = ["training", "epoch 1.5/5", "90,000", "4,200/s", "0.1040", "98.61%", "2:8"]
    values += ["3 training, 1 starting, 1 left out", "generation 3: w1 joins"]
    for value in [*values, "6.0%", "1:15", "30%", "left 0:50"]:
        assert value in text, value
    assert "-/s" in rendered(NOTHING, 80)
    assert "loss 0.0512" not in text
    assert "loss 0.0512" in rendered(dataclasses.replace(VIEW, center_accuracy=None), 80)
    assert "epoch 1.5 " in rendered(dataclasses.replace(VIEW, num_epochs=None), 80)


def update_each_second(reporter, now, num_seconds):
    for second in range(num_seconds):
        now[0] = float(second)
        reporter.update(VIEW)


def test_plain_lines_are_printed_every_few_seconds_and_at_a_new_accuracy():
    now = [0.0]
    console = Console(file=io.StringIO(), width=200)
    plain = PlainLines(console, clock=lambda: now[0])
    update_each_second(plain, now, 12)
    now[0] = 12.5
    plain.update(dataclasses.replace(VIEW, center_accuracy=0.99))
    plain.event("w1 joins")
    lines = console.file.getvalue().splitlines()
    assert [line.split("]")[0] for line in lines] == ["[0:00", "[0:05", "[0:10", "[0:12", "[0:12"]
    assert "center 99.00%" in lines[3]
    assert "workers 3 (1 starting, 1 left out)" in lines[3]
    assert lines[4] == "[0:12] w1 joins"


def test_the_communication_share_by_hand():
    parts = {
        **TimeParts().as_dict(),
        "initialization": 100.0,
        "forward_backward": 6.0,
        "device_device_parameters": 1.0,
        "host_device_data": 2.0,
        "host_device_parameters": 1.0,
    }
    assert communication_share(parts) == 0.4
    assert communication_share(TimeParts().as_dict()) == 0.0


def test_json_lines_have_all_events_and_the_progress_every_few_seconds():
    now = [0.0]
    console = Console(file=io.StringIO(), width=40)
    lines = JsonLines(console, clock=lambda: now[0])
    update_each_second(lines, now, 7)
    lines.event('w1 "joins"')
    first, second, event = map(json.loads, console.file.getvalue().splitlines())
    assert first["num_samples"] == second["num_samples"] == 90_000
    assert first["workers"] == {"training": 3, "starting": 1, "left out": 1}
    assert first["center_accuracy"] == 0.9861
    assert event["event"] == 'w1 "joins"'
    assert event["logger"] == "raydl"


def test_events_reach_the_logger_of_the_package():
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("raydl")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        EventLog(PlainLines(Console(file=io.StringIO()))).event("s3://KEY:SECRET@b is 100% full")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert messages == ["s3://b is 100% full"]
