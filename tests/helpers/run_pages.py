"""Folders of runs for the report, and a parser of its page."""

import dataclasses
import json
from html.parser import HTMLParser

from raydl.core.progress import Progress
from raydl.run.history import Line
from raydl.run.status import RunStatus, to_json
from raydl.tools.report.facts import RunFacts


class PageParser(HTMLParser):
    """Parses a page; keeps its tags, its text and the addresses that it would fetch."""

    def __init__(self, page):
        super().__init__()
        self.open, self.fetched, self.tags, self.words = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.fetched += [v for name, v in attributes if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


CONFIG = {"method": {"name": "sync-easgd"}, "model": "lenet", "data": "digits", "run": {}}


def write_run(folder, *, state="finished", result=None, config=CONFIG):
    """Write the folder of a run without event files."""
    folder.mkdir(parents=True)
    values = {"config": config, "versions": {"torch": "2"}, "commit": None}
    (folder / "config.json").write_text(json.dumps(values))
    status = RunStatus(
        state=state, num_workers=2, wanted="2",
        progress=Progress(generation=1, round=9, epoch=0.5, num_samples=1234, seconds=6.0),
        center_accuracy=0.75, workers=(), events=(), told_at=0.0,
    )  # fmt: skip
    (folder / "status.json").write_bytes(to_json(status))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def formed(number, worker_ids, why, *, start=1, seconds=0.0, samples=0):
    """Return the line of the history of a membership."""
    membership = {"generation": number, "worker_ids": [*worker_ids], "absent": []}
    return Line(start, seconds, samples, "Form", {"membership": membership, "why": why})


def facts_of(name="a", **changes):
    return dataclasses.replace(RunFacts(name=name, root=f"runs/{name}", config={}), **changes)
