"""A user's codec, module:Class, is tried before a run, and then carries its messages."""

import pytest
from ensembles import Ensemble, tiny_images
from own_codecs import Halves
from scenarios import scenario_config

from raydl.config import ExchangeConfig
from raydl.core.codecs import parse_codec
from raydl.core.reports import Outcome
from raydl.errors import ConfigError
from raydl.methods import resolve


def config_with(codec, method="diloco"):
    return scenario_config(method, exchange=ExchangeConfig(compression=codec, timeout_s=20.0))


@pytest.mark.parametrize("method", ["sync-easgd", "sync-sgd", "diloco", "async-easgd", "async-sgd"])
def test_a_codec_of_the_user_carries_the_messages(method, monkeypatch):
    lengths = []
    decode = Halves.decode

    def noted(self, message, *, out):
        lengths.append((len(message), len(out)))
        return decode(self, message, out=out)

    monkeypatch.setattr(Halves, "decode", noted)
    config = config_with("own_codecs:Halves", method)
    ensemble = Ensemble(config, num_workers=2, images=tiny_images(31)).join()
    assert ensemble.run() == [Outcome.FINISHED] * 2
    assert lengths
    assert all(num_bytes == 2 * num_values for num_bytes, num_values in lengths)


def test_its_name_is_the_setting():
    assert parse_codec("own_codecs:Halves").name == "own_codecs:Halves"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("WithArguments", "must be a class that needs no arguments: missing .* 'bits'"),
        ("WithoutDecode", r"has no decode\(\) \(docs/algorithms.md\)"),
        ("WrongSize", r"tried on 1 values: encode\(\) must return uint8, shape \[3\] as num_bytes"),
        ("Changing", r"encode\(\) must give equal bytes|encode\(\) must not change the values"),
        ("Counting", r"encode\(\) must give equal bytes for equal values"),
        ("Remembering", r"decode\(\) must overwrite all of out, and depend on the message alone"),
        ("Growing", "leaves out more than there is"),
        ("Missing", "own_codecs:Missing cannot be imported"),
    ],
)
def test_a_mistake_in_a_codec_is_one_sentence_before_the_run(name, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        resolve(config_with(f"own_codecs:{name}"))
    assert str(caught.value).startswith(f"exchange.compression own_codecs:{name}")
    assert "\n" not in str(caught.value)
