"""The documentation builds as a site, without broken links or unknown names."""

import os
import subprocess
import sys

import pytest
from repository import ROOT

import raydl

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_of_the_docs_is_in_the_site(site, root):
    for page in (root / "docs").glob("*.md"):
        name = "index.html" if page.stem == "index" else f"{page.stem}/index.html"
        assert (site / name).exists(), name


def test_the_reference_has_every_public_name(site):
    text = (site / "api/index.html").read_text()
    for name in raydl.__all__:
        assert f'.{name}"' in text, name


def test_the_site_needs_no_network(site):
    text = (site / "index.html").read_text()
    assert "fonts.googleapis" not in text
    assert 'src="https://' not in text
