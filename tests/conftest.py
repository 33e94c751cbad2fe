"""Fixtures for every test; what they do stands in tests/fixtures."""

# django_project sets Django up, which must come before any test module imports a model.
pytest_plugins = [
    "tests.fixtures.django_project",
    "tests.fixtures.fencing",
    "tests.fixtures.proxy",
    "tests.fixtures.redis_servers",
    "tests.fixtures.servers",
]
