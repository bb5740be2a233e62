"""The wheel and the source distribution have the files that a user needs and no others."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest
import yaml

pytestmark = pytest.mark.processes
BOUND_S = 200


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder of both distributions, built from a copy of the repository."""
    from repository import ROOT

    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "dist"))
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    archive = source / "files.tar"
    subprocess.run(
        ["tar", "--null", "-cf", archive, "-T", "-"], input=names, cwd=ROOT, text=True, check=True
    )
    with tarfile.open(archive) as files:
        files.extractall(source, filter="data")
    archive.unlink()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=BOUND_S)
    return out


def test_the_wheel_has_the_package_with_its_data_alone(dist):
    (wheel,) = dist.glob("elastic_raydl-*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        metadata = files.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"raydl", "elastic_raydl"}
    assert {"raydl/py.typed", "raydl/cli/__init__.py"} <= set(names)
    assert any(name.startswith("raydl/data/digits/") for name in names)
    assert "Name: elastic-raydl" in metadata
    assert "Provides-Extra: transformers" in metadata


@pytest.mark.slow
def test_the_package_of_the_wheel_trains_where_no_checkout_is(dist, tmp_path):
    (wheel,) = dist.glob("elastic_raydl-*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path / "installed")
    arguments = ["train", "--data", "digits", "--model", "mlp", "--workers", "0", "--epochs", "1"]
    code = (
        f"import raydl, sys; print(raydl.__file__); from raydl.cli import main; main({arguments})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path, capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "installed/raydl") in done.stdout
    assert "center test accuracy" in done.stdout


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_package(dist):
    (source,) = dist.glob("elastic_raydl-*.tar.gz")
    (wheel,) = dist.glob("elastic_raydl-*.whl")
    with tarfile.open(source) as files, zipfile.ZipFile(wheel) as built:
        inside = {name.partition("/")[2] for name in files.getnames()}
        package = {name for name in built.namelist() if name.startswith("raydl/")}
    assert package <= inside
    assert {"pyproject.toml", "README.md", "LICENSE"} <= inside


def test_nothing_is_built_for_a_tag_that_is_not_the_version(root):
    jobs = yaml.safe_load((root / ".github/workflows/wheels.yml").read_text())["jobs"]
    check, build = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    assert build == "make dist"
    assert jobs["publish"]["needs"] == "build"
    [version] = re.findall(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.M)
    tags = (f"v{version}", f"v{version}.1", f"v{version.replace('.', 'x')}", "v")
    statuses = [
        subprocess.run(
            ["bash", "-c", check], cwd=root, env={**os.environ, "GITHUB_REF_NAME": tag}, check=False
        ).returncode
        for tag in tags
    ]
    assert statuses == [0, 1, 1, 1]


def test_the_files_about_the_project_agree_with_its_version(root):
    text = (root / "pyproject.toml").read_text()
    project = dict(re.findall(r'^(version|license) = "(.+)"$', text, flags=re.M))
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    for path in (root / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        targets = [
            step["run"].split()[1] for step in steps if step.get("run", "").startswith("make")
        ]
        for target in targets:
            assert f"\n{target}:" in (root / "Makefile").read_text(), path
