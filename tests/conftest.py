"""Fixtures for every test; what they do stands in tests/fixtures."""

pytest_plugins = ["tests.fixtures.servers", "tests.fixtures.proxy"]
