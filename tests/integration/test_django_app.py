# ruff: noqa: PT012 - what is asked is how a transaction ends, so the block that raises is the whole transaction
"""The Django app on a real PostgreSQL: migrations, and the body's transaction with real claim, begin and complete."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import psycopg
import pytest
from django.core import checks
from django.core.management import call_command
from django.db import connections, transaction
from django.test import override_settings

from celery_once_fenced.errors import ConfigError, FencedOffError, GrantError
from celery_once_fenced.stores import Claim, Completion, Held, Operation
from celery_once_fenced.stores.postgres import PostgresLedgerStore
from django_celery_once_fenced.models import Effect, Epoch, Event, Fence, LedgerEntry, Outbox
from django_celery_once_fenced.store import DjangoDatabase, conninfo
from example_project.servers import Servers
from example_project.shop.models import Account
from tests.fixtures.django_project import database_at
from tests.fixtures.servers import fresh_database

MODELS = (Effect, Epoch, Event, Fence, LedgerEntry, Outbox)
DONE = Completion(result="1", omitted=None, retention=60)

# A released file is never edited: somewhere a migration has run it.  What changes is a new file, in a new migration.
# The digest of a new file: sha256sum celery_once_fenced/stores/sql/*.sql
RELEASED = {
    "abandon_v1.sql": "20554924fd45aab1dc6a236f544444b39b1c90193d9abe753b6588320473b4dc",
    "begin_v1.sql": "c45911770d8c9df57d07a0f36a7cdd8a95dfacdb20bc0124d5aec518b0ded779",
    "claim_v1.sql": "c3d363b89d129b52646085ca9cd2c630a6f74e727e1b5ace83f6f295357e9dec",
    "complete_v1.sql": "75b8a4bbbb0b3bbeb52da77e8edcaca439e83f6a294098949fd2e374276e44b3",
    "durable_v1.sql": "17d129ca8f8e20cb94e28d63bda1b3f7a0b1ce107f5df1afbf90d61bec74497a",
    "effect_finish_v1.sql": "59421b8f378e8caceb49570c15cf90ed291bce4827f849972520b8ef7019f10a",
    "effect_start_v1.sql": "c9edaa7241d3c8cf0ba559d100e3593685803d01bd8045c1d418c3088aa25cfd",
    "evict_v1.sql": "f44f8b9fe95d06105bdd4a4c7ea5b972d2caa943b0844c0928a7d3e6b70132b9",
    "fence_v1.sql": "c5375cee0d72759ffc41bbb18a1de85fcde34520d3e87acca75313a13f537f7c",
    "force_release_v1.sql": "b87d60ee5b74d86261b040fd0b89a6c55d645525d7d8226d8a56f2ceb290e9bb",
    "forget_v1.sql": "92b316a311dc93f0cf645a1278ad893d2e02877f712d232478b79879bc25eeba",
    "guard_v1.sql": "e363bbe605561ff8f3c80a5714922addfb9da3f10a1be16c6ae0bb4bef1d1587",
    "listing_v1.sql": "f668454ef5e518173ab16759e0a9620c54b87e12a94bafb6289f5c2a8d403bef",
    "lock_v1.sql": "918c6da82fb0f3aec91f1af2ea8f42d9e8134135257471203e920bd1e45b3e77",
    "outbox_v1.sql": "9d5106e6518f19eadde687f348372603281a44efdd2977b46eef5d28bf2e67fb",
    "prune_v1.sql": "52150ca8fc761792699e44b7dd94d34eed01233281ea3e61aaa033020c4618dd",
    "record_v1.sql": "0c78c3592d83a93f19b0cfff4ce2eb415ba708ce7010ac06da7c05f1ae4a6ef7",
    "renew_v1.sql": "c7ba6a2871bff5340b68e813a786289fdff945ba4426dea65a40fe469a583cc2",
    "resolve_v1.sql": "0b9603cf48d83bfad2eee0e7e1c9acc28fd64b49101d600ed0ae4ac6aa0788ce",
    "schema_v1.sql": "0a139bf7e002ba88372c3f5fe0cacb94f121b66ec1dc7be8bec66c28db75959f",
    "timeline_v1.sql": "df9538f19647eb0f6f256f36b9e648bd9417781580da8af355992ad97b8200c5",
    "token_v1.sql": "187829d1c55f518893f74329bf0872f5a4c60ee5fa6ba202304cfb8bac927e4c",
    "unfenced_v1.sql": "32d62c931db22f5e53fa290d6de120a2f09cf87a8ab2f5dc8bf1cba5530b3d2f",
}


def output(*command: str, **options: Any) -> str:
    text = io.StringIO()
    call_command(*command, stdout=text, **options)
    return text.getvalue()


def tables(alias: str = "default") -> set[str]:
    names = connections[alias].introspection.table_names()
    return {name for name in names if name.startswith("once_fenced_")}


def functions(alias: str = "default") -> set[str]:
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT proname FROM pg_proc WHERE proname LIKE 'once\\_fenced\\_%'")
        return {name for (name,) in cursor.fetchall()}


def domains(alias: str = "default") -> set[str]:
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT typname FROM pg_type WHERE typtype = 'd' AND typname LIKE 'once\\_fenced\\_%'")
        return {name for (name,) in cursor.fetchall()}


# --- migrations ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("shop")
class TestMigrations:
    def test_the_models_are_what_the_migrations_say(self) -> None:
        assert "No changes" in output("makemigrations", check=True, dry_run=True)

    @pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
    def test_the_models_are_what_the_tables_are(self, model: Any) -> None:
        with connections["default"].cursor() as cursor:
            columns = connections["default"].introspection.get_table_description(cursor, model._meta.db_table)
        described = {field.column: field.null for field in model._meta.concrete_fields if field.column}
        assert described == {column.name: column.null_ok for column in columns}

    def test_backwards_removes_everything_and_forwards_brings_it_back(self) -> None:
        there = tables(), functions(), domains()
        call_command("migrate", "once_fenced", "zero", verbosity=0)
        assert (tables(), functions(), domains()) == (set(), set(), set())
        call_command("migrate", "once_fenced", verbosity=0)
        assert (tables(), functions(), domains()) == there

    def test_sqlmigrate_shows_the_sql(self) -> None:
        shown = output("sqlmigrate", "once_fenced", "0001")
        assert "create table if not exists once_fenced_fence" in shown
        assert "function once_fenced_claim_v1(" in shown
        assert "drop table" in output("sqlmigrate", "once_fenced", "0001", backwards=True)

    def test_every_sql_file_is_installed(self) -> None:
        files = {file.name for file in (resources.files("celery_once_fenced.stores") / "sql").iterdir()}
        migration = __import__("django_celery_once_fenced.migrations.0001_initial", fromlist=["FILES"])
        assert files == {*migration.FILES, "listing_v1.sql"}
        assert "index if not exists once_fenced_ledger_started" in output("sqlmigrate", "once_fenced", "0002")

    def test_a_released_sql_file_is_never_edited(self) -> None:
        files = (resources.files("celery_once_fenced.stores") / "sql").iterdir()
        assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files} == RELEASED

    def test_nothing_is_done_on_another_alias(self, other: str) -> None:
        call_command("migrate", "once_fenced", database=other, verbosity=0)
        assert (tables(other), functions(other)) == (set(), set())

    @pytest.mark.usefixtures("other")
    def test_no_router_is_asked(self, postgres_url: str) -> None:
        with database_at(postgres_url), override_settings(DATABASE_ROUTERS=[NoRouter()]):
            call_command("migrate", "once_fenced", verbosity=0)
            assert "once_fenced_fence" in tables()

    def test_functions_that_went_missing_are_a_warning(self) -> None:
        assert found_by_database_checks() == []
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER FUNCTION once_fenced_begin_v1 RENAME TO lost")
            try:
                (message,) = found_by_database_checks()
            finally:
                cursor.execute("ALTER FUNCTION lost RENAME TO once_fenced_begin_v1")
        assert message.id == "once_fenced.W003"
        assert "once_fenced_begin_v1" in message.msg

    def test_before_the_migration_there_is_no_warning(self, postgres_url: str) -> None:
        with database_at(postgres_url):
            assert found_by_database_checks() == []


class NoRouter:
    def allow_migrate(self, *_args: object, **_hints: object) -> bool:
        return False

    def db_for_write(self, *_args: object, **_hints: object) -> str:
        return "other"

    db_for_read = db_for_write


def found_by_database_checks() -> list[checks.CheckMessage]:
    found = checks.run_checks(tags=[checks.Tags.database], databases=["default"])
    return [message for message in found if str(message.id).startswith("once_fenced")]


def test_the_settings_load_without_a_warning(shop: str) -> None:
    environment = os.environ | {"ONCE_FENCED_POSTGRES_URL": shop}
    command = [sys.executable, "-W", "error", "example_project/manage.py", "check", "--database", "default"]
    assert (
        "no issues"
        in subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    )


def test_the_command_is_the_one_of_celery(shop: str, servers: Servers, held: Held) -> None:
    environment = os.environ | {"ONCE_FENCED_POSTGRES_URL": shop, "ONCE_FENCED_REDIS_URL": servers.redis_url}
    command = [sys.executable, "-W", "error", "example_project/manage.py", "once_fenced"]
    leases = subprocess.run(
        [*command, "leases", "--json"], env=environment, capture_output=True, text=True, check=True
    )
    assert held.operation.resource in leases.stdout
    wrong = subprocess.run([*command, "lases"], env=environment, capture_output=True, text=True, check=False)
    assert (wrong.returncode, "No such command 'lases'" in wrong.stderr) == (2, True)


def test_the_command_can_be_called_from_code(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("once_fenced", "sql")
    assert "create table if not exists once_fenced_fence" in capsys.readouterr().out


# --- the body's transaction ------------------------------------------------------------------------------------------


def test_writes_and_outcome_commit_together(database: DjangoDatabase, account: Account, held: Held) -> None:
    with database.transaction(held) as opened:
        Account.objects.filter(pk=account.pk).update(balance=90)
        opened.complete(held, DONE)
    account.refresh_from_db()
    assert account.balance == 90
    assert state_of(held) == "succeeded"
    assert Fence.objects.get(pk=held.operation.resource).holder is None


def test_begin_is_the_first_statement_and_names_the_session(database: DjangoDatabase, held: Held) -> None:
    with database.transaction(held) as opened, opened.connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('application_name'), current_setting('once_fenced.token')")
        assert cursor.fetchone() == (f"once_fenced:{held.holder}", str(held.token))


def test_nothing_of_a_transaction_stays_with_the_connection(database: DjangoDatabase, held: Held) -> None:
    with database.transaction(held) as opened:
        opened.complete(held, DONE)
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT current_setting('application_name'), current_setting('once_fenced.token')")
        assert cursor.fetchone() == ("", "")


def test_an_error_of_the_body_rolls_everything_back(
    database: DjangoDatabase, account: Account, held: Held
) -> None:
    with pytest.raises(ZeroDivisionError), database.transaction(held):
        Account.objects.filter(pk=account.pk).update(balance=90)
        raise ZeroDivisionError
    account.refresh_from_db()
    assert account.balance == 100
    assert state_of(held) == "running"


def test_a_body_that_was_taken_over_is_fenced_off_at_complete(
    database: DjangoDatabase, account: Account, claim: Callable[..., Held]
) -> None:
    first = claim(lease=0.001)
    with pytest.raises(FencedOffError) as raised, database.transaction(first) as opened:
        Account.objects.filter(pk=account.pk).update(balance=90)
        take_over(first)
        opened.complete(first, DONE)
    assert (raised.value.resource, raised.value.token) == (first.operation.resource, first.token)
    account.refresh_from_db()
    assert account.balance == 100


def test_a_body_that_was_taken_over_is_fenced_off_at_begin(database: DjangoDatabase, held: Held) -> None:
    take_over(held)
    with pytest.raises(FencedOffError), database.transaction(held):
        pytest.fail("the body ran")
    assert not connections["default"].in_atomic_block


@pytest.mark.parametrize(
    "own",
    [
        lambda: transaction.atomic(durable=True).__enter__(),
        transaction.commit,
        transaction.rollback,
        lambda: transaction.set_autocommit(True),
    ],
    ids=["durable", "commit", "rollback", "autocommit"],
)
def test_a_body_with_a_transaction_of_its_own_is_told_of_atomic_false(
    database: DjangoDatabase, account: Account, held: Held, own: Callable[[], None]
) -> None:
    with pytest.raises(GrantError, match="atomic=False"), database.transaction(held):
        Account.objects.filter(pk=account.pk).update(balance=90)
        own()
    account.refresh_from_db()
    assert account.balance == 100


def test_a_transaction_that_could_not_commit_by_itself_is_refused(
    database: DjangoDatabase, held: Held
) -> None:
    with transaction.atomic(), pytest.raises(GrantError), database.transaction(held):
        pytest.fail("the body ran")


@pytest.mark.parametrize("own", ["COMMIT", "ROLLBACK"])
def test_a_body_that_ends_the_transaction_behind_djangos_back_is_caught_by_complete(
    database: DjangoDatabase, held: Held, own: str
) -> None:
    with pytest.raises(GrantError, match="atomic=False"), database.transaction(held) as opened:
        with opened.connection.cursor() as cursor:
            cursor.execute(own)
        opened.complete(held, DONE)
    assert state_of(held) == "running"


def test_a_body_that_marked_its_transaction_for_rollback_does_not_succeed(
    database: DjangoDatabase, held: Held
) -> None:
    with pytest.raises(transaction.TransactionManagementError), database.transaction(held) as opened:
        transaction.set_rollback(True)
        opened.complete(held, DONE)
    assert state_of(held) == "running"


def test_ordinary_atomic_blocks_of_the_body_are_savepoints(
    database: DjangoDatabase, account: Account, held: Held
) -> None:
    with database.transaction(held) as opened:
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            Account.objects.filter(pk=account.pk).update(balance=90)
            raise ZeroDivisionError
        opened.complete(held, DONE)
    account.refresh_from_db()
    assert account.balance == 100
    assert state_of(held) == "succeeded"


def test_a_terminated_connection_is_a_lost_one_and_the_next_transaction_gets_another(
    database: DjangoDatabase, account: Account, held: Held
) -> None:
    with pytest.raises(Exception) as raised, database.transaction(held) as opened:  # noqa: PT011  (asked below)
        terminate(held)
        opened.complete(held, DONE)
    assert database.connection_lost(raised.value)
    with database.transaction(held) as opened:
        opened.complete(held, DONE)
    assert state_of(held) == "succeeded"


def test_an_error_that_the_body_made_of_a_lost_connection_is_one_still(
    database: DjangoDatabase, held: Held
) -> None:
    with pytest.raises(ValueError, match="report failed") as raised, database.transaction(held):
        terminate(held)
        try:
            Account.objects.count()
        except Exception as error:
            raise ValueError("report failed") from error
    assert database.connection_lost(raised.value)


def test_an_ordinary_error_is_no_lost_connection(database: DjangoDatabase) -> None:
    assert not database.connection_lost(ValueError("no"))
    with pytest.raises(Exception) as raised, connections["default"].cursor() as cursor:  # noqa: PT011  (asked below)
        cursor.execute("SELECT 1/0")
    assert not database.connection_lost(raised.value)


def test_without_autocommit_the_transaction_is_refused_not_silently_dropped(
    database: DjangoDatabase, held: Held
) -> None:
    transaction.set_autocommit(False)
    try:
        with pytest.raises(GrantError, match="autocommit"), database.transaction(held):
            pytest.fail("the body ran")
    finally:
        transaction.set_autocommit(True)


def test_isolation_that_cannot_be_fenced_is_refused(database: DjangoDatabase, held: Held) -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute("SET default_transaction_isolation = 'repeatable read'")
    try:
        with pytest.raises(GrantError, match="READ COMMITTED"), database.transaction(held):
            pytest.fail("the body ran")
    finally:
        connections["default"].close()


# --- connections of the plugin's own ---------------------------------------------------------------------------------


def test_conninfo_leads_to_the_same_database(shop: str) -> None:
    with psycopg.connect(**conninfo("default")) as connection:
        assert connection.info.dbname in shop


def test_conninfo_follows_the_name_that_a_test_runner_gives(shop: str, postgres_url: str) -> None:
    source = DjangoDatabase("default").conninfo
    with database_at(postgres_url):
        assert source()["dbname"] in postgres_url
    assert source()["dbname"] in shop


def test_conninfo_keeps_what_libpq_needs_and_drops_what_is_djangos(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "sslmode": "prefer",
        "options": "-c search_path=public",
        "pool": True,
        "isolation_level": 2,
        "server_side_binding": True,
        "prepare_threshold": 5,
        "assume_role": "the clerk",
    }
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", options)
    found = conninfo("default")
    assert found["sslmode"] == "prefer"
    assert found["options"] == "-c search_path=public -c role=the\\ clerk"
    assert not found.keys() & {"pool", "isolation_level", "cursor_factory", "context", "prepare_threshold"}
    psycopg.conninfo.make_conninfo(**found)


def test_an_assumed_role_is_the_role_of_the_plugins_connections_too(
    shop: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with connections["default"].cursor() as cursor:
        cursor.execute('CREATE ROLE "the clerk"')
    try:
        monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", {"assume_role": "the clerk"})
        with psycopg.connect(**conninfo("default")) as connection:
            assert connection.execute("SELECT current_user").fetchone() == ("the clerk",)
    finally:
        with psycopg.connect(shop, autocommit=True) as connection:
            connection.execute('DROP ROLE "the clerk"')


def test_an_alias_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match="'ledgr'"):
        conninfo("ledgr")


# --- fixtures --------------------------------------------------------------------------------------------------------

ledger_ids = itertools.count(1)


def state_of(held: Held) -> str:
    return LedgerEntry.objects.get(pk=held.operation.digest).state


def terminate(held: Held) -> None:
    """End the session of a body, as an administrator, a restart or an eviction does."""
    with psycopg.connect(**conninfo("default")) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = %s",
            [f"once_fenced:{held.holder}"],
        )


def take_over(held: Held) -> None:
    """Issue a higher token from elsewhere, without evicting anybody."""
    with psycopg.connect(**conninfo("default")) as connection:
        connection.execute(
            "UPDATE once_fenced_fence SET token = token + 1, holder = 'another' WHERE resource = %s",
            [held.operation.resource],
        )


@pytest.fixture
def database(shop: str) -> DjangoDatabase:
    return DjangoDatabase("default")


@pytest.fixture
def account(shop: str) -> Account:
    return Account.objects.create(name="Ada", balance=100)


@pytest.fixture
def claim(database: DjangoDatabase) -> Iterator[Callable[..., Held]]:
    """Make a real claim of a new operation."""
    store = PostgresLedgerStore(database.conninfo)

    def make(lease: float = 60) -> Held:
        number = next(ledger_ids)
        digest = hashlib.sha256(str(number).encode()).digest()
        operation = Operation(
            digest, f"op:{number}", "tests", "tests.op", f"task-{number}", None, f"resource:{number}"
        )
        holder = f"holder-{number}"
        claimed = store.claim(Claim(operation, holder, "worker@here", lease, 5, "hold", 60))
        assert claimed.token is not None
        return Held(operation, holder, claimed.token, claimed.attempt)

    yield make
    store.close()


@pytest.fixture
def held(claim: Callable[..., Held]) -> Held:
    return claim()


@pytest.fixture
def other(servers: Servers) -> Iterator[str]:
    """A second PostgreSQL alias, with an empty database."""
    with fresh_database(servers) as url:
        connections.settings["other"] = dict(connections.settings["default"])
        with database_at(url, "other"):
            yield "other"
        del connections.settings["other"], connections["other"]
