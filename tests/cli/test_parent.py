"""A command that drives a run has a small parent, so that it never ends without a word."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import environment_of, processes_that

BOUND_S = 60
PROGRAM = """
import atexit, os, signal, sys, time
from raydl.cli import run_to_exit

def command():
{body}

sys.exit(run_to_exit(command))
"""
COUNTING = """
arrived = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: arrived.append(signal.Signals(number).name))
print("ready", flush=True)
deadline = time.monotonic() + 30
while not arrived and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.5)  # a second delivery would come by now
print(*arrived, flush=True)
return 0
"""

pytestmark = pytest.mark.processes


def start(body, *prefix, env=None):
    """Start a program whose command has these lines, in a process group of its own."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", PROGRAM.format(body=lines)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **(env or {})},
    )  # fmt: skip


def end_of(body):
    """Return (exit status, output, errors) of a program whose command has these lines."""
    process = start(body)
    output, errors = process.communicate(timeout=BOUND_S)
    return process.returncode, output, errors


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("os._exit(1)", "ended with exit status 1"),
        ("os._exit(0)", "ended with exit status 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("os.abort()", "was ended by SIGABRT"),
        ("os.kill(os.getpid(), 40)", "was ended by signal 40"),
    ],
)
def test_an_end_without_a_final_status_is_75_and_one_sentence(how, said):
    status, output, errors = end_of(how)
    assert (status, output) == (75, "")
    assert errors.startswith(f"error: the driver {said} and said no more (")
    assert errors.endswith("--resume resumes from the last checkpoint, if one was written\n")
    assert errors.count("\n") == 1


def test_a_command_whose_streams_are_closed_has_others_that_lead_nowhere():
    body = (
        "ok = [os.fstat(n) for n in (0, 1, 2)] and sys.stdout and sys.stderr\nreturn 0 if ok else 3"
    )
    process = start(body, "sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    process.communicate(timeout=BOUND_S)
    assert process.returncode == 0


def test_a_low_limit_of_open_files_is_named():
    process = start("os._exit(1)", "sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
    _, errors = process.communicate(timeout=BOUND_S)
    assert process.returncode == 75
    assert "only 64 files may be open, so raise ulimit -n to 1024 or more" in errors


def test_what_ends_the_process_after_its_final_status_does_not_change_it():
    for end in ("os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)", "os.abort()"):
        body = f"atexit.register(lambda: {end})\nprint('error: wrong', file=sys.stderr)\nreturn 2"
        assert end_of(body) == (2, "", "error: wrong\n")


@pytest.mark.parametrize(
    ("body", "status", "last"),
    [
        ("return 0", 0, ""),
        ("return 3", 3, ""),
        ("sys.exit(4)", 4, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('a text')", 1, "a text"),
        ("raise ZeroDivisionError", 1, "ZeroDivisionError"),
    ],
)
def test_every_end_in_python_has_the_status_that_it_has_without_a_parent(body, status, last):
    code, _, errors = end_of(body)
    assert code == status
    assert (errors.splitlines() or [""])[-1] == last


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["parent", "group"])
def test_a_signal_to_the_parent_or_to_the_group_reaches_the_command_once(name, send):
    process = start(COUNTING)
    assert process.stdout.readline() == "ready\n"
    send(process.pid, signal.Signals[name])
    output, errors = process.communicate(timeout=BOUND_S)
    assert (process.returncode, output, errors) == (0, f"{name}\n", "")


def test_a_signal_that_is_sent_both_ways_at_once_reaches_the_command_once():
    process = start(COUNTING)  # timeout(1) signals its child, then the group
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=BOUND_S)[0] == "SIGTERM\n"


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_sigterm_and_sighup_end_a_command_that_still_starts_with_its_clean_up(name, status):
    process = start(
        "atexit.register(print, 'cleaned up')\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.Signals[name])
    assert process.communicate(timeout=BOUND_S) == ("cleaned up\n", "")
    assert process.returncode == status


def test_ctrl_c_while_a_command_is_imported_is_one_word_and_the_status_of_that_signal():
    process = start("print('ready', flush=True)\ntime.sleep(60)")
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=BOUND_S) == ("", "interrupted\n")
    assert process.returncode == 130


def test_the_parent_sees_the_end_of_the_command_also_if_its_starter_had_blocked_that_signal():
    block = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD}); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = start("return 3", sys.executable, "-c", block)
    try:
        process.communicate(timeout=BOUND_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 3


def test_a_command_under_nohup_outlives_its_terminal():
    process = start(
        "print('ready', flush=True)\ntime.sleep(1)\nprint('done')\nreturn 0",
        "sh", "-c", 'trap "" HUP; exec "$@"', "sh",
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGHUP)
    assert process.communicate(timeout=BOUND_S) == ("done\n", "")
    assert process.returncode == 0


def test_the_command_ends_with_a_parent_that_is_killed(tmp_path):
    mark = {"TEST_RUN": str(tmp_path)}
    process = start("print('ready', flush=True)\ntime.sleep(60)", env=mark)
    assert process.stdout.readline() == "ready\n"
    marked = f"TEST_RUN={tmp_path}"
    assert len(processes_that(lambda pid: marked in environment_of(pid))) == 2
    process.kill()
    process.wait(BOUND_S)
    deadline = time.monotonic() + BOUND_S
    while left := processes_that(lambda pid: marked in environment_of(pid)):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    process.communicate()


def test_the_parent_holds_no_large_library():
    body = "print(*sorted({'numpy', 'pyarrow', 'ray', 'torch', 'tyro'} & set(sys.modules)))"
    assert end_of(f"{body}\nreturn 0") == (0, "\n", "")


def test_a_command_without_output_keeps_its_status():
    process = start("return 3", "sh", "-c", 'exec "$@" >&- 2>&-', "sh")
    process.communicate(timeout=BOUND_S)
    assert process.returncode == 3


def test_text_that_waits_for_output_is_written_once():
    script = "import sys; from raydl.cli import run_to_exit; print('once', end='')"
    words = [sys.executable, "-c", f"{script}; sys.exit(run_to_exit(lambda: 0))"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "once"
