"""The settings dict: what is refused, with which words, and what never appears in them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from celery_once_fenced.config import Settings, mask_url, policy_for, problems, unknown_tasks
from celery_once_fenced.errors import ConfigError
from celery_once_fenced.policy import Once

REDIS = "redis://localhost:6379/2"


def settings(**given: Any) -> Settings:
    return Settings.from_mapping({"redis_url": REDIS, **given})


def test_one_address_is_enough() -> None:
    found = settings()
    assert (found.redis_url, found.namespace, found.key_text) == (REDIS, "once", "plain")
    assert (found.socket_timeout, found.connect_timeout, found.redelivery_window) == (0.5, 1.0, None)
    assert (found.database, found.postgres_url, found.transaction) == (None, None, None)
    assert found.defaults == Once()
    assert found.tasks == {}


def test_options_and_durations_are_typed() -> None:
    found = settings(
        defaults={"lease": "1m"},
        tasks={"a": {"key": ["x"]}, "b": Once(lease=5)},
        redelivery_window="2h",
        database="db",
    )
    assert found.defaults == Once(lease=60)
    assert found.tasks == {"a": Once(key=("x",)), "b": Once(lease=5)}
    assert found.redelivery_window == 7200.0


def test_a_redelivery_window_of_zero_is_off_and_not_the_default() -> None:
    assert settings(redelivery_window=0).redelivery_window == 0.0


def test_the_dict_of_the_user_is_not_changed() -> None:
    given = {
        "redis_url": REDIS,
        "defaults": {"lease": "1m"},
        "tasks": {"a": {"key": ["x"]}},
        "database": None,
    }
    before = copy.deepcopy(given)
    found = Settings.from_mapping(given)
    assert given == before
    with pytest.raises(TypeError):
        found.tasks["b"] = Once()  # type: ignore[index]


def test_none_leaves_a_setting_out() -> None:
    assert settings(socket_timeout=None, namespace=None) == settings()


def test_a_missing_address_is_named_unless_another_can_stand_in() -> None:
    with pytest.raises(ConfigError, match="redis_url is not set; write"):
        Settings.from_mapping({})
    assert Settings.from_mapping({}, default_redis_url=REDIS).redis_url == REDIS
    assert Settings.from_mapping({"redis_url": REDIS}, default_redis_url="redis://other").redis_url == REDIS


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"redis_ur": REDIS}, "'redis_ur' is no setting; did you mean 'redis_url'"),
        ({"zzz": 1}, "'zzz' is no setting; the settings are redis_url, database"),
        ({"lease": 30}, "'lease' is no setting; it is an option of tasks"),
        ({"redis_url": [REDIS, REDIS]}, "Redlock is not available in this version; give one URL"),
        ({"redis_url": [REDIS]}, "Redlock is not available in this version; give one URL"),
        ({"redis_url": 5}, "redis_url must be text, not int"),
        ({"redis_url": "http://h"}, "redis_url must begin with redis://, rediss:// or unix://, not http://"),
        ({"redis_url": "redis://h:6379/abc"}, "redis_url ends in '/abc', which is no number of a database"),
        ({"database": ""}, "database must be text"),
        ({"postgres_url": 5}, "postgres_url must be text"),
        ({"database": "default", "postgres_url": "postgresql://h"}, "exclude each other"),
        ({"transaction": "session", "postgres_url": "postgresql://h"}, "transaction must be"),
        ({"transaction": "shop.db.session"}, "transaction needs postgres_url"),
        ({"transaction": "shop.db.session", "database": "default"}, "database and transaction exclude"),
        ({"namespace": "a:b"}, "namespace='a:b' must be 1 to 64 letters"),
        ({"namespace": "{a}"}, "namespace="),
        ({"namespace": "a" * 65}, "namespace="),
        ({"namespace": "a\n"}, "namespace="),
        ({"namespace": ""}, "namespace="),
        ({"defaults": 5}, "defaults: options must be a dict"),
        ({"defaults": {"leas": 5}}, "defaults: 'leas' is no option of Once; did you mean 'lease'"),
        ({"defaults": {"scope": "x"}}, "defaults: 'scope' for all tasks would make one key of many"),
        ({"defaults": Once(scope="x")}, "defaults: 'scope' for all tasks would make one key of many"),
        ({"tasks": []}, "tasks must be a dict of task names"),
        ({"tasks": {"shop.a": {"tier": "x"}}}, r"tasks\['shop.a'\]: tier='x' is not allowed"),
        ({"tasks": {5: {}}}, r"tasks\[5\]: a task is named by text"),
        ({"redelivery_window": "soon"}, "redelivery_window='soon' is no duration"),
        ({"socket_timeout": 0}, "socket_timeout=0 is too short"),
        ({"connect_timeout": -1}, "connect_timeout=-1 is no duration"),
        ({"key_text": "none"}, "key_text='none' must be 'plain' or 'hash'"),
    ],
)
def test_a_wrong_setting_is_one_sentence_that_names_it(given: dict[str, Any], sentence: str) -> None:
    found = problems({"redis_url": REDIS, **given})
    assert len(found) == 1
    with pytest.raises(ConfigError, match=sentence):
        settings(**given)


def test_all_that_is_wrong_is_said_at_once() -> None:
    given = {"namespce": "x", "socket_timeout": 0, "tasks": {"a": {"leas": 1}, "b": {"tier": "x"}}}
    assert len(problems(given)) == 5


def test_settings_that_are_right_have_no_problems() -> None:
    assert (
        problems({"redis_url": REDIS, "postgres_url": "postgresql://h", "transaction": "shop.db.session"})
        == []
    )
    assert problems({}, default_redis_url=REDIS) == []


def test_settings_must_be_a_dict() -> None:
    assert problems(None) == ["the settings must be a dict, not NoneType"]


# --- secrets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://localhost:6379/2", "redis://localhost:6379/2"),
        ("redis://:s3cret@h:1/2", "redis://:***@h:1/2"),
        ("rediss://ann:s3c/r@t@h:1/2?x=y", "rediss://ann:***@h:1/2?x=y"),
        ("unix:///run/redis.sock?password=s3cret&db=1", "unix:///run/redis.sock?password=***&db=1"),
        ("postgresql://ann:s3cret@h/db", "postgresql://ann:***@h/db"),
        ("host=h password='s3c ret' user=ann", "host=h password=*** user=ann"),
        ("host=h password = s3cret", "host=h password = ***"),
    ],
)
def test_a_masked_address_keeps_all_but_the_password(url: str, masked: str) -> None:
    assert mask_url(url) == masked


@pytest.mark.parametrize(
    "given",
    [
        {"redis_url": "http://:s3cret@h"},
        {"redis_url": "ann:s3cret@h"},
        {"redis_url": ["redis://:s3cret@h"]},
        {"redis_uri": "redis://:s3cret@h"},
        {"redis_url": REDIS, "postgres_url": ["postgresql://ann:s3cret@h"]},
        {"redis_url": REDIS, "postgres_url": "postgresql://ann:s3cret@h", "database": "default"},
    ],
)
def test_no_password_appears_in_an_error(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_mapping(given)
    assert "s3cret" not in str(caught.value)


def test_no_password_appears_in_a_repr() -> None:
    assert "s3cret" not in repr(
        settings(redis_url="redis://:s3cret@h", postgres_url="postgresql://ann:s3cret@h")
    )


# --- tasks --------------------------------------------------------------------------------------------------


def test_tasks_then_the_task_then_its_bases_then_defaults_decide() -> None:
    found = settings(defaults={"lease": 1, "queue_hold": 1, "max_deferred": 1, "max_attempts": 1},
                     tasks={"shop.a": {"lease": 4}})  # fmt: skip
    own, base = Once(lease=3, queue_hold=3), Once(lease=2, queue_hold=2, max_deferred=2)
    policy = policy_for(found, "shop.a", (own, base))
    assert (policy.lease, policy.queue_hold, policy.max_deferred, policy.max_attempts) == (4.0, 3.0, 2, 1)
    assert policy_for(found, "shop.b", (own, base)).lease == 3.0


def test_the_hard_limit_ends_renewal_where_it_is_known() -> None:
    assert policy_for(settings(), "shop.a", hard_limit=90.0).max_hold == 90.0


def test_a_flip_of_the_tier_in_settings_is_checked_with_the_task() -> None:
    flipped = settings(tasks={"shop.a": {"tier": "correctness"}})
    with pytest.raises(ConfigError, match=r"shop\.a: .*needs replay_for"):
        policy_for(flipped, "shop.a")
    assert policy_for(flipped, "shop.a", (Once(replay_for=0),)).correctness


def test_conflict_with_the_defaults_says_where_the_option_stands() -> None:
    found = settings(defaults={"on_duplicate": "raise"})
    with pytest.raises(
        ConfigError, match=r"on_duplicate='raise' .*\(on_duplicate is set in the setting defaults\)"
    ):
        policy_for(found, "shop.a", (Once(unique="while_executing"),))


def test_conflict_of_what_a_task_says_itself_does_not_blame_the_defaults() -> None:
    found = settings(defaults={"on_duplicate": "raise", "lease": 5})
    own = Once(unique="while_executing", on_duplicate="raise")
    with pytest.raises(ConfigError, match="would never apply") as seen:
        policy_for(found, "shop.a", (own,))
    assert "defaults" not in str(seen.value)


def test_an_entry_for_a_task_that_does_not_exist_is_reported_with_a_suggestion() -> None:
    found = settings(tasks={"shop.tasks.chrage": {}, "shop.tasks.refund": {}})
    assert unknown_tasks(found, ["shop.tasks.charge", "shop.tasks.refund"]) == [
        "tasks['shop.tasks.chrage'] names no registered task; did you mean 'shop.tasks.charge'?"
    ]
