"""Keys, for calls and values that nobody thought of.

Every property runs over an implementation that is passed in, and each has a broken one that it must catch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta, timezone
from enum import IntEnum, StrEnum
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from celery_once_fenced.keys import CallPlan, KeyRecipe, encode, render_resource

Encoder = Callable[[Any], object]
often = settings(max_examples=200, derandomize=True, database=None, deadline=None)


class Number(IntEnum):
    ONE = 1


class Word(StrEnum):
    A = "a"


any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates too
offsets = st.none() | st.integers(-86399, 86399).map(lambda seconds: timezone(timedelta(seconds=seconds)))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    any_text,
    st.sampled_from([Number.ONE, Word.A]),
    st.binary(),
    st.datetimes(timezones=offsets),
    st.dates(),
    st.times(timezones=offsets),
    st.decimals(),
    st.uuids(),
)
json_keys = st.one_of(any_text, st.integers(), st.floats(), st.booleans(), st.none(), st.just(Number.ONE))
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(json_keys, inner, max_size=4),
    ),
    max_leaves=12,
)
# Few values that are easily mistaken for each other, so that two of them often are the same.
lookalikes = st.recursive(
    st.sampled_from([1, "1", 1.0, True, None, "None", "", "a", "b", "a', 'b", b"a", 0.0, -0.0, False, 0])
    | st.just({"a": 1, "b": 2}),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


def reordered(value: Any) -> Any:
    return dict(reversed(value.items())) if isinstance(value, dict) else value


pairs = st.tuples(lookalikes, lookalikes) | lookalikes.map(lambda value: (value, reordered(value)))


def through_the_broker(value: Any) -> Any:
    return loads(dumps(value))  # type: ignore[no-untyped-call]


def same(one: Any, other: Any) -> bool:
    """Whether two decoded values agree in types and content, written without a look at the encoding."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float):
        return bool(one.hex() == other.hex())
    if hasattr(one, "isoformat") or hasattr(one, "as_tuple"):  # An offset counts, and the zeros of a Decimal.
        return str(one) == str(other)
    return bool(one == other)


def as_json(value: Any) -> bytes:
    return encode(value, json=True, path="x")


def as_pickled(value: Any) -> bytes:
    return encode(value, json=False, path="x")


def by_repr(value: Any) -> str:
    return repr(value)


def by_text(value: Any) -> str:
    return str(value)


def by_hash(value: Any) -> int:
    return hash(str(value))


# --- K2: values ---------------------------------------------------------------------------------------------


def a_worker_finds_the_bytes_of_the_producer(encoder: Encoder) -> None:
    @often
    @given(json_values)
    def check(value: Any) -> None:
        assert encoder(value) == encoder(through_the_broker(value))

    check()


def equal_bytes_mean_the_same_value(encoder: Encoder) -> None:
    @often
    @given(pairs)
    def check(pair: tuple[Any, Any]) -> None:
        one, other = pair
        assert (encoder(one) == encoder(other)) == same(one, other)

    check()


def test_a_worker_finds_the_bytes_of_the_producer() -> None:
    a_worker_finds_the_bytes_of_the_producer(as_json)


@pytest.mark.parametrize("encoder", [as_json, as_pickled])
def test_equal_bytes_mean_the_same_value(encoder: Encoder) -> None:
    equal_bytes_mean_the_same_value(encoder)


@often
@given(json_values, json_values)
def test_equal_bytes_mean_the_same_message(one: Any, other: Any) -> None:
    decoded = through_the_broker(one), through_the_broker(other)
    assert (as_json(one) == as_json(other)) == same(*decoded)


@pytest.mark.parametrize("broken", [by_repr, by_text, as_pickled])
def test_an_encoding_of_the_callers_objects_is_caught(broken: Encoder) -> None:
    with pytest.raises(AssertionError):
        a_worker_finds_the_bytes_of_the_producer(broken)


@pytest.mark.parametrize("broken", [by_text, by_hash, by_repr])
def test_an_encoding_without_types_or_with_an_order_of_dicts_is_caught(broken: Encoder) -> None:
    with pytest.raises(AssertionError):
        equal_bytes_mean_the_same_value(broken)


# --- K1: spellings of a call --------------------------------------------------------------------------------


def task(a: Any, b: Any = 2, c: Any = "three", *, d: Any = None) -> None: ...


DEFAULTS = {"b": 2, "c": "three", "d": None}
calls = st.fixed_dictionaries(
    {"a": scalars}, optional={"b": scalars | st.just(2), "c": scalars, "d": scalars | st.none()}
)


@st.composite
def spellings(draw: st.DrawFn, call: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call written one way of many: defaults spelled out or not, positional or keyword, in any order."""
    spelled = call | {n: default for n, default in DEFAULTS.items() if n not in call and draw(st.booleans())}
    leading = next((i for i, name in enumerate("abc") if name not in spelled), 3)
    positional = "abc"[: draw(st.integers(0, leading))]
    keywords = draw(st.permutations([name for name in spelled if name not in positional]))
    return tuple(spelled[name] for name in positional), {name: spelled[name] for name in keywords}


def every_spelling_is_one_key(derive: Callable[[Any, Any], object]) -> None:
    @often
    @given(st.data(), calls)
    def check(data: st.DataObject, call: dict[str, Any]) -> None:
        one, other = data.draw(spellings(call)), data.draw(spellings(call))
        assert derive(*one) == derive(*other)

    check()


@pytest.mark.parametrize(
    "key", [None, ("a", "d"), "{a}-{c}", lambda arguments: str(sorted(arguments.items()))]
)
def test_every_spelling_is_one_key(key: Any) -> None:
    every_spelling_is_one_key(KeyRecipe(CallPlan.of(task, "t"), key=key).derive)


def test_a_key_over_args_and_kwargs_is_caught() -> None:
    with pytest.raises(AssertionError):
        every_spelling_is_one_key(lambda args, kwargs: (as_json(args), as_json(kwargs)))


@often
@given(st.data(), calls)
def test_a_plan_binds_as_python_does(data: st.DataObject, call: dict[str, Any]) -> None:
    args, kwargs = data.draw(spellings(call))
    called: dict[str, Any] = {}

    def body(a: Any, b: Any = 2, c: Any = "three", *, d: Any = None) -> None:
        called.update(a=a, b=b, c=c, d=d)

    body(*args, **kwargs)
    assert same(CallPlan.of(task, "t").bind(args, kwargs), called)


# --- K3: templates, texts and resources ---------------------------------------------------------------------


def two(a: Any, b: Any) -> None: ...


pieces = st.text(":x%", max_size=3)


def only_equal_arguments_are_one(identify: Callable[[str, str], object]) -> None:
    @often
    @given(pieces, pieces, pieces, pieces)
    def check(a: str, b: str, c: str, d: str) -> None:
        assert (identify(a, b) == identify(c, d)) == ((a, b) == (c, d))

    check()


def test_a_template_takes_the_values_and_not_the_text_they_make() -> None:
    recipe = KeyRecipe(CallPlan.of(two, "t"), key="{a}:{b}")
    only_equal_arguments_are_one(lambda a, b: recipe.derive_call((a, b), {}).key.digest)  # type: ignore[union-attr]


def test_a_key_over_rendered_text_is_caught() -> None:
    with pytest.raises(AssertionError):
        only_equal_arguments_are_one(lambda a, b: hashlib.sha256(f"{a}:{b}".encode()).hexdigest())


def test_the_parts_of_a_resource_do_not_run_into_each_other() -> None:
    only_equal_arguments_are_one(lambda a, b: render_resource("{a}:{b}", {"a": a, "b": b}))


def test_a_resource_without_escapes_is_caught() -> None:
    with pytest.raises(AssertionError):
        only_equal_arguments_are_one(lambda a, b: f"{a}:{b}")


@often
@given(
    json_values,
    json_values,
    st.sampled_from([None, "{a}|{b}", ("b",), lambda arguments: "\0|" + str(arguments)]),
)
def test_the_readable_text_can_be_shown_split_and_stored(a: Any, b: Any, key: Any) -> None:
    found = KeyRecipe(CallPlan.of(two, "shop.tasks.two"), key=key).derive((a, b), {})
    assert found is not None
    assert found.text.startswith("shop.tasks.two:")
    assert len(found.text) <= 255
    assert found.text.isprintable()
    assert "|" not in found.text
    found.text.encode("utf-8")


@often
@given(json_values, json_values)
def test_a_fingerprint_matches_exactly_where_the_arguments_do(one: Any, other: Any) -> None:
    recipe = KeyRecipe(CallPlan.of(two, "t"), key=())
    decoded = through_the_broker(one)
    assume(not same(decoded, through_the_broker(other)))
    assert recipe.fingerprint((one, 1), {}) == recipe.fingerprint((decoded,), {"b": 1})
    assert recipe.fingerprint((one, 1), {}) != recipe.fingerprint((other, 1), {})
    assert recipe.derive((one, 1), {}) == recipe.derive((other, 1), {})
