"""Loops follow one count of steps: a late worker has step, epoch, rate and end of the others."""

import threading
import time

import pytest
import torch
from torch.optim import lr_scheduler
from user_loops import Threads, attach_alone, equal_states, run_all, user_loop_config

from raydl.config import MethodConfig
from raydl.errors import ConfigError
from raydl.worker.epochs import Epochs
from raydl.worker.schedulers import advance, count_of, needs_scores

LR = 0.1
METHODS = ["sync-easgd", "local-sgd", "diloco", "async-easgd", "original-easgd"]
BATCHES = [torch.full((2, 4), float(n)) for n in range(20)]


def parts(*, total=10**6):
    """Return (model, optimizer, scheduler): the rate falls from LR to 0 within ``total`` steps."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return model, optimizer, lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)


def take_step(model, elastic, batch):
    elastic.zero_grad()
    (1e-6 * model(batch)).square().mean().backward()
    elastic.step()


class Run:
    """A run of loops of ``num_epochs`` passes over BATCHES, in threads."""

    def __init__(self, method, num_workers, *, num_epochs=20, period=2, lease_s=60.0):
        config = user_loop_config(MethodConfig(name=method, period=period), num_workers,
                                  lease_s=lease_s)  # fmt: skip
        self.threads = Threads(config)
        self.num_epochs, self.num_steps = num_epochs, num_epochs * len(BATCHES)
        self.seen = {}
        """By worker, (step, epoch, rate) before each of its steps."""
        self.reached = threading.Condition()

    def wait_for(self, worker_id, step):
        """Wait until a worker is at a step."""
        with self.reached:
            assert self.reached.wait_for(lambda: self.step_of(worker_id) >= step, 40)

    def step_of(self, worker_id):
        return self.seen[worker_id][-1][0] if self.seen.get(worker_id) else -1

    def loop(self, worker_id, *, after=None, step_s=0.0, stops_at=None):
        """Return a loop that begins after a step of w0 and returns (handle, center)."""

        model, optimizer, scheduler = parts(total=self.num_steps)

        def run():
            if after is not None:
                self.wait_for("w0", after)
            seen = self.seen[worker_id] = []
            with self.threads.attach(model, optimizer, worker_id) as elastic:
                for epoch, batches in elastic.epochs(BATCHES, self.num_epochs, scheduler=scheduler):
                    for batch in batches:
                        assert epoch == elastic.epoch
                        with self.reached:
                            seen.append((elastic.local_step, epoch, elastic.lr))
                            self.reached.notify_all()
                        take_step(model, elastic, batch)
                        scheduler.step()
                        time.sleep(step_s)
                        if stops_at is not None and elastic.local_step >= stops_at:
                            return elastic, None
                return elastic, elastic.center_state_dict()

        return run


def rate_at(step, num_steps):
    return LR * (1 - step / num_steps)


@pytest.mark.parametrize("method", METHODS)
def test_a_late_worker_has_step_epoch_rate_and_end_of_the_others(method):
    run = Run(method, (1, 2))
    loops = [run.loop("w0", step_s=0.005), run.loop("w1", after=30, step_s=0.005)]
    (first, center), (late, late_center) = run_all(loops)
    first_steps, steps = ([step for step, _, _ in run.seen[name]] for name in ("w0", "w1"))
    assert first_steps == list(range(len(first_steps)))
    # Without rounds in common the late one may overtake: the first at the end ends it for all.
    assert max(first_steps[-1], steps[-1]) == run.num_steps - 1
    assert 30 <= steps[0] < run.num_steps - 10, "it begins where the others are"
    assert len(steps) <= run.num_steps - steps[0]
    for step, epoch, rate in run.seen["w1"]:
        assert epoch == step // len(BATCHES)
        assert rate == pytest.approx(rate_at(step, run.num_steps))
    assert first.local_step == late.local_step == first.end == run.num_steps
    assert first.is_over
    assert late.is_over
    if run.threads.is_sync:
        assert first_steps == list(range(run.num_steps))
        assert steps == list(range(steps[0], run.num_steps))
        assert equal_states(center, late_center)


def test_a_slow_worker_ends_with_its_exchange_when_another_has_reached_the_end():
    run = Run("async-easgd", 2, num_epochs=3)
    (_, _), (slow, _) = run_all([run.loop("w0", step_s=0.005), run.loop("w1", step_s=0.2)])
    assert slow.is_over
    assert slow.local_step == run.num_steps, "the end is that of all"
    assert len(run.seen["w1"]) < run.num_steps / 2
    assert len(run.seen["w1"]) % 2 == 0, "it has completed its round"


@pytest.mark.parametrize("method", ["sync-easgd", "diloco", "async-easgd"])
def test_a_worker_that_comes_after_the_end_takes_no_step_and_has_the_center(method, capsys):
    run = Run(method, 2, num_epochs=2)
    (_, center), _ = run_all([run.loop("w0"), run.loop("w1")])
    late, late_center = run.loop("w2")()
    assert run.seen["w2"] == []
    assert late.is_over
    assert late.local_step == run.num_steps
    if run.threads.is_sync:
        assert equal_states(center, late_center)
    assert f"'run' has ended at step {run.num_steps}" in capsys.readouterr().err


@pytest.mark.parametrize("period", [2, 7, 1000])
def test_workers_that_begin_together_take_all_steps_also_in_a_last_partial_round(period):
    run = Run("sync-easgd", 2, num_epochs=3, period=period)
    run_all([run.loop("w0"), run.loop("w1", step_s=0.02)])
    for worker_id in ("w0", "w1"):
        assert [step for step, _, _ in run.seen[worker_id]] == list(range(run.num_steps))


def test_a_worker_that_leaves_its_loop_does_not_end_the_others():
    run = Run("sync-easgd", 2, num_epochs=3)
    _, (left, _) = run_all([run.loop("w0"), run.loop("w1", stops_at=20)])
    assert not left.is_over
    assert len(run.seen["w1"]) == 20
    assert len(run.seen["w0"]) == run.num_steps


def test_a_worker_that_is_left_alone_goes_on_to_the_end():
    run = Run("sync-easgd", 1, num_epochs=3)
    (elastic, _) = run.loop("w0")()
    assert len(run.seen["w0"]) == elastic.local_step == run.num_steps


def test_a_replacement_after_all_were_lost_goes_on_to_the_common_end():
    run = Run("sync-easgd", 1, num_epochs=3)
    run.loop("w0", stops_at=25)()  # the last one leaves its center
    run.loop("w1")()
    assert [step for step, _, _ in run.seen["w1"]] == list(range(25, run.num_steps))


def test_another_loop_than_epochs_says_its_end_with_finish():
    run = Run("sync-easgd", 2, num_epochs=50)

    model, optimizer, _ = parts()

    def own_loop():
        with run.threads.attach(model, optimizer, "w0") as elastic:
            while elastic.local_step < 40:
                take_step(model, elastic, BATCHES[0])
            elastic.finish()

    _, (other, _) = run_all([own_loop, run.loop("w1")])
    assert other.is_over
    assert len(run.seen["w1"]) <= 42


def test_a_loop_without_an_end_trains_on_after_that_of_another():
    run = Run("sync-easgd", 2, num_epochs=2)

    model, optimizer, _ = parts()

    def endless():
        with run.threads.attach(model, optimizer, "w1") as elastic:
            while elastic.local_step < run.num_steps + 20:
                take_step(model, elastic, BATCHES[0])
            return elastic.is_over

    assert run_all([run.loop("w0"), endless])[1], "it may ask"


# one worker


def alone():
    model, optimizer, scheduler = parts(total=60)
    return model, attach_alone(model, optimizer, method="sync-easgd"), scheduler


@pytest.mark.parametrize("has_scheduler_state", [False, True])
def test_a_resumed_loop_goes_on_at_its_step(has_scheduler_state):
    model, elastic, scheduler = alone()
    with elastic:
        for _, batches in elastic.epochs(BATCHES, 3, scheduler=scheduler):
            for batch in batches:
                take_step(model, elastic, batch)
                scheduler.step()
                if elastic.local_step == 28:
                    break
            if elastic.local_step == 28:
                state = elastic.state_dict(), scheduler.state_dict()
                break
    model, elastic, scheduler = alone()
    elastic.load_state_dict(state[0])
    if has_scheduler_state:
        scheduler.load_state_dict(state[1])
    seen = []
    with elastic:
        for epoch, batches in elastic.epochs(BATCHES, 3, scheduler=scheduler):
            for batch in batches:
                seen.append((elastic.local_step, epoch))
                assert elastic.lr == pytest.approx(rate_at(elastic.local_step, 60))
                take_step(model, elastic, batch)
                scheduler.step()
    assert seen == [(step, step // 20) for step in range(28, 60)]


def test_each_epoch_has_all_batches_and_code_after_them_runs_once_per_epoch():
    model, elastic, scheduler = alone()
    seen, ends = [], []
    with elastic:
        for epoch, batches in elastic.epochs(
            BATCHES, 3, scheduler=scheduler, interval="epoch", batches_per_step=3
        ):
            for number, batch in enumerate(batches, 1):
                seen.append(float(batch[0, 0]))
                if number % 3 == 0 or number == len(BATCHES):
                    take_step(model, elastic, batch)
            scheduler.step()
            ends.append(epoch)
        assert elastic.local_step == 21
        assert elastic.is_over
    assert seen == [float(n) for n in range(20)] * 3
    assert ends == [0, 1, 2]


def test_skipped_steps_use_up_their_batches():
    model, elastic, _ = alone()
    num_batches = 0
    with elastic:
        for _, batches in elastic.epochs(BATCHES, 1):
            for batch in batches:
                num_batches += 1
                take_step(model, elastic, batch if num_batches != 5 else batch * torch.nan)
    assert num_batches == 20


def test_a_number_of_steps_ends_within_an_epoch_and_a_loader_without_length_begins_again():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(BATCHES)

    for loader in (BATCHES, torch.utils.data.DataLoader(Stream(), batch_size=None)):
        model, elastic, _ = alone()
        seen = []
        with elastic:
            for epoch, batches in elastic.epochs(loader, num_steps=45):
                for batch in batches:
                    seen.append(epoch)
                    take_step(model, elastic, batch)
        assert seen == [0] * 20 + [1] * 20 + [2] * 5


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (BATCHES, {}, "num_epochs or num_steps must be given"),
        (BATCHES, {"num_epochs": 1, "num_steps": 1}, "and not both"),
        (BATCHES, {"num_epochs": -1}, "num_epochs must be 0 or more, got -1"),
        (BATCHES, {"num_epochs": 1, "batches_per_step": 0}, "must be 1 or more, got 0"),
        (BATCHES, {"num_epochs": 1, "interval": "batch"}, "must be 'step' or 'epoch'"),
        ([], {"num_epochs": 1}, "loader has no batches"),
        (iter(BATCHES), {"num_epochs": 1}, "without a length; give num_steps"),
    ],
)
def test_a_wrong_length_is_refused_in_one_sentence(loader, options, message):
    _, elastic, _ = alone()
    with pytest.raises(ConfigError, match=message):
        elastic.epochs(loader, **options)


def test_a_scheduler_that_needs_scores_is_refused():
    _, elastic, _ = alone()
    plateau = lr_scheduler.ReduceLROnPlateau(elastic)
    with pytest.raises(ConfigError, match="cannot be ReduceLROnPlateau: its rate depends on all"):
        elastic.epochs(BATCHES, 1, scheduler=plateau)


class Steered:
    """A handle that says where the others are."""

    def __init__(self):
        self.epoch = self.local_step = self.ahead = 0
        self.is_over = False

    def set_end(self, num_steps):
        self.end = num_steps

    def join(self):
        pass

    def pop_num_ahead(self):
        self.local_step, ahead, self.ahead = self.local_step + self.ahead, self.ahead, 0
        return ahead

    def finish(self):
        self.is_over = True


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("num_ahead", [3, 10, 31])
def test_a_worker_that_enters_again_behind_the_others_moves_on_to_them(interval, num_ahead):
    handle, optimizer = Steered(), momentum_sgd()
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    options = {"num_steps": None, "batches_per_step": 1}
    epochs = Epochs(handle, range(10), 6, scheduler=scheduler, interval=interval, **options)
    seen = []
    for epoch, batches in epochs:
        for _ in batches:
            seen.append((handle.local_step, epoch))
            count = handle.local_step if interval == "step" else epoch
            assert optimizer.param_groups[0]["lr"] == pytest.approx(LR * 0.9**count)
            optimizer.step()
            handle.local_step += 1
            if interval == "step":
                scheduler.step()
            if handle.local_step == 13:
                handle.ahead = num_ahead
        if interval == "epoch":
            scheduler.step()
    expected = [*range(13), *range(13 + num_ahead, 60)]
    assert seen == [(step, step // 10) for step in expected]
    assert handle.end == 60


# schedulers

SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 1 - 0.01 * n),
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [2, 6], 0.1),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 1.0, 3),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 12, 2.0),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.3, 5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def momentum_sgd():
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return torch.optim.SGD([parameter], lr=LR, momentum=0.9)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("error")
def test_a_scheduler_is_brought_to_the_rate_that_it_has_after_as_many_steps(name):
    stepped, brought = momentum_sgd(), momentum_sgd()
    scheduler = SCHEDULERS[name](stepped)
    for _ in range(7):
        stepped.step()
        scheduler.step()
    late = SCHEDULERS[name](brought)
    assert not needs_scores(late)
    assert count_of(late) == 0
    advance(late, 7)
    assert count_of(late) == 7
    for key in ("lr", "momentum"):
        assert brought.param_groups[0][key] == stepped.param_groups[0][key]
    for optimizer, each in ((stepped, scheduler), (brought, late)):
        optimizer.step()
        each.step()
    assert brought.param_groups[0]["lr"] == stepped.param_groups[0]["lr"]
