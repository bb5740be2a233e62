"""A collective group of the user's own actors, which can form again when members are lost or join.

The members meet in one named actor per job (``user_group_keys.py``), which the first of them
starts.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from datetime import timedelta

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError
from ray.util import collective

from raydl.collective.failure_diagnosis import AGAIN, FailureDiagnosis
from raydl.collective.ray_collective import CenterStore, CollectiveGroup, GroupAddress, RayGroup
from raydl.config.tls import tls_files
from raydl.errors import ConfigError, ExchangeError, ExchangeTimeoutError
from raydl.ray_backend.cluster import START_S, has_ended
from raydl.ray_backend.user_group_keys import GroupKeysActor, Process, process_key


def init_collective_group(
    members: Sequence[str],
    member: str,
    group_name: str = "default",
    *,
    generation: int,
    timeout_s: float = 60.0,
    start_timeout_s: float = 60.0,
    device: str = "cpu",
) -> None:
    """Form a group with other actors, for the operations of ``ray.util.collective``.

    Each member calls it in its own actor, with the same members and generation, and waits for the
    others. The process first leaves the group's earlier generation, whatever its state. The same
    name in two Ray jobs names two groups.

    Args:
        members: the ids of all members, by rank: unique names of your choice.
        member: the id of this actor.
        group_name: the name of the group in ``ray.util.collective``.
        generation: a number to increase whenever the members change or the group has failed.
        timeout_s: the time-out of an operation, in seconds.
        start_timeout_s: the longest wait for the other members, in seconds.
        device: ``cpu`` for torch tensors in host memory and NumPy arrays, by gloo; ``cuda`` for
            torch tensors on one GPU per member, by NCCL.

    Raises:
        ConfigError: if an argument is wrong, or this process is not a Ray actor.
        ExchangeTimeoutError: if not all members arrived in time; ``missing`` names them.
        ExchangeError: if a member was lost, or a later generation has begun.
    """
    members = tuple(members)
    _check(members, member, group_name, generation)
    for name, seconds in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ConfigError(name, f"must be above 0 and finite, in seconds, got {seconds!r}")
    if device not in ("cpu", "cuda"):
        raise ConfigError("device", f"must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda" and tls_files(os.environ) is not None:
        raise ConfigError("device", "must be 'cpu' with RAY_USE_TLS=1: NCCL has no TLS")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "must be 'cpu' here: torch finds no GPU in this process")
    process, rank = _own_process(), members.index(member)
    _leave(group_name)  # this also releases members that wait there for this one
    actor = _enter(group_name, generation, members, rank, process)
    address = GroupAddress(group_name, generation, device, timeout_s)
    store = CenterStore(actor, address, len(members))
    processes = _wait_for_all(store, address, members, start_timeout_s)
    diagnosis = FailureDiagnosis(
        group_name,
        generation,
        members,
        rank,
        store=store,
        timeout_s=timeout_s,
        has_ended=lambda rank: has_ended(*processes[rank]),
    )
    CollectiveGroup(address, members, rank, center=actor, name=group_name, diagnosis=diagnosis)


def _check(members: tuple[str, ...], member: str, group_name: str, generation: int) -> None:
    if len(set(members)) < len(members) or not all(isinstance(m, str) for m in members):
        raise ConfigError("members", f"must be different strings, got {list(members)}")
    if member not in members:
        raise ConfigError("member", f"must be one of members {list(members)}, got {member!r}")
    if not isinstance(group_name, str) or not group_name:
        raise ConfigError("group_name", f"must be a string that is not empty, got {group_name!r}")
    if not isinstance(generation, int) or generation < 0:
        raise ConfigError("generation", f"must be a whole number from 0 on, got {generation!r}")


def _own_process() -> Process:
    """Return the actor id and the id of this process.

    Raises:
        ConfigError: if this process is not a Ray actor.
    """
    actor_id = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    if actor_id is None:
        raise ConfigError(
            "raydl.init_collective_group",
            "must be called inside a Ray actor; this process is not one",
        )
    return actor_id, os.getpid()


def _leave(group_name: str) -> None:
    """Leave the group with this name, if this process is in it.

    Raises:
        ConfigError: if the group has another back end.
    """
    if not collective.is_group_initialized(group_name):
        return
    if not isinstance(collective.get_group_handle(group_name), RayGroup):
        raise ConfigError(
            "group_name",
            f"{group_name!r} is a group of another back end in this process; use another name",
        )
    collective.destroy_collective_group(group_name)


def _enter(
    group_name: str, generation: int, members: tuple[str, ...], rank: int, process: Process
) -> ActorHandle:
    """Enter the generation at the rendezvous actor; return the actor.

    Raises:
        ConfigError: if another member of the generation has other arguments.
        ExchangeError: if a later generation has begun, or the actor does not answer.
    """
    deadline, problem = time.monotonic() + START_S, f"it did not answer for {START_S:g} s"
    while (left_s := deadline - time.monotonic()) > 0:
        actor = GroupKeysActor.options(  # type: ignore[attr-defined]
            name=f"raydl.collective {ray.get_runtime_context().get_job_id()}",
            namespace="raydl",
            get_if_exists=True,
            # Otherwise it would end with the member that started it.
            lifetime="detached",
            resources={"node:__internal_head__": 0.001},
        ).remote()
        try:
            entered = actor.enter.remote(group_name, generation, members, rank, process)
            refusal = ray.get(entered, timeout=left_s)
        except ActorDiedError:  # it has just ended: start the next one
            continue
        except GetTimeoutError:
            break
        except RayActorError as error:
            problem = str(error).partition("\n")[0]
            break
        if refusal is not None:
            raise refusal
        return actor
    raise ExchangeError(
        0,
        generation,
        f"the rendezvous actor of the group failed: {problem}; {AGAIN}",
        group=group_name,
    )


def _wait_for_all(
    store: CenterStore, address: GroupAddress, members: tuple[str, ...], timeout_s: float
) -> list[Process]:
    """Return the processes of all members by rank, once they have entered.

    Raises:
        ExchangeTimeoutError: if not all members entered in time.
        ExchangeError: if a later generation has begun, or the rendezvous actor was lost.
    """
    name, generation = address.run_id, address.generation
    keys, began = [process_key(rank) for rank in range(len(members))], time.monotonic()
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if time.monotonic() - began < timeout_s:
            raise ExchangeError(0, generation, f"{error}; {AGAIN}", group=name) from error
        missing = _absent(store, keys, members)
        setting = "start_timeout_s of raydl.init_collective_group"
        raise ExchangeTimeoutError(0, generation, timeout_s, missing, name, setting) from error
    places = [value.decode().split() for value in store.multi_get(keys)]
    return [(actor_id, int(pid)) for actor_id, pid in places]


def _absent(store: CenterStore, keys: list[str], members: tuple[str, ...]) -> list[str]:
    """Return the members whose keys are absent; empty if the store does not answer."""
    try:
        present = store.keys_present(keys, timedelta(0))
    except RuntimeError:
        return []
    return [member for member, key in zip(members, keys, strict=True) if key not in present]
