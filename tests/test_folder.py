"""A run's folder: what is copied to where the run is kept."""

from raydl.config import RunConfig, TrainConfig
from raydl.runs.folder import RunFolder


def test_event_files_that_have_not_grown_are_not_copied_again(tmp_path, monkeypatch):
    run = RunConfig(run_dir=str(tmp_path / "run"), storage_path=str(tmp_path / "kept"))
    folder = RunFolder(TrainConfig(run=run))
    folder.path.mkdir()
    old, new = (folder.path / f"events.out.tfevents.{n}" for n in (1, 2))
    old.write_bytes(b"an earlier start")
    new.write_bytes(b"this one")
    folder.publish_events()
    copied = []
    write = folder.storage.write_bytes
    monkeypatch.setattr(
        folder.storage, "write_bytes", lambda name, data: (copied.append(name), write(name, data))
    )
    new.write_bytes(b"this one, grown")
    folder.publish_events()
    assert copied == [new.name]
    assert folder.storage.read_bytes(new.name) == b"this one, grown"
    assert folder.storage.read_bytes(old.name) == b"an earlier start"
