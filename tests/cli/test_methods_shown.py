"""``raydl methods NAME`` shows a method: its equation, its source and its defaults."""

import pytest

from raydl import cli
from raydl.methods import METHODS


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_shown_with_its_equation_source_and_defaults(name, capsys):
    assert cli.main(["methods", name]) == 0
    first, *_, source, defaults = capsys.readouterr().out.strip().splitlines()
    assert first.startswith(f"{name} ({METHODS[name].strategy}): ")
    assert len(source) > len("source: ")
    assert defaults.startswith(f"defaults: --method.period {METHODS[name].period} --lr ")


def test_the_defaults_of_a_method_are_shown_as_options(capsys):
    assert cli.main(["methods", "diloco"]) == 0
    shown = capsys.readouterr().out
    assert "m <- mu*m + mean(D) ; c <- c - lr*(mean(D) + mu*m)" in shown
    assert "--method.outer-lr 0.7 --method.outer-momentum 0.7" in shown
    assert cli.main(["methods", "eamsgd"]) == 0
    assert "--momentum 0.99 --optimizer.nesterov" in capsys.readouterr().out
    assert cli.main(["methods", "sparse-loco"]) == 0
    shown = capsys.readouterr().out
    assert "--method.options decay=0.95,merge='mean' --compression chunk-topk:64" in shown
    assert shown.count("Local steps, then the mean of the largest values") == 1
    assert cli.main(["methods", "streaming-diloco"]) == 0
    assert "--compression e3m0 --fragments 4 --exchange-delay 5" in capsys.readouterr().out


def test_a_misspelt_method_is_told_with_the_nearest(capsys):
    assert cli.main(["methods", "dilico"]) == 2
    assert "has no 'dilico'; did you mean diloco or" in capsys.readouterr().err
