"""A fault plan is read from YAML and checked as a whole."""

import pickle
import re

import pytest
from plans import kill_fault as kill

from raydl.config import RunConfig, ScalingConfig, TrainConfig
from raydl.errors import ConfigError
from raydl.faults import Fault, FaultPlan
from raydl.faults.plan import KINDS
from raydl.methods import resolve


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "plan.yaml"
        path.write_text(text)
        return FaultPlan.read(str(path))

    return read


def test_a_plan_is_read_from_yaml(read):
    plan = read(
        """
        faults:
          - {fault: kill, target: w1, at: step 40}
          - {fault: stop, target: rank  0, at: round 90, for_s: 8}
          - {fault: slow, target: w02, at: second 12.5, by_s: 0.5}
          - {fault: kill, target: shard 1, at: second 3}
          - {fault: stop, target: shard 0, at: round 0}
        """
    )
    assert plan.faults == (
        Fault(0, "kill", "w1", "step", 40.0),
        Fault(1, "stop", "rank 0", "round", 90.0, for_s=8.0),
        Fault(2, "slow", "w2", "second", 12.5, by_s=0.5),
        Fault(3, "kill", "shard 1", "second", 3.0),
        Fault(4, "stop", "center", "round", 0.0),
    )
    assert plan.for_workers == plan.faults[:3]
    assert plan.for_center == plan.faults[3:]


def test_a_fault_is_described_in_one_sentence():
    stop = Fault(1, "stop", "rank 0", "round", 90.0, for_s=8.0)
    assert stop.sentence == "fault 2: stop rank 0 at round 90 for 8 s"
    slow = Fault(2, "slow", "any", "second", 12.5, for_s=10.0, by_s=0.5)
    assert slow.sentence == "fault 3: slow any at second 12.5 by 0.5 s for 10 s"
    assert kill(at=12345678.0).sentence == "fault 1: kill w1 at step 12345678"


def test_a_plan_can_be_pickled(read):
    plan = read("faults: [{fault: kill, target: any, at: step 40}]")
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_the_seed_determines_the_targets_named_any(read):
    def drawn(text):
        return [fault.draw for fault in read(text).faults]

    any_kill = "{fault: kill, target: any, at: step 1}"
    w1_kill = "{fault: kill, target: w1, at: step 1}"
    both = drawn(f"{{seed: 7, faults: [{any_kill}, {any_kill}]}}")
    assert both == drawn(f"{{seed: 7, faults: [{any_kill}, {any_kill}]}}")
    assert both != drawn(f"{{seed: 8, faults: [{any_kill}, {any_kill}]}}")
    assert drawn(f"{{seed: 7, faults: [{w1_kill}, {any_kill}]}}") == [0, both[1]]
    assert drawn(f"faults: [{any_kill}]") == drawn(f"{{seed: 0, faults: [{any_kill}]}}")


def wrong(fields, sentence):
    """Return a plan whose second fault is wrong, and the expected error."""
    plan = f"faults: [{{fault: kill, target: w0, at: step 1}}, {fields}]"
    return pytest.param(plan, f"fault 2: {sentence}", id=sentence)


MOMENTS = "at must be step N, round N (whole numbers from 0) or second S (above 0)"
KINDS_TEXT = "kill, stop, slow, drain, partition, send_nan, send_zeros or send_reversed"
TARGETS = "target must be w1, rank 0, any, center or shard 1"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must be a mapping of seed and faults, got nothing in PATH"),
        ("[1]", "must be a mapping of seed and faults, got [1] in PATH"),
        ("faults: []", "faults must be a list of at least one fault, got []"),
        ("seed: 1", "faults must be a list of at least one fault, got nothing"),
        ("{seed: -1, faults: [1]}", "seed must be a whole number from 0, got -1"),
        ("{seed: 1.5, faults: [1]}", "seed must be a whole number from 0, got 1.5"),
        ("{sede: 1, faults: [1], a: 2}", "has no key sede, a; known: seed, faults"),
        ("faults: [kill]", "fault 1: must be a mapping of fault, target, at, for_s, by_s, got "
         "'kill'"),
        ("faults: [{", "is not valid YAML: PATH, line 1: expected the node content, but found "
         "'<stream end>'"),
        ("seed: 2024-13-41", "is not valid YAML: PATH: month must be in 1..12"),
        ("faults:\n- fault: kill\n  at: step 4\n  fault: stop", "has fault 2 times in the mapping "
         "of line 2; begin each fault with a dash of its own"),
        wrong("{fault: kill, target: w1, at: step 4, until: 5, on: 6}",
              "has no key until, True; known: fault, target, at, for_s, by_s"),
        wrong("{fault: kil, target: w1, at: step 4}",
              f"fault must be {KINDS_TEXT}, got 'kil'"),
        wrong("{target: w1, at: step 4}",
              f"fault must be {KINDS_TEXT}, got nothing"),
        wrong("{fault: kill, target: 1, at: step 4}", f"{TARGETS}, got 1"),
        wrong("{fault: kill, target: worker 1, at: step 4}", f"{TARGETS}, got 'worker 1'"),
        wrong("{fault: kill, at: step 4}", f"{TARGETS}, got nothing"),
        wrong("{fault: kill, target: w1, at: 4}", f"{MOMENTS}, got 4"),
        wrong("{fault: kill, target: w1}", f"{MOMENTS}, got nothing"),
        wrong("{fault: kill, target: w1, at: step 4.5}", f"{MOMENTS}, got 'step 4.5'"),
        wrong("{fault: kill, target: w1, at: step -4}", f"{MOMENTS}, got 'step -4'"),
        wrong("{fault: kill, target: w1, at: second 0}", f"{MOMENTS}, got 'second 0'"),
        wrong("{fault: kill, target: w1, at: second nan}", f"{MOMENTS}, got 'second nan'"),
        wrong("{fault: stop, target: w1, at: step 4, for_s: 0}",
              "for_s must be in (0, 86400] seconds, got 0"),
        wrong("{fault: stop, target: w1, at: step 4, for_s: .inf}",
              "for_s must be in (0, 86400] seconds, got inf"),
        wrong("{fault: stop, target: w1, at: step 4, for_s: yes}",
              "for_s must be in (0, 86400] seconds, got True"),
        wrong("{fault: slow, target: w1, at: step 4}",
              "by_s must be in (0, 86400] seconds, got nothing"),
        wrong("{fault: drain, target: w1, at: step 4}",
              "for_s must be in (0, 86400] seconds, got nothing"),
        wrong("{fault: partition, target: w1, at: step 4, for_s: 8s}",
              "for_s must be in (0, 86400] seconds, got '8s'"),
        wrong("{fault: kill, target: w1, at: step 4, for_s: 8}",
              "for_s is only for stop, slow, drain, partition, send_nan, send_zeros or "
              "send_reversed; kill has none, got 8"),
        wrong("{fault: stop, target: w1, at: step 4, by_s: 8}",
              "by_s is only for slow; stop has none, got 8"),
        wrong("{fault: slow, target: center, at: round 4}",
              "fault must be kill or stop if the target is center, got 'slow'"),
        wrong("{fault: kill, target: shard 1, at: step 4}",
              "at must be round N or second S if the target is shard 1, which takes no steps, "
              "got 'step 4'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_plan_is_reported_in_one_sentence(read, tmp_path, text, problem):
    with pytest.raises(ConfigError) as caught:
        read(text)
    path = str(tmp_path / "plan.yaml")
    assert str(caught.value) == f"run.fault_plan {problem}".replace("PATH", path)


def test_the_error_for_an_unreadable_plan_names_its_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml: No such file"):
        FaultPlan.read(str(tmp_path / "none.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"seed: \xe4")
    with pytest.raises(ConfigError, match=r"is not valid YAML: .*latin.yaml: 'utf-8' codec"):
        FaultPlan.read(str(tmp_path / "latin.yaml"))


def test_a_target_that_the_run_does_not_have_is_refused():
    FaultPlan((kill("rank 2"), kill("shard 1", "round"))).check(max_workers=3, num_shards=2)
    with pytest.raises(ConfigError, match=r"fault 1: target must be a rank below 2, .*'rank 2'"):
        FaultPlan((kill("rank 2"),)).check(max_workers=2, num_shards=2)
    with pytest.raises(ConfigError, match=r"fault 1: target must be a shard below 1, .*'shard 1'"):
        FaultPlan((kill("shard 1", "round"),)).check(max_workers=2, num_shards=1)
    with pytest.raises(ConfigError, match="needs workers in processes of their own"):
        FaultPlan((kill(),)).check(max_workers=0, num_shards=1)


def test_the_plan_of_the_docs_has_every_fault_and_its_tables_are_right(root, read):
    text = (root / "docs/faults.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, flags=re.M | re.S)
    assert {fault.kind for fault in read(block).faults} == set(KINDS)
    cells = {None: "-", False: "may", True: "must"}
    rows = re.findall(r"^\| `(\w+)` \| (-|may|must) \| (-|may|must) \|", text, flags=re.M)
    assert rows == [
        (kind, cells[takes.get("for_s")], cells[takes.get("by_s")]) for kind, takes in KINDS.items()
    ]


def test_a_share_of_bad_workers_has_the_last_ranks_from_the_first_step_on():
    plan = FaultPlan((kill("w0"),)).with_bad_workers(0.5, "reversed", num_workers=4)
    assert [fault.sentence for fault in plan.faults[1:]] == [
        "fault 2: send_reversed rank 2 at step 0",
        "fault 3: send_reversed rank 3 at step 0",
    ]
    assert len(FaultPlan().with_bad_workers(0.01, "nan", num_workers=4).faults) == 1
    assert len(FaultPlan().with_bad_workers(1.0, "nan", num_workers=4).faults) == 4


@pytest.mark.parametrize("text", ["0.25", "0:nan", "1.5:zeros", "0.25:bad", "nan", "", "x:nan"])
def test_wrong_bad_workers_are_one_sentence(text):
    sentence = (
        "run.bad_workers must be SHARE:KIND with a share in (0, 1] and one of nan, zeros, "
        f"reversed, as 0.25:reversed, got {text}"
    )
    with pytest.raises(ConfigError) as caught:
        RunConfig(bad_workers=text)
    assert str(caught.value) == sentence


def test_bad_workers_need_processes_of_their_own():
    config = TrainConfig(run=RunConfig(bad_workers="0.5:nan"), scaling=ScalingConfig(num_workers=0))
    with pytest.raises(ConfigError, match=r"run.bad_workers needs workers in processes of their"):
        resolve(config)
