"""``make nightly`` runs each part, also after one has failed, and writes its page."""

import re
import sys

import pytest

from tests import nightly, seeds


def run(page, *parts, failing=(), output="12 passed in 3.45s"):
    def command(part):
        code = f"print('===== {output} ====='); raise SystemExit({int(part in failing)})"
        return sys.executable, "-c", code

    return nightly.main(parts, page=page, command_of=command)


@pytest.mark.processes
def test_a_part_that_fails_leaves_the_others_and_fails_the_whole(tmp_path, capfd):
    page = tmp_path / "nightly.md"
    assert run(page, failing=["soak"]) == 1
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `make")]
    assert len(rows) == len(nightly.PARTS)
    assert ["**failed**" in row for row in rows] == [part == "soak" for part in nightly.PARTS]
    pattern = r"\| passed \| \d+ \| \d{4}-\d\d-\d\d \| [0-9a-f]{10}.* \| 12 passed in 3.45s \|$"
    assert re.search(pattern, rows[0])
    assert run(page) == 0


@pytest.mark.processes
def test_one_part_keeps_the_results_of_the_others(tmp_path, capfd):
    page = tmp_path / "nightly.md"
    assert run(page, "soak", output="a | b") == 0
    first = nightly.read_page(page.read_text())
    assert first["soak"].last_line == r"a \| b"
    assert first["mutants"].outcome == "not run yet"
    assert run(page, "mutants") == 0
    second = nightly.read_page(page.read_text())
    assert second["soak"] == first["soak"]
    assert second["mutants"].outcome == "passed"


def test_a_part_that_does_not_exist_is_named(capsys):
    assert nightly.main(["soke"]) == 2
    assert (
        "no part soke; the parts are test-slow, soak, seeds, fuzz, mutants"
        in capsys.readouterr().err
    )


def test_each_part_is_a_target_of_the_makefile_and_has_its_row_on_the_page(root):
    makefile = (root / "Makefile").read_text()
    for part in nightly.PARTS:
        assert re.search(rf"^{part}:", makefile, flags=re.M), part
    text = (root / "docs/nightly.md").read_text()
    assert text == nightly.page_of(nightly.read_page(text))


class Unreachable(seeds.SimulatedRounds):
    """A simulated worker group that fails in its first poll."""

    def poll(self, timeout_s):
        raise ConnectionError("no  worker\nanswers")


def test_a_simulated_run_that_fails_is_named_with_what_repeats_it():
    first, second = seeds.broken_runs(7, kinds=[(Unreachable, 400)])
    assert first == "Unreachable, seed 7, to the end: ConnectionError: no worker answers"
    assert second.startswith("Unreachable, seed 7, stopped at ")


@pytest.mark.processes
def test_simulated_runs_that_end_as_they_should_are_counted(capfd):
    assert seeds.main(3, 2) == 0
    assert capfd.readouterr().out == "0 of 16 runs broken, seeds 3 to 4\n"
