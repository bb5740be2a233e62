"""``raydl methods`` and ``raydl models``: lists of the known methods and models."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raydl.cli.options import print_table
from raydl.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from raydl.core.rules import Rule


def list_methods(arguments: Sequence[str]) -> int:
    """List the training methods, or show one: ``raydl methods NAME``."""
    names = [word for word in arguments if not word.startswith("-")]
    _refuse_arguments("raydl methods", arguments[1:] if names else arguments)
    from raydl.methods import METHODS

    if names:
        kind = _kind_of(names[0])
        print(_description(kind, name=names[0]))
        return 0
    rows = [
        (
            kind.name,
            kind.strategy,
            str(kind.period),
            kind.local_step.optimizer,
            f"{kind.local_step.lr:g}",
            f"{kind.local_step.momentum:g}",
            kind.sentence(),
        )
        for kind in METHODS.values()
    ]
    headings = ("method", "strategy", "period", "optimizer", "lr", "momentum", "description")
    print_table(headings, rows)
    print("\none with its equation: raydl methods NAME; your own: --method module:Class")
    return 0


def _kind_of(name: str) -> type[Rule]:
    from raydl.methods import METHODS
    from raydl.methods.custom_rule import kind_of

    if ":" in name:
        return kind_of(name)
    if name not in METHODS:
        raise UnknownNameError("raydl methods", name, METHODS)
    return METHODS[name]


def _description(kind: type[Rule], *, name: str) -> str:
    """Return name, equation, source and defaults of a method; of a user's, its own words alone."""
    from raydl.methods.options import OWN_SETTINGS, defaults_of

    is_own = ":" in name
    classes = (kind,) if is_own else kind.__mro__
    docs = filter(None, (cls.__doc__ and inspect.cleandoc(cls.__doc__) for cls in classes))
    source = vars(kind).get("source", kind.__module__) if is_own else kind.source
    sentence = kind.sentence() if kind.__doc__ else "no docstring"
    equation = next((doc for doc in docs if "<-" in doc), "").partition("\n\nArgs:")[0]
    step = kind.local_step
    defaults = [f"--method.period {kind.period}", f"--lr {step.lr:g}"]
    defaults += [f"--optimizer {step.optimizer}"] if step.optimizer != "sgd" else []
    defaults += [f"--momentum {step.momentum:g}"] if step.momentum else []
    defaults += ["--optimizer.nesterov"] if step.nesterov else []
    given = {n: "..." if v is ... else repr(v) for n, v in defaults_of(kind).items()}
    for argument, setting in OWN_SETTINGS.items():
        if value := given.pop(argument, ""):
            defaults += [f"--method.{setting.replace('_', '-')} {value}"]
    options = ",".join(f"{name}={value}" for name, value in given.items())
    defaults += [f"--method.options {options}"] if options else []
    defaults += [f"--compression {kind.compression}"] if kind.compression != "none" else []
    defaults += [f"--fragments {kind.fragments}"] if kind.fragments > 1 else []
    defaults += [f"--exchange-delay {kind.delay}"] if kind.delay else []
    first, _, rest = equation.partition("\n\n")
    is_said = first.replace("\n", " ").rstrip(".") == sentence
    return (
        f"{name} ({kind.strategy}): {sentence}\n\n"
        f"{rest if is_said else equation}\n\n"
        f"source: {source}\ndefaults: {' '.join(defaults)}"
    )


def list_models(arguments: Sequence[str]) -> int:
    """List the models."""
    _refuse_arguments("raydl models", arguments)
    from raydl.models import MODELS

    rows = [
        (name, row.input_size, f"{row.num_parameters:,}", row.sentence)
        for name, row in MODELS.items()
    ]
    print_table(("model", "made for", "parameters", "description"), rows, numbers=("parameters",))
    print(
        "\nparameters: with 1000 classes at 224x224, else with 10 classes; for texts with a"
        "\nvocabulary of 256 at 128 tokens and of 50257 at 1024; sources: docs/models.md"
        "\nother networks: --model torchvision:NAME or --model module:function"
    )
    return 0


def _refuse_arguments(command: str, arguments: Sequence[str]) -> None:
    rest = [word for word in arguments if word not in ("-h", "--help")]
    if rest:
        raise ConfigError(command, f"takes no options, got {' '.join(rest)}")
