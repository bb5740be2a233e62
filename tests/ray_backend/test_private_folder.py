"""A cluster of the run's own keeps its files where no other user of the machine can reach them."""

import os
import stat
import subprocess
import sys

import pytest

from raydl.errors import ConfigError
from raydl.ray_backend import private_folder
from raydl.ray_backend.private_folder import make_private_folder

NOBODY = 65534
LONGEST_SOCKET = 107
CONNECT = """
import ray
from raydl.ray_backend import session
session.prepare()
session.connect(has_forks=False)
(node,) = ray.nodes()
print(node["RayletSocketName"], node["ObjectStoreSocketName"], sep="\\n")
input()
"""
"""Starts a cluster, prints the names of its sockets, and waits."""
RENAME = "import os, sys; os.setuid(int(sys.argv[2])); os.rename(sys.argv[1], sys.argv[1] + '.old')"


@pytest.fixture
def system(monkeypatch, short_path):
    """A folder that takes the place of /tmp."""
    folder = short_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(private_folder, "_SYSTEM", folder)
    return folder


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def is_private(path):
    """Whether a folder on the way to a path can be entered by its owner alone."""
    return any(mode_of(parent) == 0o700 for parent in path.parents)


def socket_in(folder):
    """Return the longest name of a socket of Ray in a folder."""
    return f"{folder}{private_folder._BELOW}"


def test_the_folder_lies_below_one_that_only_its_user_may_enter(system):
    folder = make_private_folder({})
    assert folder == system / f"raydl-{os.getuid()}" / "ray"
    assert mode_of(folder.parent) == 0o700
    assert make_private_folder({}) == folder  # Ray's sessions of one user are side by side


@pytest.mark.parametrize(
    "name", ["a" * 120, f"{'b' * 100}/{'c' * 100}", "with space", "it's $HOME", "größer"]
)
@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_with_a_long_or_special_name_is_reached_by_a_short_one(
    system, short_path, name, variable
):
    given = short_path / name
    given.mkdir(parents=True)
    folder = make_private_folder({variable: str(given)})
    assert len(os.fsencode(socket_in(folder))) <= LONGEST_SOCKET
    assert str(folder).isascii()
    assert not set(str(folder)) & set(" '$")
    assert folder.resolve().is_relative_to(given.resolve())
    assert mode_of(folder.parent) == mode_of(folder.resolve().parent) == 0o700
    assert make_private_folder({variable: str(given)}) == folder


def test_a_folder_with_a_short_name_is_used_as_it_is(system, short_path):
    (short_path / "t").mkdir()
    folder = make_private_folder({"TMPDIR": str(short_path / "t")})
    assert folder.is_relative_to(short_path / "t")
    assert not folder.is_symlink()


def test_the_variable_of_ray_goes_before_that_of_the_system(system, short_path):
    for name in ("ray", "any"):
        (short_path / name).mkdir()
    given = {"RAY_TMPDIR": str(short_path / "ray"), "TMPDIR": str(short_path / "any")}
    assert make_private_folder(given).is_relative_to(short_path / "ray")


def absent(folder):
    folder.rmdir()


def of_everybody(folder):
    folder.chmod(0o777)


def below_a_folder_of_everybody(folder):
    folder.parent.chmod(0o777)


def of_a_group(folder):
    folder.chmod(0o770)


UNUSABLE = [absent, of_everybody, below_a_folder_of_everybody, of_a_group]


@pytest.mark.parametrize("change", UNUSABLE)
def test_a_folder_that_others_may_rename_in_is_not_used(system, short_path, change):
    given = short_path / "parent" / "folder"
    given.mkdir(parents=True)
    change(given)
    assert make_private_folder({"TMPDIR": str(given)}).is_relative_to(system)
    with pytest.raises(ConfigError, match=rf"RAY_TMPDIR must name a folder .*{given} is "):
        make_private_folder({"RAY_TMPDIR": str(given)})


def test_a_folder_of_another_user_is_not_used(monkeypatch, system, short_path):
    given = short_path / "folder"
    given.mkdir()
    if os.getuid() == 0:  # what root owns is safe for everybody
        os.chown(given, NOBODY, NOBODY)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(ConfigError, match="is open to other users"):
        make_private_folder({"RAY_TMPDIR": str(given)})


def made_by_another(monkeypatch, taken):
    taken.mkdir(mode=0o700)
    real = os.lstat(taken).st_uid
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    taken.rename(taken.with_name(f"raydl-{real + 1}"))


def open_to_all(monkeypatch, taken):
    taken.mkdir()
    taken.chmod(0o777)


def a_link(monkeypatch, taken):
    (taken.parent / "elsewhere").mkdir(mode=0o700)
    taken.symlink_to(taken.parent / "elsewhere")


def a_file(monkeypatch, taken):
    taken.write_text("")


@pytest.mark.parametrize("take", [made_by_another, open_to_all, a_link, a_file])
def test_a_name_that_another_user_has_taken_is_not_used(monkeypatch, system, take):
    taken = system / f"raydl-{os.getuid()}"
    take(monkeypatch, taken)
    given = make_private_folder({})
    for folder in (given, given.resolve()):
        assert folder.parent.parent == system
        assert folder.parent.name.startswith(f"raydl-{os.getuid()}-")
        assert mode_of(folder.parent) == 0o700


def test_a_machine_without_a_writable_folder_is_reported_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(private_folder, "_SYSTEM", tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"^TMPDIR must name a folder .*No such file") as error:
        make_private_folder({})
    assert "\n" not in str(error.value)


@pytest.mark.cluster
def test_another_user_cannot_take_the_place_of_the_sockets_of_a_cluster(short_path):
    given = short_path / ("long " * 30)
    given.mkdir()
    short_path.chmod(0o755)
    mine = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", CONNECT], env=mine | {"TMPDIR": str(given)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as driver:  # fmt: skip
        names = [driver.stdout.readline().strip() for _ in range(2)]
        for name in names:
            assert os.path.realpath(name).startswith(f"{given.resolve()}/")
            assert stat.S_ISSOCK(os.stat(name).st_mode)
            assert len(os.fsencode(name)) <= LONGEST_SOCKET
            assert is_private(type(given)(os.path.realpath(name)))
            if os.getuid() == 0:
                words = [sys.executable, "-c", RENAME, name, str(NOBODY)]
                refused = subprocess.run(words, capture_output=True, text=True, check=False)
                assert "PermissionError" in refused.stderr
        driver.communicate("\n", timeout=60)
    assert driver.returncode == 0
