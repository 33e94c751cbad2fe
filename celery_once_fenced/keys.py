"""From a call to the key that identifies it (rules K1 to K5).

A task's ``KeyRecipe`` is compiled once; ``derive_call`` binds a call to the signature, encodes the values
that matter and hashes them.  The digest covers encoding version, scope, template and typed values, never
rendered text: ``"{a}:{b}"`` with ``x:y`` and ``z`` is not ``x`` and ``y:z``.  The digest decides everywhere;
the text beside it is for people.

The same call gives the same key wherever it is derived: by a producer from the caller's objects, and by a
worker from the decoded message (``send_task``, another language, an old message).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from celery_once_fenced.calls import CallPlan
from celery_once_fenced.encoding import UnencodableError, encode, encode_value, scalars
from celery_once_fenced.errors import ConfigError, KeyDerivationError
from celery_once_fenced.templates import Template, check_resource, render_resource
from celery_once_fenced.wording import did_you_mean, readable, safe, shorten

__all__ = [
    "CallPlan",
    "Derived",
    "Key",
    "KeyRecipe",
    "KeySpec",
    "KeyText",
    "ResourceSpec",
    "default_resource",
    "encode",
    "new_id",
    "operation_digest",
    "render_resource",
]

Arguments = Mapping[str, object]
KeySpec = None | tuple[str, ...] | str | Callable[[Arguments], str | None]
ResourceSpec = None | str | Callable[[Arguments], str]
KeyText = Literal["plain", "hash"]
T = TypeVar("T")

VERSION = b"once-1"
"""Version of the encoding.  A change of it changes every key, so that no old key is ever compared with a new
one."""
MAX_TEXT = 255
MAX_SCOPE = 200
"""Characters of the scope in the readable text; the digest takes all of it."""


@dataclass(frozen=True, slots=True)
class Key:
    """Identity of one logical operation."""

    digest: str
    """64 hexadecimal characters: what decides."""
    text: str
    """For people, at most 255 safe characters; a digest too where personal data must not be stored (K5)."""


class Derived(NamedTuple):
    """What one binding of a call yields."""

    key: Key | None
    """None: the key function said that this call is not guarded."""
    fingerprint: str | None
    """64 hexadecimal characters over the fingerprint arguments; None: off, or the call is not guarded."""
    arguments: Arguments
    """All arguments by name, defaults applied."""


class KeyRecipe:
    """How the keys of one task are derived.  Made once per task, then only read: threads share it.

    Args:
        plan: The task's signature, ``CallPlan.of(task.run, task.name)``.
        scope: First part of the key; None: the task's name.
        key: None = all arguments; names (``()`` = the task alone); format string; function of the arguments.
        fingerprint: None = all arguments; names; ``()`` = off, as in the efficiency tier.
        resource: None = the key; format string; function of the arguments.
        json: Whether the task's serializer is JSON.
        key_text: ``"hash"`` keeps the values of arguments out of the readable text (K5).
        required: The key function may not answer None: the correctness tier never runs unguarded (E20).

    Raises:
        ConfigError: an option names something that is no argument of the task.
    """

    def __init__(
        self,
        plan: CallPlan,
        *,
        scope: str | None = None,
        key: KeySpec = None,
        fingerprint: Sequence[str] | None = None,
        resource: ResourceSpec = None,
        json: bool = True,
        key_text: KeyText = "plain",
        required: bool = False,
    ) -> None:
        self.plan = plan
        self.scope = plan.task if scope is None else scope
        self._json = json
        self._scalars = scalars(json)
        self._hashed_text = key_text == "hash"
        self._required = required
        self._function = key if callable(key) else None
        self._template = _template(plan, "key", key) if isinstance(key, str) else None
        self._shown = _names(
            plan, "key", self._template.names if self._template else () if callable(key) else key
        )
        self._keyed = tuple(sorted(self._shown))
        self._text = ",".join(f"{name}=%s" for name in self._shown)
        self._fingerprinted = tuple(sorted(_names(plan, "fingerprint", fingerprint)))
        self._needed = tuple(dict.fromkeys(self._keyed + self._fingerprinted))
        self._resource = _template(plan, "resource", resource) if isinstance(resource, str) else resource
        kind = ("template", self._template.text) if self._template else ("names",)
        self._values_prefix = _prefix("key", self.scope, *kind, *self._keyed)
        self._given_prefix = _prefix("key", self.scope, "text")
        self._fingerprint_prefix = _prefix("fingerprint", *self._fingerprinted)
        self._shown_scope = shorten(safe(self.scope), MAX_SCOPE)

    def derive_call(
        self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, override: str | None = None
    ) -> Derived:
        """Key, fingerprint and bound arguments of one call.

        ``override`` is the ``once_key="…"`` of this call: it stands, under the same scope, for what a key
        function would have answered.

        Raises:
            KeyDerivationError: a ``TypeError``: a wrong call, an argument that cannot be part of a key, or a key
            function that raised, with its error as the cause.
        """
        arguments = self.plan.bind(args, kwargs)
        if override is None and self._function is None:
            encoded = self._encoded(self._needed, arguments)
            # Without fingerprint what is needed is what is keyed, in its order.
            parts = [encoded[n] for n in self._keyed] if self._fingerprinted else encoded.values()
            key = self._key(self._values_prefix, parts, self._body, arguments)
            return Derived(key, self._fingerprint(encoded), arguments)
        given = override
        if override is None and self._function is not None:
            given = self._answer("key", self._function, arguments)
        if given is None:
            return self._unguarded(arguments)
        key = self._key(self._given_prefix, [self._given(given)], safe, given)
        return Derived(key, self._fingerprint(self._encoded(self._fingerprinted, arguments)), arguments)

    def derive(
        self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, override: str | None = None
    ) -> Key | None:
        """The key alone; None: not guarded."""
        return self.derive_call(args, kwargs, override).key

    def fingerprint(self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> str | None:
        """The fingerprint alone; None: off."""
        return self._fingerprint(self._encoded(self._fingerprinted, self.plan.bind(args, kwargs)))

    def resource(self, key: Key, arguments: Arguments) -> str:
        """What the fence protects in this call: at most 255 characters.

        Raises:
            KeyDerivationError: an argument of another type than ``int``, ``str`` and ``UUID``, a text too long, or
            a function that raised.
        """
        if self._resource is None:
            return default_resource(key)
        if isinstance(self._resource, Template):
            return render_resource(self._resource, arguments, task=self.plan.task)
        return check_resource(self._answer("resource", self._resource, arguments), task=self.plan.task)

    # --- parts of a derivation ------------------------------------------------------------------------------

    def _answer(self, option: str, function: Callable[[Arguments], T], arguments: Arguments) -> T:
        """What a function of the project's says.  Raised bare, its error would look like one of this package."""
        try:
            return function(arguments)
        except Exception as error:
            name = getattr(function, "__qualname__", repr(function))
            problem = f"the {option} function {name} raised {type(error).__name__}: {error}"
            raise KeyDerivationError(self.plan.task, problem) from error

    def _encoded(self, names: tuple[str, ...], arguments: Arguments) -> dict[str, bytes]:
        exact, json = self._scalars, self._json
        try:
            return {name: exact[type(value := arguments[name])](value) for name in names}
        except KeyError:  # a container, an object or a subclass
            pass
        try:
            return {name: encode_value(arguments[name], json) for name in names}
        except UnencodableError:
            return {name: self._encode(name, arguments[name]) for name in names}

    def _encode(self, name: str, value: object) -> bytes:
        try:
            return encode(value, json=self._json, path=name)
        except UnencodableError as error:
            # A default such as ``frozenset()`` never travels in a message: being left out identifies it.
            if name in self.plan.defaults and value is self.plan.defaults[name]:
                return b"?"
            raise KeyDerivationError(self.plan.task, str(error)) from None

    def _key(self, prefix: bytes, parts: Iterable[bytes], body: Callable[[Any], str], source: object) -> Key:
        digest = _sha256(prefix, parts)
        text = digest[:16] if self._hashed_text else body(source)
        return Key(digest, shorten(f"{self._shown_scope}:{text}" if text else self._shown_scope, MAX_TEXT))

    def _fingerprint(self, encoded: Mapping[str, bytes]) -> str | None:
        if not self._fingerprinted:
            return None
        return _sha256(self._fingerprint_prefix, [encoded[name] for name in self._fingerprinted])

    def _body(self, arguments: Arguments) -> str:
        if self._template is None:
            return self._text % tuple([readable(arguments[name]) for name in self._shown])
        return safe(self._template.fill({name: readable(arguments[name]) for name in self._shown}))

    def _given(self, text: object) -> bytes:
        if not isinstance(text, str) or not text:
            source = "once_key" if self._function is None else "once_key, or what the key function returns,"
            raise KeyDerivationError(
                self.plan.task, f"{source} must be text that is not empty, not {text!r:.100}"
            )
        return encode(text, json=self._json, path="once_key")

    def _unguarded(self, arguments: Arguments) -> Derived:
        if self._required:
            raise KeyDerivationError(
                self.plan.task,
                "the key function returned None, but the correctness tier never runs unguarded; return text",
            )
        return Derived(None, None, arguments)


def default_resource(key: Key) -> str:
    """The resource of a task without ``Once.resource``: its key, as text that is unique.

    The readable key comes first, up to 190 characters of it, and then ``#`` and the digest, which makes it
    unique: two keys may read alike.  At most 255 characters.
    """
    return f"{shorten(key.text, 190)}#{key.digest}"


def operation_digest(key_digest: str, run_id: str) -> bytes:
    """The ledger's 32-byte digest under ``replay_for=0``, where each call is its own operation (L11)."""
    return hashlib.sha256(bytes.fromhex(key_digest) + run_id.encode("utf-8", "surrogatepass")).digest()


def new_id() -> str:
    """A random 128-bit id, 32 hexadecimal characters: for holders and deliveries (E1)."""
    return os.urandom(16).hex()


# --- declaration --------------------------------------------------------------------------------------------


def _names(plan: CallPlan, option: str, names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return plan.names
    for name in names:
        if name not in plan.names:
            known = ", ".join(plan.names) or "none"
            raise ConfigError(
                f"{option} of {plan.task} names {name!r}, which is no argument of it (there are: {known})"
                + did_you_mean(name, plan.names)
            )
    return tuple(dict.fromkeys(names))


def _template(plan: CallPlan, option: str, text: str) -> Template:
    template = Template.parse(text, option=option)
    if text in plan.names:
        raise ConfigError(
            f"{option}={text!r} of {plan.task} is the same text for every call; "
            f"write {'{' + text + '}'!r} for the value of the argument"
        )
    _names(plan, option, template.names)
    return template


def _prefix(*texts: str) -> bytes:
    """What does not depend on the call: every text with its length, so that none runs into the next."""
    data = [text.encode("utf-8", "surrogatepass") for text in texts]
    return b"%b %d " % (VERSION, len(data)) + b"".join(b"%d:%b" % (len(part), part) for part in data)


def _sha256(prefix: bytes, parts: Iterable[bytes]) -> str:
    return hashlib.sha256(prefix + b"".join(parts)).hexdigest()
