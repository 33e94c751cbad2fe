"""What makes two calls the same, and what a person reads of it (rules K1 to K5)."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from kombu.utils.json import dumps, loads

from celery_once_fenced import keys
from celery_once_fenced.encoding import UnencodableError
from celery_once_fenced.errors import ConfigError, KeyDerivationError
from celery_once_fenced.keys import CallPlan, Key, KeyRecipe, default_resource, encode, render_resource


def charge(order_id: Any, amount: Any = 10, *, note: Any = "") -> None: ...


def collect(first: Any, /, *rest: Any, flag: Any = False, **more: Any) -> None: ...


def recipe(function: Any = charge, **options: Any) -> KeyRecipe:
    return KeyRecipe(CallPlan.of(function, "shop.charge"), **options)


def key(made: KeyRecipe, *args: Any, **kwargs: Any) -> Key:
    found = made.derive(args, kwargs)
    assert found is not None
    return found


def sent(value: Any) -> Any:
    return loads(dumps(value))  # type: ignore[no-untyped-call]


def message(value: Any, *, json: bool = True) -> bytes:
    return encode(value, json=json, path="x")


# --- K1: calls ----------------------------------------------------------------------------------------------


def test_positional_keyword_and_spelled_out_defaults_are_one_call() -> None:
    made = recipe()
    assert (
        key(made, 1) == key(made, order_id=1) == key(made, 1, 10) == key(made, note="", amount=10, order_id=1)
    )


def test_another_value_is_another_call() -> None:
    made = recipe()
    assert key(made, 1) != key(made, 2)
    assert key(made, 1).digest != key(made, 1, note=None).digest


def test_self_of_a_bound_method_is_no_argument() -> None:
    class Task:
        def run(self, order_id: int) -> None: ...

    assert CallPlan.of(Task().run, "t").names == ("order_id",)


def test_variable_arguments_are_one_tuple_and_one_dict() -> None:
    bound = CallPlan.of(collect, "t").bind((1, 2, 3), {"flag": True, "x": 4})
    assert bound == {"first": 1, "rest": (2, 3), "flag": True, "more": {"x": 4}}


def test_the_order_of_free_keywords_does_not_matter() -> None:
    made = recipe(collect)
    assert key(made, 1, x=1, y=2) == key(made, 1, y=2, x=1)


def test_celery_may_pass_none_for_no_arguments() -> None:
    assert CallPlan.of(lambda: None, "t").bind(None, None) == {}


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((), {}, "order_id"),
        ((1,), {"order_id": 1}, "order_id"),
        ((1,), {"amuont": 1}, "amuont"),
        ((), {"amount": 1, "notes": 1}, "order_id"),
        ((1, 2, 3), {}, "too many positional"),
    ],
)
def test_a_wrong_call_is_a_type_error_naming_the_argument(args: Any, kwargs: Any, named: str) -> None:
    with pytest.raises(KeyDerivationError, match=named) as caught:
        recipe().derive(args, kwargs)
    assert isinstance(caught.value, TypeError)
    assert "shop.charge" in str(caught.value)


# --- K2: values ---------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"


@dataclass
class Created:
    user: int


@dataclass
class Deleted:
    user: int


class Model:
    """Has what a pydantic model has, and no ``__json__``."""

    def model_dump(self, mode: str = "python") -> dict[str, Any]:
        return {"at": "2026-01-02" if mode == "json" else date(2026, 1, 2)}


class Order:
    """Stands for a model instance: it has a value for its program, and none for a message."""


def test_types_count() -> None:
    values = [1, "1", 1.0, True, None, b"1", Decimal(1), [1], {"1": 1}, UUID(int=1), date(2026, 1, 1)]
    assert len({message(value) for value in values}) == len(values)


def test_negative_zero_and_the_zeros_of_a_decimal_count() -> None:
    assert message(0.0) != message(-0.0)
    assert message(Decimal("1.0")) != message(Decimal("1.00"))


def test_not_a_number_is_the_same_as_itself() -> None:
    assert message(float("nan")) == message(float("nan"))


def test_a_tuple_a_namedtuple_and_a_list_are_one() -> None:
    pair = namedtuple("pair", "a b")
    assert message((1, 2)) == message([1, 2]) == message(pair(1, 2))


def test_the_order_of_a_dict_does_not_matter() -> None:
    assert message({"a": 1, "b": 2}) == message({"b": 2, "a": 1})


def test_json_turns_dict_keys_into_text_and_others_keep_them() -> None:
    by_json = {1: "x", None: "y", False: "z", 1.5: 0, float("inf"): 1, float("nan"): 2}
    assert message(by_json) == message(sent(by_json))
    assert message({1: "x", None: "y"}) == message({"1": "x", "null": "y"})
    assert message({1: "x"}, json=False) != message({"1": "x"}, json=False)


def test_of_two_dict_keys_that_json_makes_one_the_later_wins() -> None:
    assert message({1: "a", "1": "b"}) == message(sent({1: "a", "1": "b"})) == message({"1": "b"})


def test_a_set_has_no_order() -> None:
    assert message({"a", "b"}, json=False) == message(frozenset(["b", "a"]), json=False)
    assert (
        message({"a", "b"}, json=False) != message({"a", "c"}, json=False) != message(["a", "c"], json=False)
    )


def test_an_enum_counts_as_its_value() -> None:
    assert message(Colour.RED) == message("red")


def test_one_instant_with_two_offsets_is_two_values_as_in_the_message() -> None:
    moment = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert message(moment) == message(sent(moment))
    assert message(moment) != message(moment.replace(tzinfo=None))


def test_a_timedelta_counts_to_the_microsecond() -> None:
    assert (
        message(timedelta(days=1))
        == message(timedelta(hours=24))
        != message(timedelta(hours=24, microseconds=1))
    )


def test_an_int_of_any_size_has_an_encoding() -> None:
    assert message(10**5000) != message(10**5000 + 1)


def test_half_characters_that_json_joins_are_joined() -> None:
    assert message("\ud83d\ude00") == message("\U0001f600")
    assert message("\ud83d\ude00", json=False) != message("\U0001f600", json=False)


def test_a_pydantic_model_is_what_celery_sends_of_it() -> None:
    assert message(Model()) == message({"at": "2026-01-02"})


def test_a_serializer_that_keeps_objects_keeps_their_class() -> None:
    assert message(Created(7), json=False) == message(Created(7), json=False)
    assert message(Created(7), json=False) != message(Deleted(7), json=False)
    assert message(Model(), json=False) != message({"at": date(2026, 1, 2)}, json=False)
    assert message(Created(7)) == message({"user": 7})


def test_an_object_that_tells_json_what_it_is_is_that() -> None:
    class Money:
        def __json__(self) -> dict[str, int]:
            return {"cents": 5}

    assert message(Money()) == message(sent(Money()))


def test_a_lazy_translation_is_its_text() -> None:
    from django.utils.functional import lazystr

    assert message(lazystr("now")) == message("now")


@pytest.mark.parametrize(
    ("value", "place", "reason"),
    [
        (Order(), "argument order_id", "primary key"),
        ([1, {"a": Order()}], r"argument order_id\[1\]\['a'\]", "Order"),
        ({"a"}, "argument order_id", "sorted list"),
        ([{1, 2}], r"argument order_id\[0\]", "set"),
        ({UUID(int=1): 1}, "argument order_id", "dict key of type UUID"),
        ({"__type__": "uuid", "__value__": 1}, "argument order_id", "marker"),
        (Order, "argument order_id", "type"),
        (Created, "argument order_id", "type"),
        (lambda: None, "argument order_id", "function"),
    ],
)
def test_what_no_message_can_hold_is_an_error_naming_place_and_remedy(
    value: Any, place: str, reason: str
) -> None:
    with pytest.raises(KeyDerivationError, match=f"{place}.*{reason}"):
        key(recipe(), value)


def test_a_value_that_contains_itself_is_an_error() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(UnencodableError, match=r"^argument x\[0\].{1,120} contains itself"):
        message(loop)


def test_a_default_that_no_message_can_hold_does_not_stand_in_the_way() -> None:
    nothing = object()

    def refresh(feed: int, cache: Any = nothing, tags: Any = frozenset()) -> None: ...

    made = recipe(refresh)
    assert key(made, 1) == key(made, feed=1)
    assert key(made, 1) != key(made, 1, None)
    with pytest.raises(KeyDerivationError, match="cache"):
        key(made, 1, object())


# --- K3: kinds of keys --------------------------------------------------------------------------------------


def test_names_choose_the_arguments_that_count_in_any_order() -> None:
    assert key(recipe(key=("order_id",)), 1, 5) == key(recipe(key=("order_id",)), 1, 6)
    one, other = recipe(key=("amount", "order_id")), recipe(key=("order_id", "amount"))
    assert key(one, 1).digest == key(other, 1).digest


def test_no_names_are_the_task_alone() -> None:
    assert (
        key(recipe(key=()), 1) == key(recipe(key=()), 2) == Key(key(recipe(key=()), 1).digest, "shop.charge")
    )


def test_a_template_keeps_the_types_of_its_values() -> None:
    made = recipe(key="order:{order_id}")
    assert key(made, 1).text == key(made, "1").text == "shop.charge:order:1"
    assert key(made, 1).digest != key(made, "1").digest


def test_another_template_is_another_key() -> None:
    assert key(recipe(key="a:{order_id}"), 1).digest != key(recipe(key="b:{order_id}"), 1).digest


def test_a_function_gets_all_arguments_and_answers_with_the_key() -> None:
    made = recipe(key=lambda arguments: f"{arguments['order_id']}/{arguments['amount']}")
    assert key(made, 1) == key(made, "1", amount="10")
    assert key(made, 1).text == "shop.charge:1/10"


def test_a_function_that_answers_none_leaves_the_call_unguarded() -> None:
    derived = recipe(key=lambda _: None).derive_call((1,), {})
    assert derived.key is None
    assert derived.fingerprint is None


def test_a_function_that_answers_none_is_an_error_where_a_key_is_required() -> None:
    with pytest.raises(KeyDerivationError, match="never runs unguarded"):
        recipe(key=lambda _: None, required=True).derive((1,), {})


@pytest.mark.parametrize("answer", [5, "", b"x"])
def test_a_function_must_answer_with_text(answer: Any) -> None:
    with pytest.raises(KeyDerivationError, match="must be text"):
        recipe(key=lambda _: answer).derive((1,), {})


def failing(arguments: Any) -> str:
    raise LookupError(f"no order {arguments['order_id']}")


def test_error_of_a_key_function_names_task_and_function() -> None:
    with pytest.raises(
        KeyDerivationError, match=r"shop\.charge: the key function failing .*LookupError: no order 7"
    ) as seen:
        recipe(key=failing).derive((7,), {})
    assert isinstance(seen.value.__cause__, LookupError)


def test_error_of_a_resource_function_names_task_and_function() -> None:
    made = recipe(resource=failing)
    with pytest.raises(
        KeyDerivationError, match=r"shop\.charge: the resource function failing .*LookupError"
    ) as seen:
        made.resource(key(made, 7), {"order_id": 7})
    assert isinstance(seen.value.__cause__, LookupError)


def test_time_limit_in_a_key_function_passes_through() -> None:
    def interrupted(_: Any) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recipe(key=interrupted).derive((7,), {})


def test_a_key_given_for_one_call_stands_for_the_answer_of_a_key_function() -> None:
    given = recipe().derive((1,), {}, "nightly")
    assert given == recipe(key=lambda _: "nightly").derive((2,), {})
    assert given is not None
    assert given.text == "shop.charge:nightly"
    assert recipe().derive_call((1,), {}, "nightly").fingerprint == recipe().fingerprint((1,), {})


def test_an_empty_key_for_one_call_is_an_error() -> None:
    with pytest.raises(KeyDerivationError, match="once_key"):
        recipe().derive((1,), {}, "")


def test_the_scope_is_part_of_the_key_and_may_be_shared() -> None:
    assert key(recipe(scope="a"), 1).digest != key(recipe(scope="b"), 1).digest
    refund = KeyRecipe(CallPlan.of(charge, "shop.refund"), scope="money", key="{order_id}")
    assert key(refund, 1) == key(recipe(scope="money", key="{order_id}"), 1)


@pytest.mark.parametrize("option", ["key", "fingerprint"])
def test_a_wrong_name_fails_at_declaration_with_a_suggestion(option: str) -> None:
    with pytest.raises(ConfigError, match=r"'oder_id'.*order_id, amount, note.*did you mean 'order_id'"):
        recipe(**{option: ("oder_id",)})


@pytest.mark.parametrize("option", ["key", "resource"])
def test_a_wrong_name_in_a_template_fails_at_declaration(option: str) -> None:
    with pytest.raises(ConfigError, match=r"shop.charge.*did you mean 'order_id'"):
        recipe(**{option: "x:{order}"})


def test_an_argument_name_without_braces_is_no_key() -> None:
    with pytest.raises(ConfigError, match=r"same text for every call; write '\{order_id\}'"):
        recipe(key="order_id")


@pytest.mark.parametrize("text", ["{}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>5}", "{a:{b}}"])
def test_a_template_names_arguments_and_nothing_else(text: str) -> None:
    with pytest.raises(ConfigError, match="may name arguments only"):
        recipe(lambda a, b: None, key=text)


def test_a_broken_template_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no format string"):
        recipe(key="{order_id")


def test_a_stable_key_is_stable_between_releases() -> None:
    """If this fails, all deployed keys change: raise the encoding's version, say so in the changelog."""
    made = recipe(key=("order_id", "amount"))
    assert key(made, [1, "ü", None, 2.5], {"a": True}).digest == STABLE


STABLE = "d631a15e30e841251a6835dd546774b283efee2bd5c4e3deaa99340da61da7a5"


# --- fingerprints -------------------------------------------------------------------------------------------


def test_a_fingerprint_covers_all_arguments_unless_told_otherwise() -> None:
    made = recipe(key=("order_id",))
    assert made.fingerprint((1, 10), {}) == made.fingerprint((1,), {}) != made.fingerprint((1, 11), {})


def test_a_fingerprint_covers_the_arguments_that_are_named() -> None:
    made = recipe(fingerprint=("amount",))
    assert (
        made.fingerprint((1, 10), {"note": "a"})
        == made.fingerprint((2, 10), {})
        != made.fingerprint((2, 11), {})
    )


def test_no_names_turn_the_fingerprint_off() -> None:
    derived = recipe(lambda a, b: None, key=("a",), fingerprint=()).derive_call((1, Order()), {})
    assert derived.fingerprint is None
    assert derived.key is not None


def test_one_binding_yields_key_fingerprint_and_arguments() -> None:
    derived = recipe().derive_call((1,), {"note": "x"})
    assert derived.key == key(recipe(), 1, note="x")
    assert len(bytes.fromhex(derived.fingerprint or "")) == 32
    assert derived.arguments == {"order_id": 1, "amount": 10, "note": "x"}


# --- readable text ------------------------------------------------------------------------------------------


def test_the_text_names_the_arguments_in_their_order() -> None:
    text = key(recipe(), 7, [1, {"a": "b"}], note="hi").text
    assert text == "shop.charge:order_id=7,amount=[1,{a:b}],note=hi"


def test_the_text_escapes_what_would_break_a_line_or_a_field() -> None:
    assert key(recipe(key="{note}"), 1, note="a|b\nc\x00\ud800").text == r"shop.charge:a\x7cb\nc\x00\ud800"


def test_the_text_is_shortened_and_says_so() -> None:
    text = key(recipe(scope="s" * 500), "x" * 500, ["y" * 500] * 500).text
    assert len(text) == 255
    assert text.endswith("…")


def test_a_value_that_cannot_be_shown_does_not_fail_a_call() -> None:
    class Shy:
        def __str__(self) -> str:
            raise RuntimeError

    shy = Shy()
    assert key(recipe(lambda a=shy: None)).text == "shop.charge:a=<Shy>"


def test_digests_alone_can_stand_in_the_text() -> None:
    found = key(recipe(key_text="hash"), "ann@example.com")
    assert found == Key(key(recipe(), "ann@example.com").digest, f"shop.charge:{found.digest[:16]}")
    given = recipe(key_text="hash").derive((1,), {}, "ann@example.com")
    assert given is not None
    assert "ann" not in given.text


# --- resources and ids --------------------------------------------------------------------------------------


def test_a_resource_is_filled_from_int_str_and_uuid() -> None:
    uuid = UUID(int=5)
    assert render_resource("{a}:{b}:{c}", {"a": -7, "b": "x:y%", "c": uuid}) == f"-7:x%3Ay%25:{uuid}"


@pytest.mark.parametrize("value", [True, None, 1.0, b"x", [1], Decimal(1), 10**400])
def test_a_resource_takes_nothing_else(value: Any) -> None:
    with pytest.raises(KeyDerivationError, match="account"):
        recipe(lambda account: None, resource="{account}").resource(Key("0" * 64, "k"), {"account": value})


@pytest.mark.parametrize("value", ["", "x" * 256, ":" * 86, "a\0b", "\ud800"])
def test_a_resource_is_1_to_255_characters_that_postgres_can_store(value: str) -> None:
    with pytest.raises(KeyDerivationError, match="resource"):
        render_resource("{a}", {"a": value})


def test_a_resource_may_be_computed() -> None:
    made = recipe(resource=lambda arguments: f"account:{arguments['order_id']}")
    assert made.resource(Key("0" * 64, "k"), {"order_id": 3}) == "account:3"
    with pytest.raises(KeyDerivationError, match="must be text"):
        recipe(resource=lambda _: 5).resource(Key("0" * 64, "k"), {})


def test_without_a_resource_it_is_the_key_which_is_unique_whatever_its_text() -> None:
    one, other = key(recipe(key="{order_id}"), 1), key(recipe(key="{order_id}"), "1")
    assert one.text == other.text
    assert recipe().resource(one, {}) == default_resource(one) == f"{one.text}#{one.digest}"
    assert default_resource(one) != default_resource(other)
    assert len(default_resource(Key("0" * 64, "x" * 255))) == 255


def test_each_run_of_a_key_has_a_digest_of_its_own() -> None:
    digest = key(recipe(), 1).digest
    one = keys.operation_digest(digest, "run-1")
    assert len(one) == 32
    assert one == keys.operation_digest(digest, "run-1") != keys.operation_digest(digest, "run-2")
    assert one != bytes.fromhex(digest)


def test_ids_are_random_and_128_bits_long() -> None:
    assert len({keys.new_id() for _ in range(100)}) == 100
    assert len(bytes.fromhex(keys.new_id())) == 16
