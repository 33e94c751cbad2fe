"""Every error of the package, in one hierarchy.

Errors take positional arguments of primitive types and hand them to ``Exception`` unchanged, so that they survive
pickle and Celery's JSON result path, both of which rebuild an error as ``cls(*args)`` (rule W8).  The message is
made when it is asked for.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BusyError",
    "ConfigError",
    "DeferralFailedError",
    "DeferralOverflowError",
    "DuplicateError",
    "ExhaustedError",
    "FenceMismatchError",
    "FencedOffError",
    "GrantError",
    "InDoubtError",
    "KeyDerivationError",
    "KeyReusedError",
    "LeaseLostError",
    "OnceError",
    "OutcomeUnknownError",
    "RecordedError",
    "StoreUnavailableError",
]


class OnceError(Exception):
    """Root of all errors raised by celery_once_fenced."""

    template: ClassVar[str] = "{0}"

    def __str__(self) -> str:
        return self.template.format(*self.args)


class ConfigError(OnceError, ValueError):
    """A setting or an option of ``Once`` is wrong.  Raised at declaration or start-up, naming value and remedy."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)


class KeyDerivationError(OnceError, TypeError):
    """The arguments of one call cannot be made into a key.  Raised at call time, naming the argument."""

    def __init__(self, task: str, problem: str) -> None:
        super().__init__(task, problem)

    template = "cannot derive a key for a call of {0}: {1}"


class StoreUnavailableError(OnceError):
    """Redis or Postgres did not answer within its timeout, or answered with an error of its own."""

    def __init__(self, store: str, problem: str) -> None:
        super().__init__(store, problem)

    template = "{0} is unavailable: {1}"


class DuplicateError(OnceError):
    """The key is held and the policy is ``raise`` (``on_duplicate`` when enqueuing, ``on_conflict`` in a worker).

    ``key`` is the readable key, ``task_id`` the task that holds it.
    """

    template = "{0} is held by task {1}"

    def __init__(self, key: str, task_id: str) -> None:
        super().__init__(key, task_id)
        self.key = key
        self.task_id = task_id


class BusyError(OnceError):
    """A lease or fence asked for outside a task was still held after ``wait`` seconds."""

    template = "{0} is held by another, for {1:.3g} s more unless it is renewed"

    def __init__(self, name: str, left: float) -> None:
        super().__init__(name, left)
        self.name = name
        self.left = left


class LeaseLostError(OnceError):
    """``grant.check()``: the lease can no longer be believed; another holder may be running."""

    template = "the lease on {0} was lost"

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class GrantError(OnceError):
    """A grant was used in a way that its tier or state does not allow."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)


class FencedOffError(OnceError):
    """Postgres refused the work of a stale holder: a higher token was issued for the resource.  All was rolled back."""

    template = "fenced off: token {1} for {0} has been superseded"

    def __init__(self, resource: str, token: int) -> None:
        super().__init__(resource, token)
        self.resource = resource
        self.token = token


class FenceMismatchError(OnceError):
    """A row fenced for one resource was written under a grant for another; their tokens cannot be compared."""

    template = "the row belongs to resource {0}, the grant is for {1}"

    def __init__(self, resource: str, granted: str) -> None:
        super().__init__(resource, granted)


class DeferralFailedError(OnceError):
    """A message that had to step aside could not be published again (D1); its task ends FAILURE, so it is not lost unseen."""

    template = "could not defer task {0}: {1}"

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(task_id, problem)


class DeferralOverflowError(OnceError):
    """More messages wait for one key than ``max_deferred`` allows (D3); this one's task ends FAILURE.

    ``key`` is the readable key, ``waiters`` how many are waiting.
    """

    template = "{0} has {1} messages waiting for it, as many as max_deferred allows"

    def __init__(self, key: str, waiters: int) -> None:
        super().__init__(key, waiters)
        self.key = key
        self.waiters = waiters


class KeyReusedError(OnceError):
    """An idempotency key was used again with other arguments, or for another resource (L2)."""

    template = "idempotency key {0} was already used by task {1} for another call"

    def __init__(self, key: str, task_id: str) -> None:
        super().__init__(key, task_id)
        self.key = key
        self.task_id = task_id


class InDoubtError(OnceError):
    """An effect of this key was started and its outcome is not known; a person or a policy decides (L14)."""

    template = "{0} is in doubt: effect {1!r} was started at {2} and its outcome is not known"

    def __init__(self, key: str, effect: str, since: str) -> None:
        super().__init__(key, effect, since)
        self.key = key
        self.effect = effect
        self.since = since


class OutcomeUnknownError(OnceError):
    """An effect's outcome is unknown and the task's policy is ``on_unknown="fail"``."""

    template = "the outcome of effect {1!r} of {0} is not known"

    def __init__(self, key: str, effect: str) -> None:
        super().__init__(key, effect)


class ExhaustedError(OnceError):
    """The key was taken over more than ``max_attempts`` times and is parked as failed (L1)."""

    template = "{0} was given up after {1} takeovers"

    def __init__(self, key: str, takeovers: int) -> None:
        super().__init__(key, takeovers)
        self.key = key
        self.takeovers = takeovers


class RecordedError(OnceError):
    """A finished key answers with the error it ended with, where its class is not among ``final_errors``."""

    template = "{0} ended with {1}: {2}"

    def __init__(self, key: str, error: str, message: str) -> None:
        super().__init__(key, error, message)
        self.key = key
        self.error = error
