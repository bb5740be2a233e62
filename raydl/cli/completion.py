"""``raydl completion``: completes commands, options and names in a shell."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from raydl.cli.options import flags_of_train, parse
from raydl.errors import UnknownNameError

_SHELLS = ("bash", "zsh")
_SCRIPT = """_raydl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    elif [ "$before" = --method ] || [ "$before" = --methods ]; then
        COMPREPLY=($(compgen -W "{methods}" -- "$word"))
    elif [ "$before" = --model ]; then
        COMPREPLY=($(compgen -W "{models}" -- "$word"))
    elif [ "${{word:0:1}}" = - ]; then
        case "${{COMP_WORDS[1]}}" in
            {with_options}) COMPREPLY=($(compgen -W "{options}" -- "$word")) ;;
        esac
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -F _raydl raydl"""
_WITH_OPTIONS = "train|submit|compare|weak-scaling"


@dataclasses.dataclass(frozen=True)
class _Options:
    shell: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="{bash,zsh}")]
    """The shell."""


def completion(arguments: Sequence[str]) -> int:
    """Print a script for your shell: eval "$(raydl completion bash)" in ~/.bashrc."""
    options = parse(_Options, arguments, prog="raydl completion", description=completion.__doc__)
    if options.shell not in _SHELLS:
        raise UnknownNameError("completion.shell", options.shell, _SHELLS)
    from raydl import models
    from raydl.cli.commands import COMMANDS
    from raydl.methods import METHODS

    if options.shell == "zsh":
        print("autoload -Uz bashcompinit && bashcompinit")
    print(
        _SCRIPT.format(
            commands=" ".join(COMMANDS),
            methods=" ".join(METHODS),
            models=" ".join(models.MODELS),
            with_options=_WITH_OPTIONS,
            options=" ".join(["--config", *(f"--{flag}" for flag in flags_of_train())]),
        )
    )
    return 0
