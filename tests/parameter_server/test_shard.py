"""A shard of the center: completions, membership, copies, and shared memory."""

import dataclasses
import itertools
import os
import threading
import time

import numpy as np
import pytest
import torch
from coordinators import Add, make_shard, request
from mails import NO_BUFFERS, message
from mapped_cells import ASSIGNMENT, FakeCenterClient, open_exchange, open_shard

from raydl.config import OptimizerConfig
from raydl.core.codecs import parse_codec
from raydl.core.exchange import Header
from raydl.core.membership import Membership
from raydl.core.optimizers import make_optimizer
from raydl.core.rules import AheadRule, Now, Rule
from raydl.errors import ExchangeTimeoutError
from raydl.methods.easgd import Elastic
from raydl.methods.outer import Outer
from raydl.parameter_server.protocol import NOTHING, CellAddress, Completion, MessageId, Response
from raydl.parameter_server.shard import Shard
from raydl.parameter_server.shared_memory import MappedCell, open_cells
from raydl.worker.in_process import HERE

SOON_S = 5.0
ENDS_ROUND = Completion(Header(), 1, 1, 0.1, 0)


class RecordingAdd(Rule):
    """c <- c + message, with a record of the numbers of each update."""

    def __init__(self):
        self.seen = []

    def merge_(self, center, mail, state, now):
        self.seen.append((mail.count, mail.weight, now))
        center.add_(mail.total(*self.lanes))


class RecordingWeights(RecordingAdd, AheadRule):
    """The same rule for messages of weights."""


class FakeCoordinator:
    """A coordinator that records its requests; with assignment None the worker was removed."""

    def __init__(self, assignment=ASSIGNMENT):
        self.assignment, self.settled, self.repeated = assignment, [], []

    def settle(self, request):
        self.settled.append(request)
        return self.assignment

    def repeat(self, request):
        self.repeated.append(request)
        return self.assignment


def shard_of(weights, *, spans=None, rule=None, buffers=(), codec=None, is_locked=True, **more):
    weights = torch.tensor(weights, dtype=torch.float32)
    shard = Shard(
        spans or [(0, len(weights))],
        weights,
        torch.tensor(buffers, dtype=torch.float32),
        rule=rule or RecordingAdd(),
        make_optimizer=make_optimizer(OptimizerConfig()),
        is_locked=is_locked,
        codec=parse_codec(codec) if codec else None,
        **more,
    )
    shard.begin_generation(Membership(0, ("w0", "w1")))
    return shard


def lists(state):
    return [weights.tolist() for weights in state.weights]


# messages


def test_an_update_gets_its_number_of_messages_their_weight_and_their_staleness():
    rule = RecordingAdd()
    shard = shard_of([0, 0], rule=rule)
    for sender, number in (("w0", 0), ("w1", 0), ("w1", 1), ("w0", 1)):
        shard.exchange(request(sender, number, [1, 2]))
    assert rule.seen == [(1, 1.0, Now(2, staleness=stale)) for stale in (0, 0, 0, 2)]


def test_each_span_is_moved_by_its_own_messages_which_are_counted_separately():
    shard = shard_of([1, 2, 3, 4], spans=[(0, 1), (2, 4)])
    assert lists(shard.state()) == [[1], [3, 4]]
    assert shard.exchange(request("w0", 0, [1, 1], span=(2, 4))).weights.tolist() == [4, 5]
    assert shard.exchange(request("w0", 0, [1], span=(0, 1))).weights.tolist() == [2]
    assert shard.num_repeated == 0
    state = shard.state()
    assert state.spans == [(0, 1), (2, 4)]
    assert lists(state) == [[2], [4, 5]]


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize(("distrust", "center"), [(0.0, 4.0), (0.5, 3.0), (1.0, 2.0)])
def test_a_distrusted_message_moves_the_center_less(codec, distrust, center):
    """c = 2, although both workers began at 0; x = 6 and alpha = 1/2."""
    shard = shard_of([0.0] * 8, rule=Elastic(1.0), codec=codec)
    for worker_id, x, f in (("w0", 4.0, 0.0), ("w1", 6.0, distrust)):
        weights = torch.full((8,), x)
        values = weights if codec is None else parse_codec(codec).encode(weights)
        message = dataclasses.replace(request(worker_id, 0, values, span=(0, 8)), distrust=f)
        shard.exchange(message)
    assert lists(shard.state())[0] == pytest.approx([center] * 8, rel=1e-5)


def test_a_message_older_than_the_newest_counts_as_repeated():
    shard = shard_of([0.0])
    for sequence in [1, 0, 1, 0]:
        shard.exchange(request("w0", sequence, [1.0]))
    assert lists(shard.state()) == [[1.0]]
    assert shard.num_repeated == 3


def test_an_answer_and_a_copy_do_not_change_with_the_center():
    shard = shard_of([0.0], buffers=[0.0], coordinator=FakeCoordinator())
    response, state = shard.exchange(request("w0", 0, [1.0])), shard.state()
    later = dataclasses.replace(request("w0", 1, [1.0], completion=ENDS_ROUND), buffers=one(4.0))
    settled = shard.exchange(later)
    shard.exchange(dataclasses.replace(later, message_id=MessageId("w0", 0, 2)))
    assert (response.weights.tolist(), lists(state)) == ([1.0], [[1.0]])
    assert (state.buffers.tolist(), settled.buffers.tolist()) == ([0.0], [2.0])


@pytest.mark.parametrize(
    ("worker_id", "generation", "reason"),
    [
        ("w2", 0, "w2: it is no longer a member (generation 3)"),
        ("w1", 0, "w1: it entered generation 3, but the message is of generation 0"),
        ("w0", 3, "w0: it entered generation 0, but the message is of generation 3"),
    ],
)
def test_the_answer_to_a_refused_message_has_the_reason_and_no_values(
    worker_id, generation, reason
):
    shard = shard_of([0.0], coordinator=(fake := FakeCoordinator()))
    shard.change(Membership(2, ("w0",)))
    shard.change(Membership(3, ("w0", "w1")))
    message = request(worker_id, 0, [1.0], generation=generation, completion=ENDS_ROUND)
    response = shard.exchange(message)
    assert response.refusal == f"the center refused {reason}"
    assert (response.weights.size, response.buffers.size, response.assignment) == (0, 0, None)
    assert (response.weights.dtype, response.buffers.dtype) == (np.float32, np.float32)
    assert (shard.num_refused, fake.settled, lists(shard.state())) == (1, [], [[0.0]])
    shard.exchange(message)
    assert shard.num_refused == 2


# completions


def one(value):
    return np.array([value], np.float32)


def test_the_answer_to_a_completion_has_an_assignment_once_the_center_has_moved():
    shard = shard_of([0.0], buffers=[2.0], coordinator=(fake := FakeCoordinator()))
    message = dataclasses.replace(request("w0", 0, [1.0], completion=ENDS_ROUND), buffers=one(6.0))
    response = shard.exchange(message)
    assert response.assignment is ASSIGNMENT
    assert response.buffers.tolist() == [4.0]  # b + (6 - b) / 2
    assert shard.state().buffers.tolist() == [4.0]
    assert (fake.settled, fake.repeated) == ([message], [])
    again = shard.exchange(message)
    assert again.assignment is ASSIGNMENT
    assert again.buffers.tolist() == [4.0]
    assert (fake.settled, fake.repeated) == ([message], [message])


def test_a_completion_alone_moves_nothing_and_counts_once():
    shard = shard_of([1.0], coordinator=(fake := FakeCoordinator()))
    message = request("w0", 0, [], span=(0, 0), completion=ENDS_ROUND)
    for _ in range(2):
        response = shard.exchange(message)
        assert (response.weights.tolist(), response.assignment) == ([], ASSIGNMENT)
    assert (len(fake.settled), len(fake.repeated)) == (1, 1)
    assert lists(shard.state()) == [[1.0]]


@pytest.mark.parametrize("coordinator", [None, FakeCoordinator()])
def test_a_message_in_the_middle_of_a_round_gets_no_assignment(coordinator):
    shard = shard_of([0.0], coordinator=coordinator)
    completion = ENDS_ROUND if coordinator is None else None  # only the home shard assigns
    message = dataclasses.replace(request("w0", 0, [1.0], completion=completion), buffers=one(9.0))
    response = shard.exchange(message)
    assert (response.weights.tolist(), response.buffers.tolist()) == ([1.0], [9.0])
    assert (response.assignment, response.refusal) == (None, "")


def test_a_worker_removed_while_its_message_moved_the_center_is_refused():
    """The coordinator counts this refusal; the shard does not."""
    shard = shard_of([0.0], coordinator=FakeCoordinator(assignment=None))
    response = shard.exchange(request("w0", 0, [1.0], completion=ENDS_ROUND))
    assert response.refusal == "the center refused w0: it is no longer a member (generation 0)"
    assert response.assignment is None
    assert (shard.num_refused, lists(shard.state())) == (0, [[1.0]])


# membership


def test_a_remaining_worker_continues_its_numbers_and_a_returning_one_starts_anew():
    shard = shard_of([0.0])
    shard.exchange(request("w0", 0, [1.0]))
    shard.exchange(request("w1", 0, [1.0]))
    state = shard.change(Membership(2, ("w0",)))
    assert (state.spans, lists(state), state.buffers.tolist()) == ([(0, 1)], [[2.0]], [])
    shard.change(Membership(3, ("w0", "w1")))
    shard.exchange(request("w0", 0, [1.0]))  # the same message as before
    assert (shard.num_repeated, lists(shard.state())) == (1, [[2.0]])
    shard.exchange(
        request("w1", 0, [1.0], generation=3)
    )  # the first message after w1 entered again
    assert (shard.num_repeated, lists(shard.state())) == (1, [[3.0]])


def test_a_shard_that_begins_a_generation_lets_all_workers_enter_anew():
    shard = shard_of([0.0])
    shard.exchange(request("w0", 0, [1.0]))
    shard.begin_generation(Membership(4, ("w0",)))
    assert "it entered generation 4" in shard.exchange(request("w0", 1, [1.0])).refusal
    assert not shard.exchange(request("w0", 0, [1.0], generation=4)).refusal
    assert lists(shard.state()) == [[2.0]]


# compressed messages


@pytest.mark.parametrize("rule", [RecordingAdd, RecordingWeights])
def test_a_repeated_compressed_message_gets_the_same_answer(rule):
    shard, codec = shard_of([0.0] * 8, rule=rule(), codec="int8"), parse_codec("int8")
    message = request("w0", 0, codec.encode(torch.arange(8.0)), span=(0, 8))
    first = shard.exchange(message)
    before = lists(shard.state())
    shard.exchange(request("w1", 0, codec.encode(torch.ones(8)), span=(0, 8)))
    moved = lists(shard.state())
    assert moved != before
    assert shard.exchange(message).weights.tolist() == first.weights.tolist()
    assert lists(shard.state()) == moved


class OvertakenLock:
    """A lock that its first caller gets only after a second caller has held and released it."""

    def __init__(self, lock):
        self._lock, self._calls = lock, itertools.count()
        self.waits, self.overtaken = threading.Event(), threading.Event()

    def __enter__(self):
        if next(self._calls) == 0:
            self.waits.set()
            assert self.overtaken.wait(SOON_S)
        self._lock.__enter__()

    def __exit__(self, *exception):
        self._lock.__exit__(*exception)
        self.overtaken.set()


def exchange_in_thread(shard, message):
    """Return the thread that sends a message, and the list that receives the answer."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(shard.exchange(message)))
    thread.start()
    return thread, answers


@pytest.mark.parametrize("is_locked", [True, False])
@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("rule", [RecordingAdd, RecordingWeights])
def test_a_compressed_message_overtaken_by_its_copy_is_applied_once_and_answered_alike(
    rule, num_before, is_locked
):
    codec = parse_codec("int8")
    shards = [shard_of([3.0] * 8, rule=rule(), codec="int8", is_locked=is_locked) for _ in "ab"]
    messages = [
        request("w0", k, codec.encode(torch.full((8,), k + 2.0)), span=(0, 8)) for k in range(2)
    ]
    for shard, sent in itertools.product(shards, messages[:num_before]):
        shard.exchange(sent)
    shard, plain = shards
    [cell] = shard._cells.values()
    cell.lock = OvertakenLock(cell.lock)
    thread, answers = exchange_in_thread(shard, messages[num_before])
    assert cell.lock.waits.wait(SOON_S)
    answers.append(shard.exchange(messages[num_before]))  # the copy
    thread.join(SOON_S)
    expected = plain.exchange(messages[num_before]).weights.tolist()
    assert [answer.weights.tolist() for answer in answers] == [expected, expected]
    assert lists(shard.state()) == lists(plain.state())


class PausingAdd(RecordingAdd):
    """A rule that pauses in its first update until an event is set."""

    def __init__(self):
        super().__init__()
        self.began, self.goes_on = threading.Event(), threading.Event()

    def merge_(self, center, mail, state, now):
        if not self.began.is_set():
            self.began.set()
            assert self.goes_on.wait(SOON_S)
        super().merge_(center, mail, state, now)


def test_with_hogwild_a_copy_waits_for_the_answer_to_the_compressed_message():
    shard = shard_of([0.0] * 8, rule=(rule := PausingAdd()), codec="int8", is_locked=False)
    message = request("w0", 0, parse_codec("int8").encode(torch.ones(8)), span=(0, 8))
    first, answers = exchange_in_thread(shard, message)
    assert rule.began.wait(SOON_S)
    copy, others = exchange_in_thread(shard, message)
    copy.join(0.1)  # without the wait the copy would be answered by now
    assert (copy.is_alive(), others) == (True, [])
    rule.goes_on.set()
    for thread in (first, copy):
        thread.join(SOON_S)
    assert answers[0].weights.tolist() == others[0].weights.tolist()
    assert len(rule.seen) == 1


@pytest.mark.parametrize("rule", [RecordingAdd, RecordingWeights])
def test_the_decoded_answer_moves_the_workers_mirror_to_the_center(rule):
    """The mirror is the center after a message of progress, and before a message of weights."""
    shard, codec = shard_of([3.0] * 8, rule=rule(), codec="int8"), parse_codec("int8")
    mirror, decoded = torch.full((8,), 3.0), torch.empty(8)
    sent = torch.full((8,), 2.0)  # lossless for equal numbers
    for sequence in range(3):
        before = torch.tensor(shard.state().weights[0])
        response = shard.exchange(request("w0", sequence, codec.encode(sent), span=(0, 8)))
        mirror += codec.decode(torch.tensor(response.weights), out=decoded)
        after = torch.tensor(shard.state().weights[0])
        expected = after if rule is RecordingAdd else before
        torch.testing.assert_close(mirror, expected, rtol=0.02, atol=0.02)
    if rule is RecordingAdd:
        torch.testing.assert_close(after, torch.full((8,), 9.0), rtol=0.02, atol=0.02)


def test_a_worker_removed_after_its_compressed_message_was_accepted_is_refused_and_moves_nothing():
    shard, codec = shard_of([0.0] * 8, codec="int8"), parse_codec("int8")
    message = request("w0", 0, codec.encode(torch.ones(8)), span=(0, 8))
    [cell] = shard._cells.values()
    for states in ({}, {"w0": dataclasses.replace(cell.codec_states["w0"], entered=5)}):
        cell.codec_states = states
        response = shard.exchange(message)
        assert response.refusal == "the center refused w0: it is no longer a member (generation 0)"
    assert shard.num_refused == 2
    assert lists(shard.state()) == [[0.0] * 8]


def test_remaining_workers_keep_their_codec_state_and_newcomers_start_with_the_current_center():
    shard, codec = shard_of([0.0] * 8, codec="int8"), parse_codec("int8")
    shard.exchange(request("w0", 0, codec.encode(torch.ones(8)), span=(0, 8)))
    [cell] = shard._cells.values()
    stays = cell.codec_states["w0"]
    state = shard.change(Membership(2, ("w0", "w2")))
    assert cell.codec_states.keys() == {"w0", "w2"}
    assert cell.codec_states["w0"] is stays
    assert cell.codec_states["w2"].entered == 2
    assert cell.codec_states["w2"].mirror.tolist() == state.weights[0].tolist()
    shard.begin_generation(Membership(2, ("w0", "w2")))
    assert cell.codec_states["w0"] is not stays


# optimizers


def test_the_optimizer_states_of_a_shard_load_into_another():
    rule = Outer(1.0, momentum=0.5)
    spans = [(0, 1), (1, 3)]
    one_, other = (shard_of([0.0] * 3, spans=spans, rule=rule) for _ in range(2))
    for shard in (one_, other):
        for span in spans:
            shard.exchange(request("w0", 0, [1.0] * (span[1] - span[0]), span=span))
    one_.exchange(request("w0", 1, [4.0, 4.0], span=(1, 3)))
    states = one_.optimizer_states()
    assert list(states) == spans
    assert [str(state) for state in one_.state().optimizers] == [str(x) for x in states.values()]
    other.load_optimizers(states)
    assert str(other.optimizer_states()) == str(states)
    zero = [0.0, 0.0]
    before = other.state().weights[1]
    other.exchange(request("w0", 2, zero, span=(1, 3)))
    assert (before - other.state().weights[1]).tolist() == pytest.approx([4.5 * 0.5] * 2)


# shared memory


def test_the_memory_at_a_shards_address_holds_the_center():
    cell = MappedCell.create(torch.tensor([1.0, 2.0]), is_locked=True, timeout_s=1.0)
    cell.admit({"w0": 3, "w1": 0})
    addresses = [cell.address_for(worker_id) for worker_id in ("w0", "w1")]
    assert cell.address_for("w2") is None
    assert all(address.path.startswith(f"/proc/{os.getpid()}/fd/") for address in addresses)
    opened = MappedCell.open_address(addresses[0], 2, is_locked=True, timeout_s=1.0)
    assert opened.weights.tolist() == [1.0, 2.0]
    opened.weights.add_(1.0)
    assert cell.weights.tolist() == [2.0, 3.0]
    assert [opened.entered(address.slot) for address in addresses] == [3, 0]
    cell.admit({"w1": 0, "w2": 4})
    assert opened.entered(addresses[0].slot) in (None, 4)
    assert opened.entered(addresses[1].slot) == 0
    assert opened.entered(cell.address_for("w2").slot) == 4
    cell.admit({})
    assert [opened.entered(address.slot) for address in addresses] == [None, None]


def test_the_memories_of_two_centers_have_different_tokens():
    cells = [MappedCell.create(torch.zeros(1), is_locked=True, timeout_s=1.0) for _ in range(2)]
    for cell in cells:
        cell.admit({"w0": 0})
    one_, other = (cell.address_for("w0") for cell in cells)
    assert one_.token != other.token


def test_memory_with_another_size_or_token_is_closed_again():
    cell = MappedCell.create(torch.zeros(2), is_locked=True, timeout_s=1.0)
    cell.admit({"w0": 0})
    address, before = cell.address_for("w0"), len(os.listdir("/proc/self/fd"))
    for size in (1, 3, 2000):
        assert MappedCell.open_address(address, size, is_locked=True, timeout_s=1.0) is None
    wrong = dataclasses.replace(address, token=address.token - 1)
    assert MappedCell.open_address(wrong, 2, is_locked=True, timeout_s=1.0) is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def cells():
    """The memory, opened twice as by two processes."""
    cell = MappedCell.create(torch.zeros(1), is_locked=True, timeout_s=0.3)
    cell.admit({"w0": 0})
    return cell, MappedCell.open_address(cell.address_for("w0"), 1, is_locked=True, timeout_s=0.3)


@pytest.mark.parametrize("other", [0, 1])
def test_a_lock_that_times_out_names_the_exchange_and_the_holder(cells, other):
    began = time.monotonic()
    with cells[0].held(0, 0):
        errors = []

        def wait():
            with pytest.raises(ExchangeTimeoutError) as caught, cells[other].held(5, 2):
                pass
            errors.append(caught.value)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(SOON_S)
    [error] = errors
    assert (error.round, error.generation, error.timeout_s) == (5, 2, 0.3)
    assert error.missing == (f"process {os.getpid()}, which holds the center",)
    assert 0.3 <= time.monotonic() - began < SOON_S
    for cell in (*cells, *cells):  # both cells can take the lock again
        with cell.held(6, 2):
            pass


def test_the_lock_is_free_again_after_an_error(cells):
    for cell in cells:
        with pytest.raises(ZeroDivisionError), cell.held(0, 0):
            raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), cell.read():
            raise ZeroDivisionError
    with cells[1].held(0, 0):
        pass


def test_a_reader_waits_for_the_lock_up_to_its_time_out_and_then_reads_without_it(cells):
    with cells[0].held(0, 0):
        began = time.monotonic()
        with cells[1].read():
            assert 1.0 <= time.monotonic() - began < SOON_S
        with pytest.raises(ExchangeTimeoutError), cells[1].held(1, 0):
            pass  # the reader did not take the lock from its holder
    with cells[1].read(), pytest.raises(ExchangeTimeoutError), cells[0].held(2, 0):
        pass  # a reader takes a free lock


def test_without_a_lock_no_process_waits():
    cell = MappedCell.create(torch.zeros(1), is_locked=False, timeout_s=60.0)
    with cell.held(0, 0), cell.held(1, 0), cell.read():
        pass


def test_an_exchange_in_the_middle_of_a_round_sends_no_completion():
    client = FakeCenterClient()
    exchange = open_exchange(open_shard(2), client=client)
    exchange._is_last = False
    sent = message(Elastic(0.5), torch.tensor([4.0, 8.0]))
    exchange.begin(sent, NO_BUFFERS, Header())
    assert exchange.wait().now == Now(2)
    exchange.commit()
    assert client.settled == []
    assert exchange._session.num_bytes == 2 * 2 * 4  # each weight, sent and received
    exchange.begin(sent, NO_BUFFERS, Header())
    assert exchange._session.num_bytes == 2 * (2 * 2 * 4)


class ClientWithBuffers(FakeCenterClient):
    """A client whose answers have float buffers."""

    def wait(self):
        return Response(NOTHING, np.array([7.0], np.float32), self.assignment)


def test_committing_an_answer_sets_buffers_and_assignment():
    client = ClientWithBuffers()
    client.assignment = dataclasses.replace(ASSIGNMENT, version=9)
    exchange = open_exchange(open_shard(1), client=client)
    exchange.center = dataclasses.replace(exchange.center, buffers=torch.zeros(1))
    exchange.begin(message(Elastic(0.5), torch.ones(1)), torch.full((1,), 5.0), Header())
    exchange.wait()
    assert (exchange.center.buffers.item(), exchange._session.version) == (0.0, 0)
    exchange.commit()
    assert (exchange.center.buffers.item(), exchange._session.version) == (7.0, 9)
    [settled] = client.settled
    assert settled.buffers.tolist() == [5.0]
    assert settled.completion.num_bytes == 8
    exchange._session.set_assignment(ASSIGNMENT)
    exchange.commit()
    assert exchange._session.version == 0, "an answer is applied once"


def test_the_cells_that_a_process_can_map_have_the_workers_slot():
    shard = open_shard(2)
    [(span, address)] = shard.shared_cells("w1", HERE).items()
    gone = CellAddress("/proc/1/fd/999", 1, 2)

    class Posted:
        def shared_cells(self, message_id):
            return {(5, 9): gone, span: address}

    found = open_cells(Posted(), MessageId("w1", 1, 0), is_locked=True, timeout_s=0.25)
    assert list(found) == [span]
    cell, slot = found[span]
    assert slot == address.slot
    assert (cell.weights.numel(), cell.entered(slot)) == (2, 1)
    held = shard._cells[span].mapped.held(0, 0)
    with held, pytest.raises(ExchangeTimeoutError) as caught, cell.held(1, 1):
        pass
    assert caught.value.timeout_s == 0.25


# which messages were applied


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_shard_knows_the_newest_applied_message_of_a_worker_that_was_removed(codec):
    shard = shard_of([0.0] * 4, spans=[(0, 2), (2, 4)], codec=codec)
    values = [1.0, 0.0] if codec is None else parse_codec(codec).encode(torch.tensor([1.0, 0.0]))
    for number, span in ((0, (0, 2)), (1, (2, 4)), (2, (0, 2))):
        shard.exchange(request("w1", number, values, span=span))
    shard.change(Membership(2, ("w0",)))
    assert "no longer a member" in shard.exchange(request("w1", 3, values, span=(0, 2))).refusal
    shard.change(Membership(3, ("w0", "w1")))
    assert shard.applied("w1", 0) == {(0, 2): 2, (2, 4): 1}
    assert shard.applied("w1", 3) == shard.applied("w0", 0) == {(0, 2): -1, (2, 4): -1}
    shard.begin_generation(Membership(4, ("w0", "w1")))
    assert shard.applied("w1", 0) == {(0, 2): 2, (2, 4): 1}


def test_a_restarted_shard_does_not_know_what_was_applied_before():
    shard_of([0.0]).exchange(request("w0", 0, [1.0]))
    assert shard_of([1.0]).applied("w0", 7) == {}


def test_a_shard_forgets_the_messages_of_long_gone_workers():
    shard = shard_of([0.0])
    for generation in range(1, 1100):
        shard.change(Membership(generation, (f"w{generation}", "w0")))
    assert shard.applied("w1", 1) == {}
    assert shard.applied("w1000", 1000) == shard.applied("w0", 0) == {(0, 1): -1}


@pytest.mark.parametrize("is_locked", [True, False], ids=["async", "hogwild"])
@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_message_that_meets_the_removal_is_applied_and_known_or_neither(is_locked, codec, pool):
    values = [1.0] * 4 if codec is None else parse_codec(codec).encode(torch.ones(4))
    for _ in range(50):
        shard = shard_of([0.0] * 4, codec=codec, is_locked=is_locked)
        late = pool.submit(shard.exchange, request("w1", 0, values, span=(0, 4)))
        shard.change(Membership(2, ("w0",)))
        known = shard.applied("w1", 0)[0, 4]
        refusal = late.result(SOON_S).refusal
        assert known == (-1 if refusal else 0)
        assert lists(shard.state()) == [[0.0 if refusal else 1.0] * 4]


def test_of_many_former_members_those_of_the_lowest_ranks_are_forgotten_first():
    workers = [f"w{i}" for i in range(1100)]
    shard = make_shard(Add(), 2)
    shard.begin_generation(Membership(1, tuple(workers)))
    for generation, members in ((2, ()), (3, ("new",))):
        shard.change(Membership(generation, members))
    known = [w for w in workers if shard.applied(w, 1)]
    assert 0 < len(known) < len(workers)
    assert known == workers[-len(known) :]
