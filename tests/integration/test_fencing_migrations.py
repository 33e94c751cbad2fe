"""``AddFence`` and ``RemoveFence`` in migrations, where they run, and the checks that look after them."""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.core import checks
from django.core.management import call_command
from django.db import connections, migrations, models
from django.db.migrations.state import ProjectState
from django.db.migrations.writer import MigrationWriter, OperationWriter
from django.test import override_settings

from celery_once_fenced.errors import ConfigError, FencedOffError, GrantError
from django_celery_once_fenced.fencing import AddFence, FencedModel, RemoveFence, unfenced
from django_celery_once_fenced.fencing.operations import TRIGGER
from example_project.servers import Servers
from tests.fixtures.django_project import database_at
from tests.fixtures.fenced_app.models import Account, Vault
from tests.fixtures.fencing import app_installed, seen, sql, token
from tests.fixtures.servers import fresh_database

APP = "fenced_app"


def output(*command: str, **options: Any) -> str:
    text = io.StringIO()
    call_command(*command, stdout=text, **options)
    return text.getvalue()


def guarded(alias: str = "default") -> set[str]:
    """The tables with a guard, without partitions."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgname = %s AND tgparentid = 0", [TRIGGER]
        )
        return {table for (table,) in cursor.fetchall()}


ALL = {f"fenced_app_{table}" for table in ("account", "savings", "remark", "vault", "posting", "shelf")}


# --- migrations -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fenced")
class TestMigrations:
    def test_the_models_are_what_the_migrations_say(self) -> None:
        assert "No changes" in output("makemigrations", APP, check=True, dry_run=True)

    def test_backwards_removes_everything_and_forwards_brings_it_back(self) -> None:
        assert guarded() == ALL
        call_command("migrate", APP, "0001", verbosity=0)
        assert guarded() == set()
        assert columns("fenced_app_remark") == {"id", "account_id", "text"}
        assert "fence_token" in columns("fenced_app_account")
        call_command("migrate", APP, verbosity=0)
        assert guarded() == ALL
        assert "fence_token" in columns("fenced_app_remark")

    def test_sqlmigrate_shows_the_sql(self) -> None:
        shown = output("sqlmigrate", APP, "0002")
        assert (
            'CREATE TRIGGER zz_once_fenced BEFORE INSERT OR UPDATE OR DELETE ON "fenced_app_account" FOR EACH ROW '
            "EXECUTE FUNCTION once_fenced_guard_v1('stamp', 'account:', 'id', '')" in shown
        )
        assert """'stamp', '{', 'region', '}:%:', 'number', '''', 'batch', ''""" in shown
        assert 'ALTER TABLE "fenced_app_remark" ADD COLUMN fence_token bigint' in shown
        backwards = output("sqlmigrate", APP, "0002", backwards=True)
        assert 'DROP TRIGGER zz_once_fenced ON "fenced_app_account"' in backwards
        assert 'ALTER TABLE "fenced_app_remark" DROP COLUMN fence_token' in backwards

    def test_removed_and_added_with_another_mode(self) -> None:
        before, after = project(), project()
        remove, add = (
            RemoveFence("fenced_app.Account", "account:{id}"),
            AddFence("fenced_app.Account", "a:{id}", "require"),
        )
        with connections["default"].schema_editor() as editor:
            remove.database_forwards(APP, editor, before, after)
            add.database_forwards(APP, editor, before, after)
        with pytest.raises(GrantError):
            Account.objects.create()
        with connections["default"].schema_editor() as editor:
            add.database_backwards(APP, editor, after, before)
            remove.database_backwards(APP, editor, after, before)
        Account.objects.create()
        assert guarded() == ALL


def project() -> ProjectState:
    from django.apps import apps

    return ProjectState.from_apps(apps)


def columns(table: str) -> set[str]:
    with connections["default"].cursor() as cursor:
        return {
            column.name
            for column in connections["default"].introspection.get_table_description(cursor, table)
        }


@pytest.mark.parametrize("operation", [AddFence, RemoveFence])
def test_operations_can_be_written_down_again(operation: type[AddFence]) -> None:
    original = operation("shop.Account", resource="account:{id}", mode="require")
    name, args, kwargs = original.deconstruct()
    assert (name, operation(*args, **kwargs).deconstruct()) == (operation.__name__, original.deconstruct())
    written, _ = OperationWriter(original).serialize()
    assert "resource='account:{id}'" in written
    assert "account:{id}" in original.describe()
    assert original.migration_name_fragment == f"{operation.verb.lower()}_fence_account"
    assert original.references_model("account", "shop")
    assert not original.references_model("Feed", "shop")


def test_the_field_is_written_down_by_its_public_name() -> None:
    field = Account._meta.get_field("fence_token")
    assert MigrationWriter.serialize(field)[0] == "django_celery_once_fenced.fencing.FenceTokenField()"
    assert (field.null, field.editable) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"mode": "requir"}, "did you mean 'require'"),
        ({"model": "Account"}, "app_label.Model"),
        ({"resource": "account:{id.x}"}, "may name arguments only"),
        ({"resource": "account:{0}"}, "may name arguments only"),
        ({"resource": "account:{"}, "no format string"),
    ],
)
def test_a_wrong_operation_is_refused_where_it_is_written(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AddFence(**{"model": "shop.Account", "resource": "account:{id}", **arguments})


@pytest.mark.usefixtures("fenced")
@pytest.mark.parametrize(
    ("model", "resource", "problem"),
    [
        ("Account", "a:{number}", "no column 'number' of its own; it has balance, fence_token, id, name"),
        ("Account", "a:{name}", "never NULL"),
        ("Savings", "a:{id}", "no column 'id' of its own; it has account_ptr_id, rate"),
        ("Vault", "a:{fence_token}", "never NULL"),
        ("Odd", "a:{at}", "an integer, text or UUID column"),
        ("Odd", "a:{yes}", "an integer, text or UUID column"),
    ],
)
def test_a_column_that_does_not_do_is_refused_in_migrate(model: str, resource: str, problem: str) -> None:
    state = project()
    state.add_model(odd())
    with connections["default"].schema_editor() as editor, pytest.raises(ConfigError, match=problem):
        AddFence(f"{APP}.{model}", resource).database_forwards(APP, editor, state, state)


def odd() -> Any:
    fields = [
        ("id", models.BigAutoField(primary_key=True)),
        ("at", models.DateField()),
        ("yes", models.BooleanField()),
    ]
    return migrations.state.ModelState(APP, "Odd", fields)


@pytest.mark.usefixtures("fenced")
def test_a_missing_dependency_is_named() -> None:
    state = project()
    state.models = {key: model for key, model in state.models.items() if key[0] != "once_fenced"}
    with connections["default"].schema_editor() as editor, pytest.raises(ConfigError, match="dependencies"):
        AddFence("fenced_app.Plain", "plain:{id}").database_forwards(APP, editor, state, state)


# --- databases, roles, schemas ----------------------------------------------------------------------------------------


@pytest.fixture
def other(servers: Servers) -> Iterator[str]:
    """A second PostgreSQL alias, with an empty database."""
    with fresh_database(servers) as url:
        connections.settings["other"] = dict(connections.settings["default"])
        with database_at(url, "other"):
            yield "other"
        del connections.settings["other"], connections["other"]


class ToOther:
    """The fenced app lives in the second database, everything else in the first."""

    def db_for_write(self, model: Any, **_hints: object) -> str | None:
        return "other" if model._meta.app_label == APP else None

    db_for_read = db_for_write

    def allow_migrate(self, db: str, app_label: str, **_hints: object) -> bool:
        return (db == "other") == (app_label == APP)


def test_where_the_tokens_are_is_where_the_guards_are(postgres_url: str, other: str) -> None:
    """Fences, ledger and fenced tables in the second database; the first one knows nothing of them."""
    named = settings.CELERY_ONCE_FENCED | {"database": other}
    with (
        app_installed(DATABASE_ROUTERS=[ToOther()], CELERY_ONCE_FENCED=named),
        database_at(postgres_url),
    ):
        for alias in ("default", other):
            call_command("migrate", database=alias, verbosity=0)
        assert (guarded("default"), guarded(other)) == (set(), ALL)
        account = Account.objects.create()
        with token(5, f"account:{account.pk}", other):
            account.save()
        with pytest.raises(FencedOffError), token(4, f"account:{account.pk}", other):
            account.save()
        with unfenced(reason="in the second database"):
            Vault.objects.create()
        assert (seen(account), account._state.db) == (5, other)
        assert found_by("once_fenced.W010") == []


def test_a_model_in_another_database_is_left_alone_and_warned_of(postgres_url: str, other: str) -> None:
    with app_installed(DATABASE_ROUTERS=[ToOther()]), database_at(postgres_url):
        for alias in ("default", other):
            call_command("migrate", database=alias, verbosity=0)
        assert (guarded("default"), guarded(other)) == (set(), set())
        found = found_by("once_fenced.W010")
    assert {message.obj for message in found} >= {Account, Vault}
    assert "'other'" in found[0].msg


def test_an_unprivileged_role_in_a_schema_of_its_own(postgres_url: str, servers: Servers) -> None:
    """The owner migrates into a schema that is not public; the role that works may use its tables and nothing else."""
    role = f"clerk_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f"CREATE SCHEMA books; CREATE ROLE {role} NOSUPERUSER")
        with app_installed(), database_at(f"{postgres_url}?options=-csearch_path%3Dbooks"):
            call_command("migrate", verbosity=0)
            admin.execute(
                f"GRANT USAGE ON SCHEMA books TO {role};"
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA books TO {role};"
                f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA books TO {role}"
            )
            sql(f"SET ROLE {role}")
            account_under_guard()
        admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def account_under_guard() -> None:
    account = Account.objects.create()
    with token(5, f"account:{account.pk}"):
        account.save()
    with pytest.raises(FencedOffError), token(4, f"account:{account.pk}"):
        account.save()
    with unfenced(reason="a clerk may"):
        Vault.objects.create()
    assert sql("SELECT to_regclass('public.fenced_app_account'), current_user <> session_user") == [
        (None, True)
    ]


# --- checks -----------------------------------------------------------------------------------------------------------


def found_by(identity: str, **options: Any) -> list[checks.CheckMessage]:
    return [message for message in checks.run_checks(**options) if message.id == identity]


DATABASE: dict[str, Any] = {"tags": [checks.Tags.database], "databases": ["default"]}


@pytest.mark.usefixtures("fenced")
class TestChecks:
    def test_a_fenced_model_without_a_guard_is_warned_of(self) -> None:
        found = found_by("once_fenced.W011", **DATABASE)
        assert [message.obj._meta.label for message in found] == ["fenced_app.Plain"]
        assert 'AddFence("fenced_app.Plain"' in str(found[0].hint)

    def test_not_before_its_migrations_are_applied(self) -> None:
        call_command("migrate", APP, "0001", verbosity=0)
        assert found_by("once_fenced.W011", **DATABASE) == []
        call_command("migrate", APP, verbosity=0)

    def test_nor_for_a_database_that_was_not_asked_for(self) -> None:
        assert found_by("once_fenced.W011", tags=[checks.Tags.database], databases=[]) == []

    def test_all_is_well_where_the_tokens_are(self) -> None:
        assert found_by("once_fenced.W010") == []

    @override_settings(CELERY_ONCE_FENCED={})
    def test_a_project_without_settings_hears_of_that_alone(self) -> None:
        with override_settings(DATABASE_ROUTERS=[ToOther()]):
            assert found_by("once_fenced.W010") == []


def test_the_abstract_model_is_no_model() -> None:
    assert FencedModel._meta.abstract
