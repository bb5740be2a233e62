"""An error in a custom rule is reported in one sentence before any process starts."""

import functools
import re
import threading
from typing import ClassVar

import numpy as np
import pytest
import torch
from ensembles import linear
from histories import History, assert_same, config
from user_loops import Threads, user_loop_config

import raydl
from raydl import cli
from raydl.config import MethodConfig, ScalingConfig, TrainConfig
from raydl.core.rules import AheadRule, GradientRule, Message, Rule
from raydl.errors import ConfigError, ShapeError
from raydl.methods import METHODS, resolve
from raydl.methods.custom_rule import check_rule, try_rule
from raydl.methods.data_parallel import MeanGradient
from raydl.methods.easgd import Elastic
from raydl.methods.outer import Outer
from raydl.tasks import Classification


class ValidRule(AheadRule):
    """A valid rule."""

    period = 4

    def pull(self, replica, center, now, *, out):
        return torch.sub(replica, center, out=out).mul_(0.5)

    def merge_(self, center, mail, state, now):
        center.lerp_(mail.mean("weights"), 0.5)


class KeepsMomentum(ValidRule):
    """c <- c + v, with v in the rule itself."""

    def __init__(self):
        self.velocity = None

    def merge_(self, center, mail, state, now):
        gap = mail.mean("weights").sub_(center)
        self.velocity = gap if self.velocity is None else 0.9 * self.velocity + gap
        center.add_(self.velocity, alpha=0.1)


class Counts(ValidRule):
    calls = []  # noqa: RUF012

    def merge_(self, center, mail, state, now):
        self.calls.append(1)
        super().merge_(center, mail, state, now)


class CountsInPlace(ValidRule):
    def __init__(self):
        self.seen = torch.zeros(3)

    def pull(self, replica, center, now, *, out):
        self.seen += 1
        return super().pull(replica, center, now, out=out)


class Nested(ValidRule):
    def __init__(self):
        self.memory = {"rounds": [0]}

    def merge_(self, center, mail, state, now):
        self.memory["rounds"][0] += 1
        super().merge_(center, mail, state, now)


class Misspelt(ValidRule):
    strategy = "asynchronous"


class MisspeltName(ValidRule):
    stategy = "async"


class NoPull(AheadRule):
    def merge_(self, center, mail, state, now):
        center.copy_(mail.mean("weights"))


class British(Rule):
    def merged_(self, center, mail, state, now):
        center.sub_(mail.mean("progress"))


class PullsWithoutOut(ValidRule):
    def pull(self, replica, center, now):
        return (replica - center) * 0.5


class ForgetsToReturn(ValidRule):
    def pull(self, replica, center, now, *, out):
        torch.sub(replica, center, out=out).mul_(0.5)


class PullsItself(ValidRule):
    def pull(self, replica, center, now, *, out):
        return replica.sub_(center).mul_(0.5)


class Rebinds(ValidRule):
    """Makes a new center tensor that no process uses."""

    def merge_(self, center, mail, state, now):
        center = center + 0.5 * (mail.mean("weights") - center)


class RebindsData(ValidRule):
    def merge_(self, center, mail, state, now):
        center.data = center + 0.5 * (mail.mean("weights") - center)


class WantsARate(ValidRule):
    def __init__(self, rate):
        self.rate = rate


class NoPeriod(ValidRule):
    period = 0


class OneName(ValidRule):
    shared = "momentum"


class Sure(ValidRule):
    ahead = 1


class AheadOfItsGradient(ValidRule):
    takes_steps = False


class TwoWeights(ValidRule):
    lanes = ("weights", "more")


class Progress(Rule):
    def merge_(self, center, mail, state, now):
        center.sub_(mail.total(self.lanes[0]))


class OtherLane(Progress):
    lanes = ("difference",)


class ReturnsNothing(OtherLane):
    def compose(self, replica, center, state, out):
        torch.sub(center, replica.x, out=out["difference"])


class DividesByTheRate(Progress):
    numbers = ("eta",)

    def compose(self, replica, center, state, out):
        return Message({"progress": center - replica.x}, numbers={"eta": replica.lr})

    def merge_(self, center, mail, state, now):
        eta = torch.tensor(mail.mean_number("eta"))
        center.sub_(mail.mean("progress") / eta)


class WeighsByRate(Progress):
    """Its message weighs nothing at the rate 0, so that the center is not updated."""

    def compose(self, replica, center, state, out):
        return Message({"progress": center - replica.x}, weight=replica.since.rates)

    def merge_(self, center, mail, state, now):
        center.sub_(mail.mean("progress"))


class Spread(Progress):
    """Looks at how far the messages are apart, so that it needs two."""

    sums = False

    def merge_(self, center, mail, state, now):
        vectors = torch.stack([letter.lanes["progress"] for letter in mail.each()])
        center.sub_(vectors.mean(0) / (1 + vectors.std(0)))


class InnerOfGradients(GradientRule):
    inner = ("exp_avg",)


class Forgets(Progress):
    def merge_(self, center, mail, state, now):
        center.sub_(state["momentum"])


class ForgetsToKeep(Progress):
    keeps = ("last",)

    def compose(self, replica, center, state, out):
        return Message({"progress": replica["lats"]})


class Silent(Progress):
    lane_rounds: ClassVar = {"progress": 2}


class Deaf(Progress):
    lanes = ("progress", "other")
    lane_rounds: ClassVar = {"other": 3}

    def compose(self, replica, center, state, out):
        return Message({lane: replica.x.clone() for lane in self.lanes})


class WrongLane(OtherLane):
    def compose(self, replica, center, state, out):
        return Message({"progress": replica.x})


class Half(OtherLane):
    def compose(self, replica, center, state, out):
        return Message({"difference": replica.x[::2]})


class Undeclared(Progress):
    def compose(self, replica, center, state, out):
        return Message({"progress": replica.x}, numbers={"rate": replica.lr})


class Negative(Progress):
    def compose(self, replica, center, state, out):
        return Message({"progress": replica.x}, weight=-1.0)


class MovesWhileComposing(Progress):
    def compose(self, replica, center, state, out):
        return Message({"progress": replica.x.sub_(center)})


class KeepsWhileComposing(Progress):
    keeps = ("old",)

    def compose(self, replica, center, state, out):
        replica["old"].copy_(replica.x)
        return Message({"progress": replica.x})


class Changing(Progress):
    def compose(self, replica, center, state, out):
        self.scale = getattr(self, "scale", 1.0) / 2
        return Message({"progress": replica.x * self.scale})


def check_like_a_run(rule, num_parameters=12):
    """Check a rule as a run does: its settings first, then the rule with the model."""
    resolve(TrainConfig(method=MethodConfig(name="own")), rule)
    try_rule(rule, num_parameters)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (KeepsMomentum, "KeepsMomentum.merge_() changed the rule's attribute velocity: a "),
        (Counts, "Counts.merge_() changed the rule's attribute calls: a resumed run and"),
        (CountsInPlace, "CountsInPlace.pull() changed the rule's attribute seen: a resumed run"),
        (Nested, "Nested.merge_() changed the rule's attribute memory: a resumed run and"),
        (Misspelt, "Misspelt.strategy has no 'asynchronous'; did you mean async"),
        (MisspeltName, "MisspeltName has no 'stategy'; did you mean strategy"),
        (NoPull, "NoPull has no pull() (docs/algorithms.md)"),
        (British, "British has no merge_(); rename merged_()? (docs/algorithms.md)"),
        (PullsWithoutOut, "PullsWithoutOut.pull() must take (self, replica:"),
        (
            ForgetsToReturn,
            "ForgetsToReturn.pull() must return what the replica subtracts, torch.float32 of shape "
            "[6], got None",
        ),
        (PullsItself, "PullsItself.pull() must not change replica or center; write into out"),
        (Rebinds, "Rebinds.merge_() did not move the center in 16 trial updates; update"),
        (
            RebindsData,
            "RebindsData.merge_() did not move the center in 16 trial updates",
        ),
        (NoPeriod, "NoPeriod.period must be a whole number of at least 1, got 0"),
        (OneName, "OneName.shared must be a tuple of names, got 'momentum'"),
        (Sure, "Sure.ahead must be True or False, got 1"),
        (AheadOfItsGradient, "AheadOfItsGradient cannot have ahead = True and takes_steps = False"),
        (TwoWeights, "TwoWeights.lanes must have one name, since it sends its weights or gradi"),
        (OtherLane, "OtherLane has no compose() (docs/algorithms.md)"),
        (ReturnsNothing, "ReturnsNothing.compose() must return a raydl.core.rules.Message, got No"),
        (
            DividesByTheRate,
            "DividesByTheRate.merge_() made the center NaN or infinite after a step",
        ),
        (InnerOfGradients, "InnerOfGradients.inner must be empty, since it sends its weights or"),
        (Silent, "Silent.lane_rounds must have a whole number of rounds for some of the lanes ['p"),
        (Deaf, "Deaf.compose() must return lanes ['progress'], got ['progress', 'other']; those"),
        (WrongLane, "WrongLane.compose() must return lanes ['difference'], got ['progress']"),
        (Half, "Half.compose() must return difference as torch.float32 of shape [6], got torch.f"),
        (Undeclared, "Undeclared.compose() must return numbers [], got ['rate']"),
        (Negative, "Negative.compose() must return a weight of at least 0, got -1.0"),
        (MovesWhileComposing, "MovesWhileComposing.compose() must not change replica, center or s"),
        (KeepsWhileComposing, "KeepsWhileComposing.compose() must not change replica, center or s"),
        (Changing, "Changing.compose() must return the same message for the same replica"),
    ],
)
def test_an_error_in_a_rule_is_reported_by_name(kind, sentence):
    kept = list(Counts.calls)
    with pytest.raises(ConfigError, match=f"^method.name {re.escape(sentence)}"):
        check_like_a_run(kind())
    assert Counts.calls == kept + [1] * (kind is Counts) * 16, "a class attribute is not copied"
    Counts.calls.clear()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Forgets, "asks for 'momentum', which it does not name in shared: []"),
        (ForgetsToKeep, "asks for 'lats', which it does not name in keeps: ['last']"),
    ],
)
def test_state_that_is_not_named_is_one_sentence(kind, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        try_rule(kind(), 12)


@pytest.mark.parametrize("kind", [WeighsByRate, Spread])
def test_rules_that_are_right_at_the_rate_0_are_accepted(kind):
    check_like_a_run(kind())


class HasBeta(Progress):
    """D_i = c - x_i ; c <- c - beta*mean(D)."""

    def __init__(self, beta=0.5, lr=1.0, turns=2):
        self.beta, self.lr, self.turns = beta, lr, turns

    def merge_(self, center, mail, state, now):
        center.sub_(mail.mean("progress"), alpha=self.beta * self.lr)


def test_a_class_gets_its_arguments_from_the_settings_of_that_name_and_from_the_options():
    name = "test_custom_rules:HasBeta"
    given = MethodConfig(name=name, beta=0.8, outer_lr=0.1, options="turns=3")
    rule = resolve(TrainConfig(method=given)).rule
    assert (rule.beta, rule.lr, rule.turns) == (0.8, 0.1, 3)
    assert resolve(TrainConfig(method=MethodConfig(name=name))).rule.beta == 0.5
    with pytest.raises(ConfigError, match=f"^method.outer_momentum has no meaning for {name}"):
        resolve(TrainConfig(method=MethodConfig(name=name, outer_momentum=0.7)))
    with pytest.raises(ConfigError, match=r"^method\.options must not have beta: set method\.beta"):
        resolve(TrainConfig(method=MethodConfig(name=name, options="beta=0.8")))


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("diloco", "beta"),
        ("sync-sgd", "beta"),
        ("sync-easgd", "outer_lr"),
        ("async-sgd", "outer_lr"),
        ("async-msgd", "outer_momentum"),
        ("demo", "outer_momentum"),
    ],
)
def test_a_setting_that_a_method_does_not_have_is_refused(name, setting):
    with pytest.raises(ConfigError) as caught:
        resolve(TrainConfig(method=MethodConfig(name=name, **{setting: 0.5})))
    assert str(caught.value) == f"method.{setting} has no meaning for {name}"


def test_a_class_of_a_users_is_shown_as_a_named_method_is(capsys):
    assert cli.main(["methods", "test_custom_rules:HasBeta"]) == 0
    shown = capsys.readouterr().out
    assert "c <- c - beta*mean(D)" in shown
    assert "--method.beta 0.5 --method.outer-lr 1.0 --method.options turns=2" in shown
    assert cli.main(["methods", "test_custom_rules:Missing"]) == 2
    assert cli.main(["methods", "test_custom_rules:WantsARate"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("test_custom_rules:WantsARate (sync): ")
    assert "--method.options rate=..." in shown


def test_the_message_says_where_state_belongs():
    with pytest.raises(ConfigError) as error:
        try_rule(KeepsMomentum(), 12)
    assert str(error.value).endswith(
        "a resumed run and workers that join later would not have it, and spans of the parameters "
        "would share it; name what it keeps in shared or shared_numbers (docs/algorithms.md)"
    )


@pytest.mark.parametrize("method", [{"group_size": 2}, {"period": "auto"}])
def test_a_rule_that_sends_gradients_is_refused_where_local_steps_are_needed(method):
    case = TrainConfig(
        method=MethodConfig(name="own", **method), scaling=ScalingConfig(num_workers=2)
    )
    with pytest.raises(ConfigError, match="for sync methods with local steps, not for own"):
        resolve(case, Descends())


def test_a_class_by_name_needs_its_arguments():
    name = "test_custom_rules:WantsARate"
    with pytest.raises(ConfigError) as error:
        resolve(TrainConfig(method=MethodConfig(name=name)))
    assert str(error.value) == (
        "method.name test_custom_rules:WantsARate cannot be constructed: missing a required "
        "argument: 'rate'; give it by method.options, or pass an instance in Python: "
        "Trainer(method=...)"
    )
    rule = resolve(TrainConfig(method=MethodConfig(name=name, options="rate=0.5"))).rule
    assert isinstance(rule, WantsARate)


def test_beta_of_a_users_instance_is_checked_as_that_of_the_settings_is():
    with pytest.raises(ConfigError, match=r"method.beta must be in \(0, 1\] for .*, got 2.0"):
        resolve(TrainConfig(), rule=Elastic(2.0))


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (ValidRule, "method is the class ValidRule; pass an instance of it"),
        (3, "method must be a name, a MethodConfig or a Rule, got a int"),
    ],
)
def test_a_method_argument_of_another_type_is_refused(method, sentence):
    with pytest.raises(ConfigError, match=sentence):
        raydl.Trainer("mlp", "digits", method=method)


class WithMomentum(Progress):
    """The rule KeepsMomentum with the momentum beside the center."""

    shared = ("momentum",)

    def merge_(self, center, mail, state, now):
        state["momentum"].mul_(0.9).add_(mail.mean("progress"))
        center.sub_(state["momentum"], alpha=0.5)


class Waits(Outer):
    """Steps with every fourth message."""

    strategy = "async"
    shared_numbers = ("count",)

    def merge_(self, center, mail, state, now):
        state.numbers["count"] += 1
        if state.numbers["count"] % 4 == 0:
            super().merge_(center, mail, state, now)


class Holds(ValidRule):
    """Attributes of any type that never change."""

    def __init__(self):
        self.lock = threading.Lock()
        self.scale = torch.ones(())
        self.table = {"rates": [0.5, 0.25], "by": self}
        self.how = lambda value: value


class NeverEqual:
    """A value that differs from its own copy."""

    def __eq__(self, other):
        return False

    __hash__ = None


class NotCompared(NeverEqual):
    def __eq__(self, other):
        raise TypeError("which is the greater?")

    __hash__ = None


class HoldsMore(ValidRule):
    """Values that are hard to compare, and names similar to those of settings."""

    periods = (2, 4)
    strategies = {"a": 1}  # noqa: RUF012
    _period = 3

    def __init__(self):
        self.values = [NeverEqual(), NotCompared(), float("nan"), torch.tensor(torch.nan)]
        self.array = np.array([np.nan, 1.0])
        self.objects = np.array([None, "a"], dtype=object)

    @functools.cached_property
    def share(self):
        return 0.5

    def pull(self, replica, center, now, *, out):
        return torch.sub(replica, center, out=out).mul_(self.share)


class Descends(GradientRule):
    """c <- c - 0.1 * g, without the user's optimizer."""

    def merge_(self, center, mail, state, now):
        center.sub_(mail.mean("gradient"), alpha=0.1)


class Masked(ValidRule):
    """Holds one number per parameter of a model."""

    def __init__(self, num_parameters):
        self.mask = (torch.arange(num_parameters) % 2).float()

    def pull(self, replica, center, now, *, out):
        return torch.sub(replica, center, out=out).mul_(self.mask)


class SlowRule(ValidRule):
    """Moves the center by very little."""

    def merge_(self, center, mail, state, now):
        center.lerp_(mail.mean("weights"), 1e-9)


@pytest.mark.parametrize(
    "rule",
    [
        ValidRule(),
        WithMomentum(),
        Waits(),
        Holds(),
        HoldsMore(),
        Masked(12),
        SlowRule(),
        Descends(),
        MeanGradient(),
    ],
)
def test_a_valid_rule_is_accepted_unchanged(rule):
    before = dict(vars(rule))
    check_like_a_run(rule)
    assert vars(rule).keys() == before.keys()
    assert all(value is before[key] for key, value in vars(rule).items())


def test_a_named_method_with_a_very_small_beta_is_accepted():
    case = user_loop_config(MethodConfig(name="sync-easgd", beta=1e-9), 1)
    model = linear((1, 4, 4), 3)
    with Threads(case).attach(model, torch.optim.SGD(model.parameters(), lr=0.1)) as elastic:
        assert elastic.rank == 0


class CountsInBfloat16(ValidRule):
    def __init__(self):
        self.seen = torch.zeros(3, dtype=torch.bfloat16)

    def merge_(self, center, mail, state, now):
        self.seen += 1
        super().merge_(center, mail, state, now)


class CountsBesideIncomparableValues(ValidRule):
    def __init__(self):
        self.held = {"what": NotCompared(), "seen": [0]}

    def merge_(self, center, mail, state, now):
        self.held["seen"][0] += 1
        super().merge_(center, mail, state, now)


@pytest.mark.parametrize("kind", [CountsInBfloat16, CountsBesideIncomparableValues])
def test_state_in_a_rule_is_found_in_any_form(kind):
    with pytest.raises(ConfigError, match=r"merge_\(\) changed the rule's attribute"):
        check_like_a_run(kind())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_named_rule_passes_the_trial(name):
    rule = resolve(TrainConfig(method=MethodConfig(name=name))).rule
    check_rule(rule)
    try_rule(rule, 12)


def test_the_trial_draws_no_random_numbers():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    try_rule(ValidRule(), 12)
    assert torch.equal(torch.rand(1), expected)


def test_an_exception_of_a_rule_propagates_unchanged():
    class Raises(ValidRule):
        def merge_(self, center, mail, state, now):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        try_rule(Raises(), 12)


class MaskedAndCounts(Masked):
    count = 0

    def pull(self, replica, center, now, *, out):
        self.count += 1
        return super().pull(replica, center, now, out=out)


def test_a_rule_for_a_model_of_one_size_is_tried_on_that_size():
    with pytest.raises(ConfigError, match="changed the rule's attribute count"):
        try_rule(MaskedAndCounts(12), 12)
    with pytest.raises(RuntimeError, match="must match"):
        try_rule(Masked(12), 13)


def test_a_rule_for_the_size_of_the_model_trains(tmp_path):
    num_parameters = 64 * 10 + 10
    result = raydl.Trainer(
        raydl.Classification(
            lambda shape, n: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, n))
        ),
        method=Masked(num_parameters),
        training=raydl.TrainingConfig(epochs=2),
        scaling=raydl.ScalingConfig(num_workers=0),
        run=raydl.RunConfig(run_dir=str(tmp_path / "run"), progress="none"),
    ).fit()
    assert result.metrics["center_accuracy"] > 0.5


def test_a_newcomer_has_what_the_rule_keeps_beside_the_center():
    """KeepsMomentum loses this state."""
    case = config("local-sgd", epochs=4)
    history = History(case, task=Classification(linear), rule=WithMomentum())
    history.train("w0", "w1", rounds=3)
    history.train("w0", "w1", "w2", rounds=2)
    centers = [history.workers[w].center() for w in ("w0", "w1", "w2")]
    for center in centers[1:]:
        assert_same(center, centers[0])


# a user's training loop


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("method", "exchange"),
    [("sync-easgd", {}), ("async-easgd", {}), ("sync-easgd", {"compression": "int8"})],
)
def test_a_model_is_attached_only_if_its_dtype_can_be_exchanged(dtype, method, exchange):
    model = linear((1, 4, 4), 3).to(dtype)
    threads = Threads(user_loop_config(MethodConfig(name=method, period=2), 1, **exchange))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if dtype is torch.float64 and method == "sync-easgd" and not exchange:
        with threads.attach(model, optimizer) as elastic:
            for _ in range(4):
                model(torch.ones(2, 1, 4, 4, dtype=dtype)).sum().backward()
                elastic.step()
            assert all(v.dtype is dtype for v in elastic.center_state_dict().values())
        return
    sentence = (
        "must have float32 parameters for method"
        if dtype is torch.float64
        else ("must have float32 or float64 parameters, got")
    )
    with pytest.raises(ShapeError, match=sentence):
        threads.attach(model, optimizer)


def test_a_rule_is_tried_before_a_model_is_attached():
    from raydl.worker.user_loop import job_of

    model = linear((1, 4, 4), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    case = user_loop_config(MethodConfig(name="own", period=2), 1)
    with pytest.raises(ConfigError, match="did not move the center in 16 trial updates"):
        job_of(case, model, optimizer, Rebinds())
