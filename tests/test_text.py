"""Times, measurements and tables as text."""

import pytest

from raydl.config import dotted
from raydl.text.formatting import (
    clock_text,
    escape_controls,
    loss_text,
    markdown_table,
    seconds_text,
    settings_table,
)


@pytest.mark.parametrize(
    ("seconds", "text", "short"),
    [
        (0, "0:00:00", "0:00"),
        (59.6, "0:01:00", "1:00"),
        (65, "0:01:05", "1:05"),
        (3599.4, "0:59:59", "59:59"),
        (3599.6, "1:00:00", "1:00:00"),
        (3723, "1:02:03", "1:02:03"),
        (100_000, "27:46:40", "27:46:40"),
    ],
)
def test_a_time_of_a_run_is_rounded_before_it_is_cut_into_hours(seconds, text, short):
    assert (clock_text(seconds), clock_text(seconds, is_short=True)) == (text, short)


def test_a_measured_time_has_three_figures_and_the_unit_that_suits_them():
    seconds = [0.0, 20e-6, 999.9e-6, 0.00335, 0.9996, 1.5, 999.4, 999.6, 12_345.6]
    assert [seconds_text(s) for s in seconds] == [
        "0 us", "20 us", "1 ms", "3.35 ms", "1 s", "1.5 s", "999 s", "1,000 s", "12,346 s"
    ]  # fmt: skip


def test_a_loss_that_has_diverged_stays_readable():
    assert [loss_text(loss) for loss in (0.05123, -3.0, 9999.9, 4.167e20, float("inf"))] == [
        "0.0512", "-3.0000", "9999.9000", "4.17e+20", "inf"
    ]  # fmt: skip


def test_no_content_of_a_cell_breaks_a_table():
    text = markdown_table(("who", "why"), [("w1", "a | b\nc\r\nd"), ("w2",), (3, None)])
    assert text.splitlines() == [
        "| who | why |",
        "| --- | --- |",
        "| w1 | a \\| b c d |",
        "| w2 |  |",
        "| 3 | None |",
    ]


def test_settings_become_a_table_of_dotted_names():
    text = settings_table(dotted({"data": "digits", "method": {"beta": 0.9}, "empty": {}}))
    assert "| `method.beta` | 0.9 |" in text
    assert "| `empty` | {} |" in text


def test_a_setting_with_a_bar_stays_one_cell():
    assert "| `data` | s3://a\\|b |" in settings_table({"data": "s3://a|b"})


def test_control_characters_are_shown_as_escapes():
    text = "cat\x1b[2J\r\x9b31m\u202edog\tand\nmore \u00e9\u4e2d"
    assert escape_controls(text) == "cat\\x1b[2J\\r\\x9b31m\\u202edog\\tand\nmore \u00e9\u4e2d"
