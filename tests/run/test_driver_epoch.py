"""Every start of a run has a driver epoch, and only the newest start changes its files."""

import json
import threading
import time

import pytest
from checkpoints import make_checkpoint as make
from locks import ObjectsWithoutLocks as Objects
from snapshots import with_progress

from raydl.checkpoint.store import CheckpointStore
from raydl.config import RunConfig, TrainConfig
from raydl.errors import CheckpointError, ConfigError, SupersededError
from raydl.run import lock as hold
from raydl.run.driver_epoch import FOLDER, DriverEpoch
from raydl.run.folder import RunFolder
from raydl.storage import Storage

ME = {"driver": "process 7 on a", "since": "2026-11-23 09:00:00"}
OTHER = {"driver": "process 8 on b", "since": "2026-11-23 09:05:00"}


def records(path):
    return sorted(p.name for p in (path / FOLDER).iterdir())


# numbers of epochs


@pytest.mark.processes
@pytest.mark.parametrize("kind", [Storage, Objects])
def test_each_start_that_holds_a_folder_takes_the_next_epoch(tmp_path, kind):
    for number in (1, 2, 3):
        with hold.held(kind(str(tmp_path)), "run.run_dir") as epoch:
            assert epoch.number == number
            with pytest.raises(ConfigError, match="is in use by"):
                hold.held(kind(str(tmp_path)), "run.run_dir").__enter__()
    assert [name.split("-")[0] for name in records(tmp_path)] == [f"{n:08d}" for n in (1, 2, 3)]


def test_a_start_that_is_refused_takes_no_epoch(tmp_path):
    config = TrainConfig(run=RunConfig(run_dir=str(tmp_path / "run")))
    with RunFolder(config).held(resume=False):
        pass
    (tmp_path / "run/config.json").write_text("{}")
    with pytest.raises(ConfigError, match="already holds a run; add --resume"):
        RunFolder(config).held(resume=False).__enter__()
    assert len(records(tmp_path / "run")) == 1


@pytest.mark.parametrize(("names", "number"), [([], 2), (["round-00000007-e5", "round-9"], 6)])
def test_a_run_without_records_continues_the_epochs_in_its_folder(tmp_path, names, number):
    (tmp_path / "config.json").write_text("{}")
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert DriverEpoch.take_next(Storage(str(tmp_path)), ME).number == number


@pytest.mark.parametrize(
    "name", [f"{FOLDER}/{10**18 - 1}-0123abcd.json", f"checkpoints/round-00000001-e{10**18 - 1}"]
)
def test_an_epoch_that_no_run_reaches_is_refused_since_its_successor_would_not_be_seen(
    tmp_path, name
):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(OSError, match=f"a start of number {10**18 - 1}, which no run has"):
        DriverEpoch.take_next(Storage(str(tmp_path)), ME)
    problem = f"run.run_dir: {tmp_path} cannot be written: .*which no run has"
    with pytest.raises(ConfigError, match=problem):
        hold.held(Storage(str(tmp_path)), "run.run_dir").__enter__()


def test_of_many_drivers_that_take_an_epoch_together_no_two_get_the_same(tmp_path):
    start, taken = threading.Barrier(8), []

    def take_epochs():
        start.wait(timeout=10)
        for _ in range(5):
            taken.append(DriverEpoch.take_next(Storage(str(tmp_path)), ME))

    threads = [threading.Thread(target=take_epochs) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(taken) == 40
    numbers = [epoch.number for epoch in taken if epoch is not None]
    assert numbers
    assert len(numbers) == len(set(numbers))


def test_a_driver_that_is_halted_while_it_takes_an_epoch_takes_none(tmp_path):
    class Halted(Storage):
        """Another driver takes the epoch after this one has read it and before it writes."""

        def write_bytes(self, name, data):
            assert DriverEpoch.take_next(Storage(str(tmp_path)), OTHER).number == 1
            super().write_bytes(name, data)

    assert DriverEpoch.take_next(Halted(str(tmp_path)), ME) is None
    (name,) = records(tmp_path)
    assert json.loads((tmp_path / FOLDER / name).read_text()) == {**OTHER, "driver_epoch": 1}


def test_the_error_of_a_superseded_driver_names_its_successor(tmp_path):
    storage = Storage(str(tmp_path))
    epoch = DriverEpoch.take_next(storage, ME)
    epoch.check()
    epoch.raise_if_over()
    DriverEpoch.take_next(storage, OTHER)
    epoch.raise_if_over()  # it has not checked yet
    with pytest.raises(SupersededError) as caught:
        epoch.check()
    assert str(caught.value) == (
        f"{tmp_path}: process 8 on b since 2026-11-23 09:05:00 has taken over the run as driver "
        f"epoch 2; this driver, of epoch 1, ends and changes nothing there"
    )
    assert epoch.is_over


def test_a_driver_notices_by_itself_that_its_epoch_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(hold, "BEAT_S", 0.02)
    storage, deadline = Objects(str(tmp_path)), time.monotonic() + 30.0
    with hold.held(storage, "run.run_dir") as epoch:
        DriverEpoch.take_next(storage, OTHER)
        while not epoch.is_over:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (lock_object,) = (tmp_path / "drivers").iterdir()
        storage.delete_dir(f"drivers/{lock_object.name}")  # as the driver that takes over does
    assert list((tmp_path / "drivers").iterdir()) == [], "it locks nothing any more"


# files


CHANGES = {
    "write_bytes": lambda s, path: s.write_bytes("a", b"mine"),
    "copy_in": lambda s, path: s.copy_in(str(path / "b"), "a"),
    "copy_file": lambda s, path: s.copy_file("b", "c"),
    "delete_file": lambda s, path: s.delete_file("a"),
    "delete_dir": lambda s, path: s.delete_dir("folder"),
    "move_dir": lambda s, path: s.move_dir("folder", "moved"),
}


@pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))
def test_a_driver_whose_epoch_is_over_changes_no_file(tmp_path, change):
    storage = Storage(str(tmp_path))
    epoch = DriverEpoch.take_next(storage, ME)
    mine = storage.guarded(epoch.check)
    for name in ("a", "b", "folder/x"):
        mine.write_bytes(name, f"{name} before".encode())
    DriverEpoch.take_next(storage, OTHER)
    before = contents(tmp_path)
    with pytest.raises(SupersededError):
        change(mine, tmp_path)
    assert contents(tmp_path) == before
    assert mine.read_bytes("a") == b"a before", "reading is allowed"
    change(storage, tmp_path)
    assert contents(tmp_path) != before


def contents(path):
    return {str(p.relative_to(path)): p.is_file() and p.read_bytes() for p in path.rglob("*")}


def test_a_driver_that_is_superseded_while_it_writes_replaces_no_file(tmp_path):
    storage = Storage(str(tmp_path))
    epoch = DriverEpoch.take_next(storage, ME)
    storage.write_bytes("result.json", b"the other's")
    checks = []

    def check():
        checks.append(1)
        if len(checks) == 2:  # the temporary file is written, and renaming it is next
            DriverEpoch.take_next(storage, OTHER)
        epoch.check()

    with pytest.raises(SupersededError):
        storage.guarded(check).write_bytes("result.json", b"mine")
    assert storage.read_bytes("result.json") == b"the other's"


# checkpoints


@pytest.fixture(params=["disk", "objects"])
def storage(request, tmp_path, monkeypatch):
    if request.param == "objects":
        monkeypatch.setattr(Storage, "is_object_store", True)
    return Storage(str(tmp_path))


def store_taken_over_by(storage, epoch, keep=2):
    """Return the store of the driver that takes over a run with an epoch."""
    store = CheckpointStore(storage, keep=keep, driver_epoch=epoch)
    store.take_over(store.read()[0])
    return store


def test_a_checkpoint_that_an_earlier_driver_completes_late_is_not_the_newest(storage):
    before = CheckpointStore(storage)
    before.write(make(120))
    now = store_taken_over_by(storage, 2)
    before.write(make(900))  # it was halted and does not know of the other driver
    assert now.names()[-1] == "round-00000120-e2"
    assert CheckpointStore(storage, driver_epoch=3).read()[0].progress.round == 120
    assert CheckpointStore(storage).newest_round == 120
    now.write(make(130))
    assert now.names() == ["round-00000120-e2", "round-00000130-e2"]
    assert now.num_late == 1, "it is counted"


def test_an_earlier_driver_that_continues_deletes_no_checkpoint_of_a_later_one(storage):
    before = CheckpointStore(storage, keep=1)
    before.write(make(120))
    now = store_taken_over_by(storage, 2, keep=1)
    now.write(make(130))
    (storage_of_unfinished := storage).write_bytes("checkpoints/round-00000140-e2/center", b"x")
    for round in (125, 150, 160):
        before.write(make(round))
    assert storage_of_unfinished.exists("checkpoints/round-00000140-e2/center"), "being written"
    assert now.read()[0].progress.round == 130
    assert [n for n in before.names() if n.endswith("-e2")] == ["round-00000130-e2"]


def test_a_later_driver_depends_on_nothing_that_an_earlier_one_may_delete(storage):
    before = CheckpointStore(storage, keep=1)
    before.write(make(120))
    now = store_taken_over_by(storage, 2, keep=1)
    before.write(make(121))  # deletes its own earlier checkpoints
    checkpoint, damage = CheckpointStore(storage, driver_epoch=3).read()
    assert (checkpoint.progress.round, damage) == (120, [])
    assert now.find_damage() == []


def test_a_checkpoint_that_is_deleted_while_it_is_copied_is_an_error(storage):
    CheckpointStore(storage).write(make(120))
    now = CheckpointStore(storage, driver_epoch=2)
    checkpoint, _ = now.read()
    storage.delete_dir("checkpoints/round-00000120")
    with pytest.raises(CheckpointError, match="could not be copied for this driver"):
        now.take_over(checkpoint)


def test_a_copy_is_marked_as_one_and_has_the_same_bytes(storage, tmp_path):
    CheckpointStore(storage, keep=3).write(make(120))
    source = contents(tmp_path / "checkpoints/round-00000120")
    store_taken_over_by(storage, 7, keep=3)
    copied = contents(tmp_path / "checkpoints/round-00000120-e7")
    manifest = json.loads(copied.pop("manifest.json"))
    assert (manifest["driver_epoch"], manifest["copy_of"]) == (7, "round-00000120")
    source.pop("manifest.json")
    assert copied == source


def test_failed_starts_leave_one_copy(storage):
    CheckpointStore(storage).write(make(110))
    CheckpointStore(storage).write(make(120))
    for epoch in range(2, 6):
        store_taken_over_by(storage, epoch)
    names = CheckpointStore(storage).names()
    assert names == ["round-00000110", "round-00000120-e5"]


def test_a_round_that_a_start_writes_again_has_another_name(storage):
    CheckpointStore(storage).write(make(120))
    now = store_taken_over_by(storage, 2)
    assert now.write(make(120)) == "round-00000120-e2.1"
    assert now.names()[-1] == "round-00000120-e2.1"


def test_weights_that_an_earlier_driver_wrote_late_are_not_the_trained_ones(storage):
    before = CheckpointStore(storage)
    before.write(make(120))
    before.write_trained(make(120).center, 120)
    assert before.has_trained(120)
    now = store_taken_over_by(storage, 2)
    now.write(make(140))
    now.write_trained(make(140).center, 140)
    assert now.has_trained(140)
    others = {name: tensor + 1 for name, tensor in make(140).center.items()}
    before.write_trained(others, 140)  # another center of the same round
    assert not now.has_trained(140)
    assert not CheckpointStore(storage, driver_epoch=3).has_trained(140)
    (sentence,) = now.find_damage()
    assert "center.safetensors: it differs from the center of the newest checkpoint" in sentence


def test_checkpoints_of_a_run_with_one_start_have_plain_names(storage):
    store = CheckpointStore(storage)
    assert store.write(with_progress(make(3), generation=2)) == "round-00000003"
    manifest = json.loads(storage.read_bytes("checkpoints/round-00000003/manifest.json"))
    assert (manifest["driver_epoch"], manifest["generation"]) == (1, 2)
