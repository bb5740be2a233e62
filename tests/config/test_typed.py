"""What a file holds is compared with the annotations of the class that describes it."""

from dataclasses import dataclass
from typing import Any, TypedDict

import pytest

from raydl.config.typed import Count, Seconds, typed


@dataclass(frozen=True)
class Part:
    name: str
    at_s: Seconds = 0.0


class Whole(TypedDict, total=False):
    round: Count
    parts: tuple[Part, ...]
    limits: tuple[int, int] | int
    scores: dict[str, float | None]
    options: Any


def test_values_are_built_as_the_class_says_and_unknown_keys_are_of_newer_versions():
    whole = {"round": 3, "parts": [{"name": "a", "newer": 1}], "limits": [1, 2], "more": [None]}
    assert typed(Whole, whole) == {
        "round": 3, "parts": (Part("a"),), "limits": (1, 2), "more": [None],
    }  # fmt: skip
    assert typed(Whole, {"limits": 5, "scores": {"loss": 1, "top5": None}})["scores"]["loss"] == 1


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([], "it must be an object, got a list"),
        ({"round": True}, "round must be a whole number, got True"),
        ({"round": -1}, "round must be from 0 to 9223372036854775807, got -1"),
        ({"round": 10**400}, "round must be from 0 to .*, got one of 1329 bits"),
        ({"round": 1.0}, r"round must be a whole number, got 1\.0"),
        ({"parts": [{}]}, r"parts\[0\]\.name is missing"),
        ({"parts": [{"name": None}]}, r"parts\[0\]\.name must be a text, got None"),
        ({"parts": [{"name": "a", "at_s": float("nan")}]}, r"at_s must be from 0 to .*, got nan"),
        ({"parts": [{"name": "a", "at_s": 1e308}]}, r"parts\[0\]\.at_s must be from 0 to"),
        ({"limits": [1]}, "limits must be a list or a whole number, got a list"),
        ({"scores": {"loss": "x" * 99}}, "scores.loss must be a number, got 'x+…"),
        ({"scores": {"k" * 10**6: "x"}}, "scores.k+ must be a number, got 'x'"),
        ({"scores": [1]}, "scores must be an object, got a list"),
    ],
)
def test_the_first_wrong_value_is_named_in_one_sentence(values, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        typed(Whole, values)
    assert len(str(caught.value)) < 200
