"""``raydl submit``: a training run as a Ray job."""

from __future__ import annotations

import os
import shlex
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

import raydl
from raydl.cli.options import STOPPED, parse_train
from raydl.config.checks import require, require_positive
from raydl.errors import ConfigError, RaydlError
from raydl.launch import submission
from raydl.ray_backend import session as ray_session
from raydl.redaction import redact
from raydl.run.versions import requirements

if TYPE_CHECKING:
    from raydl.config import TrainConfig
    from raydl.ray_backend.job_client import RayJobs

_MIB = 2**20
_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class _SubmitOptions:
    """Options of ``raydl submit``; those of the training come after ``--``."""

    address: str | None = None
    """The cluster's dashboard, http://HEAD:8265; unset: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or
    the cluster of this machine."""
    run_name: str | None = None
    """Name of the run, to find it again; unset: METHOD-MODEL-DATE."""
    retries: int = 0
    """How often the run is sent again, to go on, if its driver is lost."""
    working_dir: str | None = None
    """A folder to send along: your own code, fault plans, small data."""
    pip: _Flag = False
    """Let Ray install what raydl needs and the cluster lacks; else the cluster has it."""
    python: str = "python"
    """The Python that starts the driver on the cluster."""
    stop_grace_s: int = 60
    """How long `ray job stop` waits for the last checkpoint, in seconds."""
    wait_s: float = 300.0
    """How long to wait for a cluster that does not answer, in seconds."""
    no_follow: _Flag = False
    """Return once the cluster has the job; nobody sends it again then."""
    follow: str | None = None
    """Submit nothing; follow the job of this id, from the beginning of its log."""

    def __post_init__(self) -> None:
        require(self.retries >= 0, "submit.retries", "0 or more", self.retries)
        require(self.stop_grace_s >= 1, "submit.stop_grace_s", "1 or more", self.stop_grace_s)
        require_positive("submit.wait_s", self.wait_s)
        if self.retries and (self.no_follow or self.follow):
            raise ConfigError("submit.retries", "needs a job submitted here and followed")
        if self.follow and self.no_follow:
            raise ConfigError("submit.follow", "and submit.no_follow exclude each other; give one")
        if self.working_dir is not None and not Path(self.working_dir).is_dir():
            raise ConfigError("submit.working_dir", f"is no folder here: {self.working_dir}")


def submit(arguments: Sequence[str]) -> int:
    """Submit a training run as a Ray job, and follow it."""
    own, words = _split(arguments)
    options, unknown = tyro.cli(
        _SubmitOptions,
        args=own,
        prog="raydl submit",
        description=f"{submit.__doc__} The options of raydl train come after --.",
        return_unknown_args=True,
    )
    if unknown:
        raise ConfigError(
            "submit", f"has no option {unknown[0]}; options of raydl train come after a --"
        )
    # Ray's own commands do not do for themselves what prepare_client does for us.
    ray = "ray" if "RAY_AUTH_MODE" in os.environ else "RAY_AUTH_MODE=token ray"
    if options.follow:
        if words:
            raise ConfigError("submit.follow", "submits nothing; leave out the -- and what follows")
        plan = submission.Plan(options.follow, "the place that it names", "", True)
        submitter = submission.Submitter(_connect(options), plan)
        return _watch(options, submitter, options.follow, ray=ray)
    plan = _plan(options, words)
    submitter = submission.Submitter(_connect(options), plan, options.retries)
    return _watch(options, submitter, ray=ray)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first ``--`` and those after it."""
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _plan(options: _SubmitOptions, words: Sequence[str]) -> submission.Plan:
    """Return the job to submit; every mistake that can be seen from here is reported now."""
    name = options.run_name
    if name is not None:
        submission.check_name("submit.run_name", name)
    config = parse_train(words if name is None else ["--run-dir", name, *words])
    submission.check_credentials(words, config)
    if name is not None and config.run.run_dir != name:
        raise ConfigError("submit.run_name", "and run.run_dir exclude each other; give one")
    require(config.scaling.max_workers > 0, "scaling.num_workers", "1 or more in a job", 0)
    _check(config)
    if options.working_dir is None:
        submission.check_what_travels(config, here=Path.cwd())
    else:
        _check_size(options.working_dir)
    message_id = time.strftime("%Y%m%d-%H%M%S")
    return submission.plan_run(words, config, message_id=message_id, python=options.python)


def _check(config: TrainConfig) -> None:
    """Refuse now what the driver would refuse in a minute; it alone sees data and own code."""
    from raydl.core.methods import resolve  # imports torch
    from raydl.faults import FaultPlan
    from raydl.tasks import Classification

    if ":" not in config.model:
        Classification(config.model)
    if ":" not in config.method.name:
        resolve(config)
    faults = config.run.fault_plan
    if faults is not None and Path(faults).exists():
        FaultPlan.read(faults).check(
            max_workers=config.scaling.max_workers, num_shards=config.exchange.center_shards
        )


def _check_size(folder: str) -> None:
    """Refuse a working folder that Ray would not take.

    Raises:
        ConfigError: naming the largest entries of the folder.
    """
    sizes, limit = ray_session.folder_sizes(folder, list(submission.EXCLUDES))
    total = sum(sizes.values())
    if total < limit:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} ({sizes[name] / _MIB:,.0f} MiB)" for name in largest)
    raise ConfigError(
        "submit.working_dir",
        f"{folder} holds {total / _MIB:,.0f} MiB, Ray takes less than {limit / _MIB:,.0f} MiB; "
        f"name what should stay here in {folder}/.rayignore, or keep data where all nodes see "
        f"them; most of it: {named}",
    )


def _connect(options: _SubmitOptions) -> RayJobs:
    address = ray_session.prepare_client(options.address)
    from raydl.ray_backend.job_client import RayJobs  # imports Ray

    environment = submission.make_runtime_env(
        package=Path(raydl.__file__).parent,
        working_dir=options.working_dir,
        requirements=_requirements() if options.pip else (),
        stop_grace_s=options.stop_grace_s,
        submission=uuid.uuid4().hex,
    )
    return RayJobs(address, environment)


def _requirements() -> list[str]:
    try:
        return submission.without_ray(requirements())
    except metadata.PackageNotFoundError:
        raise RaydlError(
            "--pip reads what raydl needs from its installation, and it is not installed here; "
            "pip install -e . in its checkout"
        ) from None


def _watch(
    options: _SubmitOptions, submitter: submission.Submitter, job_id: str = "", *, ray: str = "ray"
) -> int:
    """Submit and follow, or follow only; Ctrl-C ends the following, not the job."""
    submitter.wait_s = options.wait_s
    submitter.say = lambda sentence: print(f"raydl submit: {sentence}", flush=True)
    submitter.write = _write
    try:
        if job_id:
            return submitter.follow_only(job_id)
        if options.no_follow:
            submitter.send()
            print(_hints(submitter.job_id, options, ray))
            return 0
        return submitter.run()
    except KeyboardInterrupt:
        left = submitter.job_id or submitter.sending
        if not left:
            raise
        if submitter.sending:
            sentence = f"interrupted, and the cluster may have {left} already; {ray} job list tells"
        else:
            nobody = "; nobody sends it again now if it is lost" if options.retries else ""
            sentence = f"follows no longer, the job goes on{nobody}"
        print(f"\nraydl submit: {sentence}\n{_hints(left, options, ray)}")
        return STOPPED["SIGINT"]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _hints(job_id: str, options: _SubmitOptions, ray: str) -> str:
    address = options.address and shlex.quote(redact(ray_session.dashboard_url(options.address)))
    where = f"--address {address} " if address else ""
    return (
        f"  watch:        raydl submit {where}--follow {shlex.quote(job_id)}\n"
        f"  stop:         {ray} job stop {where}{shlex.quote(job_id)}"
    )
