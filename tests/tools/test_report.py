"""The report of a run is one page with the content of its folder and no external resources."""

import json
import re
from html import unescape

import pytest
from pyarrow import fs
from run_pages import CONFIG, PageParser, facts_of, formed, write_run

from raydl import cli, storage
from raydl.errors import ConfigError, DataError
from raydl.metrics import STACK, TIME_PARTS
from raydl.tools.report import make_page, read_run, with_unique_names, write_report
from raydl.tools.report.curves import samples_at
from raydl.tools.report.events import Curve, History, LoggedEvent
from raydl.tools.report.html import element, table
from raydl.tools.report.sections import byte_size, duration, headline
from raydl.tools.report.style import CSS

# the page of a run, parsed as in a browser


def test_the_parser_detects_a_tag_that_is_not_closed():
    with pytest.raises(AssertionError):
        PageParser("<p><b>words</p>")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a tiny run without Ray."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    command = f"train --data digits --workers 0 --model mlp --epochs 3 --run-dir {folder}"
    assert cli.main([*command.split(), "--run.progress", "none"]) == 0
    return folder


@pytest.fixture(scope="module")
def page(run):
    return make_page([read_run(str(run))])


def test_the_page_of_a_run_is_well_formed_and_fetches_nothing(page):
    walk = PageParser(page)
    assert walk.fetched == []
    assert not {"script", "link", "img", "iframe", "object"} & set(walk.tags)
    assert not re.search(r"url\(|@import|https?://", page)
    assert "default-src 'none'" in unescape(page)


def test_the_page_of_a_run_has_its_headline(run, page):
    result = json.loads((run / "result.json").read_text())
    text = PageParser(page).text
    assert text.startswith("tiny tiny sync-easgd · mlp · digits")
    assert f"Center accuracy {result['center_accuracy']:.2%}" in text
    assert f"Samples {result['samples']:,} 3.0 epochs" in text
    assert f"Training time {result['seconds']:.1f} s" in text
    assert "Ended finished" in text


def test_the_page_of_a_run_has_every_section_and_every_curve(page):
    text = PageParser(page).text
    for title in (
        "Test accuracy of the center, over samples", "Test accuracy of the center, over time",
        "Training loss, over samples", "Training loss, over time", "Samples per second, over time",
        "Workers that train, over time", "Where the time went", "Exchange", "Workers",
        "Seconds of a local step, over time", "Membership", "Faults that fired", "Checkpoints",
        "Configuration", "All settings", "Versions",
    ):  # fmt: skip
        assert title in text, title
    for part, sentence in TIME_PARTS.items():
        assert part.replace("_", " ") in text
        assert sentence in text
    assert "w0 starts" in text


def test_the_page_of_a_run_has_all_its_settings_and_versions(run, page):
    written = json.loads((run / "config.json").read_text())
    text = PageParser(page).text
    assert f"training.seed {written['config']['training']['seed']}" in text
    assert "method.name sync-easgd" in text
    assert f"torch {written['versions']['torch']}" in text
    if written["commit"]:
        assert written["commit"] in text


def test_the_command_writes_into_the_folder_of_the_run(run, capsys):
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == f"{run}/report.html"
    PageParser((run / "report.html").read_text())


def test_the_key_of_a_time_part_has_the_color_of_its_bar_and_of_the_style_sheet(page):
    for part, color in STACK.items():
        assert page.count(f"fill:var(--{part})") == 2
        assert f"  --{part}: {color};" in CSS
    assert CSS.index("--initialization") < CSS.index("prefers-color-scheme: dark")


def test_every_color_of_the_page_is_in_the_style_sheet(page):
    names = set(re.findall(r"var\(--(\w+)\)", page))
    assert names == {name for name in names if f"  --{name}: " in CSS}


def test_the_charts_of_a_page_share_no_ids(page):
    assert " id=" not in page


def test_the_page_of_a_run_is_the_same_each_time(run):
    first, second = (make_page([read_run(str(run))], now=0.0) for _ in range(2))
    assert first == second


def test_every_chart_has_a_label_for_screen_readers(page):
    pictures = re.findall(r"<svg [^>]*>", page)
    assert all('role="img" aria-label="' in p or 'aria-hidden="true"' in p for p in pictures)
    for title in re.findall(r"<figcaption>(.+?)</figcaption>", page):
        assert f'aria-label="{title}"' in page


# arguments of the command


def test_a_folder_without_a_run_gives_one_sentence(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    error = capsys.readouterr().err
    assert "contains no run, config.json is missing" in error
    assert error.count("\n") == 1


def test_the_error_for_a_folder_of_runs_names_the_runs(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    with pytest.raises(DataError, match=r"name one or several of the runs in it: a, b$"):
        read_run(str(tmp_path))


def test_the_folders_above_a_page_are_created(tmp_path):
    write_run(tmp_path / "a")
    out = str(tmp_path / "pages/of/a.html")
    assert write_report([str(tmp_path / "a")], out=out) == out
    PageParser((tmp_path / "pages/of/a.html").read_text())


def test_a_missing_argument_gives_one_sentence(capsys):
    assert cli.main(["report"]) == 2
    assert "needs a run" in capsys.readouterr().err


def test_a_damaged_configuration_gives_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json is damaged"):
        read_run(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DataError, match="is not of raydl"):
        read_run(str(tmp_path))


def test_a_page_that_can_not_be_written_gives_one_sentence(tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([str(tmp_path / "a")], out=str(tmp_path / "file/report.html"))
    with pytest.raises(ConfigError, match="must be a file"):
        write_report([str(tmp_path / "a")], out=f"{tmp_path}/")


# runs made by hand


def test_the_page_says_that_event_files_are_missing(tmp_path):
    text = PageParser(make_page([read_run(str(write_run(tmp_path / "a")))])).text
    assert "Event files are missing: there are no curves" in text
    assert "The folder has no history: there are no memberships to show." in text
    assert "Center accuracy 75.00%" in text
    assert "No membership was recorded" in text


def test_the_page_of_a_running_run_has_its_last_reported_state(tmp_path):
    folder = write_run(tmp_path / "a", state="training", result={"samples": 7})
    text = PageParser(make_page([read_run(str(folder))])).text
    assert "not ended: training, last reported at 1970-01-01 00:00:00 UTC" in text
    assert "written no result yet" in text
    assert "1,234" in text, "the result is of an earlier start"


def test_the_page_of_a_failed_run_says_why_it_failed(tmp_path):
    folder = write_run(tmp_path / "a", state="failed: the loss became NaN")
    assert "failed: the loss became NaN" in PageParser(make_page([read_run(str(folder))])).text


@pytest.mark.parametrize(
    ("state", "samples"), [("failed: the loss became NaN", 1234), ("finished", 640)]
)
def test_the_result_of_an_earlier_start_is_not_shown(tmp_path, state, samples):
    result = {"samples": samples, "center_accuracy": 0.99}
    folder = write_run(tmp_path / "a", state=state, result=result)
    text = PageParser(make_page([read_run(str(folder))])).text
    assert "Samples 1,234" in text
    assert "Center accuracy 75.00%" in text
    assert "written no result yet" in text


def test_the_result_of_the_newest_start_is_shown(tmp_path):
    result = {"samples": 1234, "center_accuracy": 0.99}
    run = read_run(str(write_run(tmp_path / "a", state="stopped by raydl stop", result=result)))
    assert run.figure("center_accuracy") == 0.99


def test_the_score_of_an_earlier_center_is_not_that_of_the_last_one(tmp_path):
    result = {"samples": 1234, "center_accuracy": None, "center_loss": None}
    run = read_run(str(write_run(tmp_path / "a", result=result)))
    assert run.figure("center_accuracy") is None
    assert run.figure("center_loss") is None


def test_damaged_files_are_named_and_the_others_are_shown(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "result.json").write_text("{")
    (folder / "status.json").write_text("[]")
    (folder / "events.out.tfevents.1").write_bytes(b"\xff" * 64)
    (folder / "checkpoints/round-1").mkdir(parents=True)
    (folder / "checkpoints/round-1/manifest.json").write_text("[]")
    text = PageParser(make_page([read_run(str(folder))])).text
    assert "result.json cannot be read" in text
    assert "status.json cannot be read" in text
    assert "round-1" in text


def test_invalid_figures_are_shown_as_dashes(tmp_path):
    result = {"center_accuracy": float("nan"), "samples": "many", "time_parts": 3, "allreduce": 1}
    folder = write_run(tmp_path / "a", result=result)
    assert "Center accuracy -" in PageParser(make_page([read_run(str(folder))])).text


def test_the_warnings_of_a_run_are_below_the_head_of_its_page(tmp_path):
    said = "the training has diverged: it began with a training loss of 2.3"
    folder = write_run(tmp_path / "a", result={"warnings": [said, 7]})
    text = PageParser(make_page([read_run(str(folder))])).text
    assert said in text
    assert text.index("Training time") < text.index(said) < text.index("Configuration")


def test_the_mean_of_centers_has_a_tile_if_it_is_scored(tmp_path):
    scores = {"samples": 9, "seconds": 1.0, "accuracy": 0.5, "loss": 0.7}
    mean = {"averaged_accuracy": 0.625, "averaged_loss": 0.375, "averaged_centers": 5.0}
    folder = write_run(tmp_path / "a", result={"evaluations": [{**scores, **mean}]})
    assert "Mean of 5 centers 62.50% loss 0.375" in PageParser(headline(read_run(str(folder)))).text
    folder = write_run(tmp_path / "b", result={"evaluations": [scores]})
    assert "Mean of" not in PageParser(headline(read_run(str(folder)))).text


def test_without_event_files_the_curve_is_made_from_the_result(tmp_path):
    scores = [{"samples": n, "seconds": n / 10, "accuracy": n / 100} for n in (10, 20)]
    folder = write_run(tmp_path / "a", result={"evaluations": [*scores, {"samples": 30}, 7]})
    curve = read_run(str(folder)).curve("center/accuracy")
    assert curve == Curve((10, 20), (1.0, 2.0), (0.1, 0.2))


def test_hostile_names_are_escaped():
    hostile = "<script>alert('x')</script>\"&"
    events = (LoggedEvent(f"generation 1: {hostile}", 1, 0, 0.0),)
    curves = {
        "center/accuracy": Curve((1, 2), (1.0, 2.0), (0.1, 0.2)),
        f"worker_step_s/{hostile}": Curve((1,), (1.0,), (0.1,)),
        "workers/count": Curve((1,), (1.0,), (2.0,)),
        "workers/generation": Curve((1,), (1.0,), (1.0,)),
    }
    manifest = {"format": 2, "round": 1, "generation": 1, "num_samples": 1, "seconds": 1.0}
    manifest |= {"workers": [hostile], "files": {hostile: {"bytes": 1, "crc32": 1}}}
    run = facts_of(
        hostile,
        config={hostile: hostile, "method.name": hostile},
        versions={hostile: hostile},
        commit=hostile,
        result={
            "faults_fired": [hostile],
            "allreduce": {"algorithm": hostile},
            "warnings": [hostile],
        },
        history=History(curves, events, num_starts=1),
        lines=(formed(1, [hostile], hostile),),
        checkpoints=((hostile, manifest),),
        notes=(hostile,),
    )
    for page in (make_page([run]), make_page([run, facts_of("b")])):
        walk = PageParser(page)
        assert "script" not in walk.tags
        assert hostile in walk.text
        assert "<script" not in page


# long runs


def long_run(num_generations):
    """Return a run in which a worker is replaced every 30 s."""
    events, lines = [], []
    for number in range(1, num_generations + 1):
        reason = f"w{number} was lost, w{number + 8} joins"
        events.append(LoggedEvent(f"generation {number}: {reason}", 1, 640 * number, 30.0 * number))
        workers = tuple(f"w{number + i}" for i in range(1, 9))
        at = {"seconds": 30.0 * number, "samples": 640 * number}
        lines.append(formed(number, workers, reason, **at))
    curve = Curve((1, 640 * num_generations), (1.0, 30.0 * num_generations), (8.0, 8.0))
    history = History({"workers/count": curve}, tuple(events), num_starts=1)
    return facts_of("long", history=history, lines=tuple(lines))


def test_the_page_of_a_run_with_thousands_of_generations_stays_small():
    short, long = (make_page([long_run(count)]) for count in (2000, 10_000))
    assert len(long) < 1.1 * len(short)
    text = PageParser(long).text
    assert "The first and the last 500 of 10,000 generations" in text
    assert "The first and the last 500 of 10,000 events" in text
    assert "w1 was lost" in text
    assert "w10000 was lost" in text


def test_with_too_many_workers_for_a_chart_their_spread_is_drawn():
    step = Curve((1, 2), (1.0, 2.0), (0.1, 0.2))
    curves = {f"worker_{n}_s/w{i}": step for i in range(17) for n in ("step", "waited")}
    whiches = ("least", "median", "most")
    curves |= {f"workers/{n}_{w}": step for n in ("step_s", "waited_s") for w in whiches}
    text = PageParser(make_page([facts_of("many", history=History(curves, num_starts=1))])).text
    assert "Seconds of a local step: least, median and most of all workers, over time" in text
    assert "Seconds waited in a round: least, median and most of all workers, over time" in text


def test_samples_at_a_moment_are_interpolated():
    curve = Curve((100, 300), (1.0, 3.0), (0, 0))
    assert [samples_at(curve, s) for s in (0, 0.5, 1, 2, 3, 9)] == [0, 50, 100, 200, 300, 300]


# several runs


def test_several_runs_share_charts_below_a_table(tmp_path, run):
    other = write_run(tmp_path / "other", config={**CONFIG, "model": "mlp:Deep"})
    out = write_report([str(run), str(other)], out=str(tmp_path / "both.html"))
    page = (tmp_path / "both.html").read_text()
    assert out == str(tmp_path / "both.html")
    walk = PageParser(page)
    assert walk.text.startswith("2 runs compared 2 runs compared run method center samples")
    assert "Settings that differ" in walk.text
    assert "mlp:Deep" in walk.text
    assert walk.tags.count("section") == 2


def test_each_run_has_its_own_line_and_color():
    curves = {"center/accuracy": Curve((1, 2), (1.0, 2.0), (0.1, 0.2))}
    runs = [facts_of(f"run-{i}", history=History(curves)) for i in range(10)]
    page = make_page(runs)
    lines = re.findall(r'style="([^"]*stroke:var\(--c0\)[^"]*)"', page)
    assert sorted("stroke-dasharray" in style for style in lines) == [False, False, True, True]
    assert "run-9: 20% at 2" in page


def test_runs_with_the_same_name_are_named_by_their_folder():
    runs = [facts_of(root="x/a"), facts_of(root="y/a"), facts_of("b")]
    assert [run.name for run in with_unique_names(runs)] == ["x/a", "y/a", "b"]


def test_a_run_may_be_given_by_a_uri(tmp_path):
    folder = write_run(tmp_path / "a")
    assert write_report([f"file://{folder}"]) == f"file://{folder}/report.html"
    assert "<h1>a</h1>" in (folder / "report.html").read_text()


def test_the_query_of_a_uri_stays_at_its_end_and_is_not_in_the_title(tmp_path, monkeypatch):
    query = "?endpoint_override=localhost%3A9000&scheme=http"

    def open_here(uri):
        base, _, options = uri.partition("?")
        assert f"?{options}" == query
        return fs.LocalFileSystem(), base.replace("s3://bucket", str(tmp_path))

    monkeypatch.setattr(storage, "open_filesystem", open_here)
    folder = write_run(tmp_path / "runs/first")
    run = f"s3://bucket/runs/first{query}"
    assert write_report([run]) == f"s3://bucket/runs/first/report.html{query}"
    assert "<h1>first</h1>" in (folder / "report.html").read_text()
    out = f"s3://bucket/pages/one.html{query}"
    assert write_report([run, f"s3://bucket/runs/first/{query}"], out=out) == out
    assert "<h1>first</h1>" in (tmp_path / "pages/one.html").read_text()
    with pytest.raises(ConfigError, match="must be a file"):
        write_report([run], out=f"s3://bucket/pages/{query}")


def test_the_page_has_no_credentials_of_uris():
    uri = "s3://KEY:SE'C@RET@bucket/runs"
    events = (LoggedEvent(f"the checkpoint is at {uri}/a", 1, 0, 0.0),)
    run = facts_of(
        f"{uri}/a",
        config={"run.storage_path": uri, "data": f"{uri}?mail=me@here"},
        history=History({}, events, num_starts=1),
        notes=(f"{uri} does not answer.",),
    )
    for page in (make_page([run]), make_page([run, facts_of("b")])):
        assert "KEY" not in page
        assert "RET" not in page
        assert "s3://bucket/runs/a" in page
        assert "s3://bucket/runs?mail=me@here" in page


def test_a_run_has_the_name_of_its_folder_even_from_inside(tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "a"))
    assert read_run(".").name == "a"


def test_a_run_given_twice_is_reported_once(tmp_path):
    folder = write_run(tmp_path / "a")
    assert write_report([str(folder), f"{folder}/"]) == f"{folder}/report.html"


# text


def test_a_timeline_of_very_many_generations_is_folded():
    lines = tuple(formed(i, [f"w{i}"], f"w{i} joins") for i in range(100))
    text = PageParser(make_page([facts_of(lines=lines)])).text
    assert "All generations (100)" in text
    assert "w99 joins" in text


def test_text_in_an_element_is_escaped():
    assert element("p", "<b>", element("i", 3), None) == "<p>&lt;b&gt;<i>3</i></p>"
    assert element("a", class_='"', stroke_width=2, x=None) == (
        '<a class="&quot;" stroke-width="2"></a>'
    )
    assert "<td>&lt;x&gt;</td>" in table(["a"], [["<x>"]])


def test_times_and_sizes_have_readable_units():
    assert [duration(s) for s in (None, 4.94, 99.96, 123, 605, 3599.4, 3599.6, 3723)] == [
        "-", "4.9 s", "1:40 min", "2:03 min", "10:05 min", "59:59 min", "1:00:00 h", "1:02:03 h"
    ]  # fmt: skip
    assert [byte_size(n) for n in (None, 12, 1048, 3.45e6, 2e9)] == [
        "-", "12 bytes", "1.05 kB", "3.45 MB", "2 GB"
    ]  # fmt: skip
