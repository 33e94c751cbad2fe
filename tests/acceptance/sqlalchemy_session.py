"""The sessions of a project on SQLAlchemy, as the setting ``transaction`` names them: ``…sqlalchemy_session.begin``."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from functools import cache

from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from tests.acceptance.app import SETTINGS


def begin() -> AbstractContextManager[Session]:
    """A session in a transaction: committed at the end of the block, rolled back on an error."""
    return _sessions(os.getpid()).begin()


@cache
def _sessions(_pid: int) -> sessionmaker[Session]:
    """One pool for each process: a child must not use its parent's connections."""
    url: str = json.loads(os.environ[SETTINGS])["once_fenced"]["postgres_url"]
    return sessionmaker(create_engine(url.replace("postgresql://", "postgresql+psycopg://")))
