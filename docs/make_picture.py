"""Take the picture of TensorBoard that the README shows.

Command:   python docs/make_picture.py runs/NAME docs/tensorboard.png [PAGE]
           PAGE: custom_scalars (unless given), scalars, images, text, hparams
Needs:     Chromium on the PATH
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

_BOUND_S = 60


def main(run: str, picture: str, page: str = "custom_scalars") -> None:
    """Serve a run on a free port, and photograph a page."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: no chromium on the PATH")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", run, "--port", str(port)],
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/data/runs")
        with tempfile.TemporaryDirectory() as profile:
            subprocess.run(
                [
                    chromium, "--headless", "--no-sandbox", "--disable-gpu",
                    "--disable-background-networking", f"--user-data-dir={profile}",
                    "--window-size=1600,1300", "--virtual-time-budget=20000",
                    f"--screenshot={picture}", f"http://127.0.0.1:{port}/#{page}",
                ],
                check=True,
                timeout=_BOUND_S,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
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
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.3)
    sys.exit(f"error: nothing is served at {url} after {_BOUND_S} s")


if __name__ == "__main__":
    main(*sys.argv[1:4])
