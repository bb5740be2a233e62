"""``raydl submit``: submits a training run as a Ray job."""

from __future__ import annotations

import os
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from raydl.cli.options import Flag, parse, parse_train, train_words
from raydl.config.checks import require, require_name, require_positive
from raydl.errors import STOPPED, ConfigError, RaydlError
from raydl.launch import submission
from raydl.ray_backend import session as ray_session
from raydl.run.versions import requirements
from raydl.text.redaction import redact

if TYPE_CHECKING:
    from raydl.config import TrainConfig
    from raydl.ray_backend.job_client import RayJobs

_MIB = 2**20


@dataclass(frozen=True)
class _SubmitOptions:
    """Options of ``raydl submit``; the options of the training come after ``--``."""

    address: str | None = None
    """Dashboard of the cluster, http://HEAD:8265; unset: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or
    the cluster of this machine."""
    run_name: str | None = None
    """Name of the run, to find it again, like --name of the training; unset: METHOD-MODEL-DATE."""
    retries: int = 0
    """Number of times to resubmit the run if its driver is lost; each resubmission resumes it."""
    working_dir: str | None = None
    """Folder to upload with the job: your own code, fault plans, small data."""
    pip: Flag = False
    """Let Ray install missing requirements of raydl on the cluster; else the cluster must have
    them."""
    runtime_env: str | None = None
    """YAML or JSON file with more of the job's runtime environment, as for ray job submit: pip,
    env_vars. Everybody who can see the cluster's jobs can read it."""
    python: str = "python"
    """Python that starts the driver on the cluster."""
    stop_grace_s: int = 60
    """How long `ray job stop` waits for the last checkpoint, in seconds."""
    wait_s: float = 300.0
    """Longest wait for a cluster that does not answer, in seconds."""
    no_follow: Flag = False
    """Return once the cluster has the job; a lost driver is then not resubmitted."""
    follow: str | None = None
    """Submit nothing; follow the job with this id, from the beginning of its log."""

    def __post_init__(self) -> None:
        require(self.retries >= 0, "submit.retries", "0 or more", self.retries)
        require(self.stop_grace_s >= 1, "submit.stop_grace_s", "1 or more", self.stop_grace_s)
        require_positive("submit.wait_s", self.wait_s)
        if self.retries and (self.no_follow or self.follow):
            raise ConfigError(
                "submit.retries",
                f"needs a job that is submitted here and followed, got {self.retries}; drop "
                f"submit.no_follow or submit.follow",
            )
        if self.follow and self.no_follow:
            raise ConfigError("submit.follow", "and submit.no_follow exclude each other; give one")
        if self.working_dir is not None and not Path(self.working_dir).is_dir():
            raise ConfigError(
                "submit.working_dir", f"must be a folder of this machine, got {self.working_dir}"
            )


def submit(arguments: Sequence[str]) -> int:
    """Submit a training run as a Ray job, and follow it."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    given = words[end + 1 :]
    options = parse(
        _SubmitOptions,
        words[:end],
        prog="raydl submit",
        description=f"{submit.__doc__} The options of raydl train come after --.",
        hint="the options of raydl train come after --",
    )
    # The ray command does not enable token authentication by itself; prepare_client does.
    ray = "ray" if "RAY_AUTH_MODE" in os.environ else "RAY_AUTH_MODE=token ray"
    if options.follow:
        if given:
            raise ConfigError(
                "submit.follow", "submits nothing; leave out -- and the options after it"
            )
        plan = submission.Plan(options.follow, "the folder in its log", "", True)
        submitter = submission.Submitter(_connect(options), plan)
        return _watch(options, submitter, options.follow, ray=ray)
    plan = _plan(options, given)
    submitter = submission.Submitter(_connect(options), plan, options.retries)
    return _watch(options, submitter, ray=ray)


def _plan(options: _SubmitOptions, words: Sequence[str]) -> submission.Plan:
    """Return the job to submit, after all checks that this machine can do."""
    words = train_words(words)  # the job has no files of this machine
    name = options.run_name
    if name is not None:
        require_name("submit.run_name", name)
    config = parse_train(words if name is None else ["--name", name, *words])
    submission.check_credentials(words, config)
    if name is not None and config.run.name != name:
        raise ConfigError("submit.run_name", "and run.name exclude each other; give one")
    require(config.scaling.max_workers > 0, "scaling.num_workers", "1 or more in a job", 0)
    if options.working_dir is None:
        submission.check_what_travels(config, here=Path.cwd())
    else:
        uploaded = ray_session.uploaded_files(options.working_dir, list(submission.EXCLUDES))
        if uploaded is not None:
            _check_size(options.working_dir, uploaded)
            here = Path(options.working_dir).absolute()
            submission.check_what_travels(config, here=here, uploaded=uploaded)
    _check(config, options.working_dir or ".")
    # Two submissions of a sweep may begin in the same second.
    message_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    return submission.plan_run(words, config, message_id=message_id, python=options.python)


def _check(config: TrainConfig, working_dir: str) -> None:
    """Check settings before the driver would; only the driver can check data and custom code."""
    from raydl.faults import FaultPlan
    from raydl.methods import resolve  # imports torch
    from raydl.tasks import Classification

    if ":" not in config.model and config.model != "auto":  # else it is of the cluster, or the data
        Classification(config.model)
    names = config.method.name, config.optimizer.name, config.optimizer.lr_schedule
    if not any(":" in name for name in names if name):
        resolve(config)
    faults = config.run.fault_plan and Path(working_dir, config.run.fault_plan)
    if faults and faults.exists():
        FaultPlan.read(str(faults)).check(
            max_workers=config.scaling.max_workers, num_shards=config.exchange.center_shards
        )


def _check_size(folder: str, uploaded: Mapping[Path, int]) -> None:
    """Refuse a working folder that is too large for Ray.

    Args:
        folder: the folder.
        uploaded: its files that would be uploaded, with their bytes.

    Raises:
        ConfigError: with the largest entries of the folder.
    """
    sizes, limit = ray_session.folder_sizes(uploaded)
    total = sum(sizes.values())
    if total < limit:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    entries = ", ".join(f"{name} ({sizes[name] / _MIB:,.0f} MiB)" for name in largest)
    raise ConfigError(
        "submit.working_dir",
        f": {folder} holds {total / _MIB:,.0f} MiB, but Ray accepts less than {limit / _MIB:,.0f} "
        f"MiB; exclude entries in {folder}/.rayignore, or keep data on storage that all nodes can "
        f"read; largest entries: {entries}",
    )


def _connect(options: _SubmitOptions) -> RayJobs:
    path = options.runtime_env
    users = None if path is None else submission.read_runtime_env(path)
    address = ray_session.prepare_client(options.address)
    from raydl.ray_backend.job_client import RayJobs  # imports Ray

    try:
        packages = submission.without_ray(requirements()) if options.pip else []
    except metadata.PackageNotFoundError:
        raise RaydlError(
            "--pip reads the requirements of raydl from its installation, and raydl is not "
            "installed here; run pip install -e . in its checkout"
        ) from None
    environment = submission.make_runtime_env(
        package=Path(__file__).parents[1],
        working_dir=options.working_dir,
        requirements=packages,
        stop_grace_s=options.stop_grace_s,
        submission=uuid.uuid4().hex,
        users=users,
    )
    return RayJobs(address, environment)


def _watch(
    options: _SubmitOptions, submitter: submission.Submitter, job_id: str = "", *, ray: str = "ray"
) -> int:
    """Submit and follow a job, or follow it only; Ctrl-C stops following, not the job."""
    submitter.wait_s = options.wait_s
    submitter.say = lambda sentence: print(f"raydl submit: {sentence}", flush=True)
    submitter.write = partial(print, end="", flush=True)
    try:
        if job_id:
            return submitter.follow_only(job_id)
        if options.no_follow:
            submitter.send()
            print(_hints(submitter.job_id, options, ray))
            return 0
        return submitter.run()
    except KeyboardInterrupt:
        job_id = submitter.job_id or submitter.sending
        if not job_id:
            raise
        if submitter.sending:
            sentence = f"interrupted; the cluster may have {job_id} already: see {ray} job list"
        else:
            no_retry = ", but a lost driver is no longer resubmitted" if options.retries else ""
            sentence = f"stopped following; the job continues{no_retry}"
        print(f"\nraydl submit: {sentence}\n{_hints(job_id, options, ray)}")
        return STOPPED["SIGINT"]


def _hints(job_id: str, options: _SubmitOptions, ray: str) -> str:
    address = options.address and shlex.quote(redact(ray_session.dashboard_url(options.address)))
    option = f"--address {address} " if address else ""
    return (
        f"  watch:        raydl submit {option}--follow {shlex.quote(job_id)}\n"
        f"  stop:         {ray} job stop {option}{shlex.quote(job_id)}"
    )
