"""``--config FILE``: the options of ``raydl train`` from a file; the command line wins.

The file is YAML, with settings by their names (``optimizer: {lr: 0.1}``, ``optimizer.lr: 0.1``) or
by their options (``lr: 0.1``), or the ``config.json`` of an earlier run, without its folder.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from raydl.config import TrainConfig, from_dict, to_dict
from raydl.errors import ConfigError

_OPTION = "--config"
_OF_ONE_RUN = ("run.name", "run.run-dir", "run.resume")
"""Settings of a ``config.json`` that belong to that run alone."""
_LENGTHS = tuple(f"training.{n}" for n in ("epochs", "steps", "samples", "seconds", "bytes"))
"""Settings of which one excludes the others."""
_SWITCH = {"true": "", "yes": "", "on": "", "false": "no-", "no": "no-", "off": "no-"}
_NOTHING = ("null", "~")


class Option(NamedTuple):
    """An option of a command."""

    flag: str
    """Without the --."""
    is_switch: bool
    """Whether it takes no value, and has a ``no-`` form."""
    is_repeated: bool = False
    """Whether it is given once for each parameter group."""


def with_files(arguments: Sequence[str], options: Mapping[str, Option]) -> list[str]:
    """Return arguments of ``raydl train`` with the options of each ``--config FILE`` first.

    Args:
        arguments: the arguments.
        options: option of each setting by its dotted name, with dashes.

    Raises:
        ConfigError: if a file cannot be read, or a setting in it does not exist.
    """
    paths: list[str] = []
    given: list[str] = []
    words = iter(arguments)
    for word in words:
        name, mark, path = word.partition("=")
        if name != _OPTION:
            given.append(word)
            continue
        path = path if mark else next(words, "")
        if not path:
            raise ConfigError(_OPTION, "needs the name of a file")
        paths.append(path)
    for path in reversed(paths):  # a later file wins over an earlier one
        given = _words_in(path, options, _replaced_by(given, options)) + given
    return given


def _replaced_by(words: Sequence[str], options: Mapping[str, Option]) -> tuple[str, ...]:
    """Return the settings that words replace in a file: lengths, and those given several times."""
    given = {
        word.partition("=")[0][2:].replace("_", "-")
        for word, value in zip(words, [*words[1:], ""], strict=False)
        if word.startswith("--") and (word.partition("=")[2] or value) != "None"
    }
    # A length replaces all lengths of the file, which it would contradict.
    lengths = _LENGTHS if any(options[name].flag in given for name in _LENGTHS) else ()
    repeated = (n for n, option in options.items() if option.is_repeated and option.flag in given)
    return (*lengths, *repeated)


def _words_in(path: str, options: Mapping[str, Option], skipped: tuple[str, ...]) -> list[str]:
    """Return the words of a file, without those of some settings."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        # All values stay texts: YAML would read 2:8 as a number in base 60.
        values = yaml.load(text, yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(_OPTION, f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(_OPTION, f"{path} is no YAML: {problem}") from error
    if values in (None, ""):
        return []
    if not isinstance(values, Mapping):
        raise ConfigError(_OPTION, f"{path} must have settings by name, as in epochs: 5")
    is_of_a_run = isinstance(values.get("config"), Mapping) and "versions" in values
    names = {option.flag: name for name, option in options.items()} | {n: n for n in options}
    settings = _settings(_present_names(text) if is_of_a_run else values, names, path)
    skipped += _OF_ONE_RUN if is_of_a_run else ()
    return [
        word
        for name, value in settings
        if name not in skipped
        for word in _words(options[name], value)
    ]


def _present_names(text: str) -> Any:
    """Return the settings of a ``config.json`` by the names of this version, with texts as values.

    Args:
        text: the contents of the file.

    Raises:
        ConfigError: if a setting is not of this version.
    """
    config = from_dict(TrainConfig, json.loads(text)["config"])
    return yaml.load(json.dumps(to_dict(config)), yaml.BaseLoader)


def _settings(
    values: Mapping[str, Any], names: Mapping[str, str], path: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name of each setting, with dashes, and its value.

    Args:
        values: values by name, nested or not.
        names: dotted name of each setting, by that name and by its option.
        path: the file, for messages.
        prefix: what precedes the names in ``values``.

    Raises:
        ConfigError: if there is no such setting.
    """
    for given, value in values.items():
        name = f"{prefix}{given}".replace("_", "-")
        # The name of a group, as optimizer, may be an option, too.
        if isinstance(value, Mapping) and names.get(name) != name:
            yield from _settings(value, names, path, f"{name}.")
        elif name in names:
            yield names[name], value
        else:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0].replace('-', '_')}?" if near else ""
            raise ConfigError(_OPTION, f"{path} has {prefix}{given}, which is no setting{hint}")


def _words(option: Option, value: Any) -> list[str]:
    """Return the words of an option; a text for each value, as the file has it."""
    flag = option.flag
    if option.is_repeated:
        groups = value if isinstance(value, list) else [value] if value else []
        return [word for group in groups for word in (f"--{flag}", _group_text(group))]
    if isinstance(value, Mapping):
        return [f"--{flag}", *(word for pair in value.items() for word in pair)] if value else []
    if isinstance(value, list):
        return [f"--{flag}", (":" if flag == "workers" else ",").join(value)]
    if option.is_switch and value.lower() in _SWITCH:
        group, dot, name = flag.rpartition(".")
        return [f"--{group}{dot}{_SWITCH[value.lower()]}{name}"]
    return [f"--{flag}", "None" if value in _NOTHING else value]


def _group_text(group: Any) -> str:
    """Return a parameter group of a file, a text or a mapping, as the command line has it."""
    if isinstance(group, str):
        return group
    if not isinstance(group, Mapping):
        raise ConfigError(
            _OPTION, f"has a parameter group that is no mapping with a pattern: {group}"
        )
    texts = [
        f"{name}={'[' + ','.join(value) + ']' if isinstance(value, list) else value}"
        for name, value in group.items()
        if name not in ("pattern", "options") and value not in _NOTHING
    ]
    return f"{group.get('pattern', '')}:{','.join([*texts, *filter(None, [group.get('options')])])}"
