"""Take the pictures that the README shows: a page of TensorBoard, or a report.

Command:   python docs/make_picture.py runs/NAME docs/tensorboard.png [PAGE]
           python docs/make_picture.py runs/NAME/report.html docs/report.png
           PAGE: custom_scalars (unless given), scalars, images, text, hparams
Needs:     Chromium on the PATH
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

_BOUND_S = 60


def main(run: str, picture: str, page: str = "custom_scalars") -> None:
    """Photograph a report, or a page of TensorBoard on a run."""
    if run.endswith(".html"):
        photograph(Path(run).resolve().as_uri(), picture, size="1200,1340")
        return
    with tensorboard(run) as address:
        photograph(f"{address}/#{page}", picture, size="1600,1300")


def photograph(address: str, picture: str, *, size: str) -> None:
    """Write what Chromium shows at an address, in a window of WIDTH,HEIGHT pixels."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: no chromium on the PATH")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-background-networking", f"--user-data-dir={profile}",
                f"--window-size={size}", "--virtual-time-budget=20000",
                f"--screenshot={picture}", address,
            ],
            check=True,
            timeout=_BOUND_S,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip


@contextlib.contextmanager
def tensorboard(run: str) -> Iterator[str]:
    """Serve a run on a free port; yield the address."""
    # Below the ephemeral ports: nobody is given this one while TensorBoard starts.
    port = random.randrange(20_000, 32_768)
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tensorboard.main",
            "--logdir_spec",
            f"{Path(run).name}:{run}",
            "--port",
            str(port),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/data/runs")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=10)


def wait_for(url: str) -> None:
    """Wait until a page is served and has a run in it."""
    deadline = time.monotonic() + _BOUND_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.read().strip() not in (b"", b"[]"):
                    return
        except OSError:
            pass
        time.sleep(0.3)
    sys.exit(f"error: nothing is served at {url} after {_BOUND_S} s")


if __name__ == "__main__":
    main(*sys.argv[1:4])
