"""What Celery's signals complete around the gate; connected when the task classes are imported.

``task_postrun`` settles once the result is out (E8), or frees what never reached the gate or its body (E8c).  ``task_revoked``
frees the queued hold of a call that will not run (W3).  ``before_task_publish`` moves ``once_key`` of a signature sent
by name into the header (E16).  When a worker or beat starts, the doctor looks at the set-up, and processes that run
tasks begin to sweep the outbox (L9).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from celery import current_app, signals, states
from celery.exceptions import Reject

from celery_once_fenced import doctor
from celery_once_fenced.delivery import enforce_limits
from celery_once_fenced.header import HEADER, Header
from celery_once_fenced.heartbeat import Round
from celery_once_fenced.runtime import runtime_of
from celery_once_fenced.stores import Settle
from celery_once_fenced.worker import Passage

if TYPE_CHECKING:
    from celery_once_fenced.tasks import SingletonTask

__all__: list[str] = []

SETTLED_STATES = frozenset({states.SUCCESS, states.FAILURE, states.RETRY, states.IGNORED, states.REJECTED})


def _on_postrun(task: Any = None, state: Any = None, retval: Any = None, **_: Any) -> None:
    """The result is out and the callbacks are published: settle (E8), or free what never reached the gate (E8c)."""
    request = task.request_stack.top if _is_guarded(task) else None
    if request is None or request.called_directly or request.is_eager:
        return
    passage: Passage | None = getattr(request, "once_passage", None)
    if passage is None or _is_lost(passage, state):
        _withdraw(task, Header.parse(getattr(request, HEADER, None)))
    elif passage.settles and (passage.returns or passage.seq) and _is_over(state, retval):
        _settle(task, passage, ended=state != states.RETRY)


def _is_lost(passage: Passage, state: Any) -> bool:
    """Cut off before its body, by a time limit for one; without a state its process is to end."""
    return not passage.entered and (state == states.FAILURE or (state is None and not passage.returns))


def _is_over(state: Any, retval: Any) -> bool:
    """Never without a state (cold shutdown gives the message back), never on a message given back (E8b).

    Celery says SUCCESS as soon as the body has returned; its process may be told to exit before the result is out.
    """
    if isinstance(retval, Reject) and retval.requeue:
        return False
    return state in SETTLED_STATES and (sys.exception() is None or isinstance(sys.exception(), Exception))


def _settle(task: Any, passage: Passage, *, ended: bool) -> None:
    """A call that was kept for this run is over with it, but not with a retry (E13b)."""
    blueprint = task.blueprint
    window = blueprint.runtime.redelivery_window(blueprint.policy.lease) if passage.returns else 0.0
    key, seq = passage.key, passage.seq if ended else 0
    if key is not None and (window > 0 or seq):
        blueprint.runtime.guard.settle(Settle(key, passage.delivery, window, seq, passage.waiting_since))


def _withdraw(task: SingletonTask, header: Header | None) -> None:
    if header is not None and header.key is not None:
        task.blueprint.runtime.admission.withdraw(header.key.digest, header.delivery)


def _on_revoked(sender: Any = None, request: Any = None, terminated: bool = False, **_: Any) -> None:
    """A call revoked or expired before it ran holds its key no longer (W3).  Runs in the parent process."""
    if _is_guarded(sender) and not terminated:
        _withdraw(sender, Header.parse(getattr(request, HEADER, None)))


def _on_before_publish(headers: dict[str, Any] | None = None, properties: Any = None, **_: Any) -> None:
    """A signature of a task this process does not know leaves ``once`` and ``once_key`` among the properties (E16)."""
    if not properties or headers is None or not ("once" in properties or "once_key" in properties):
        return
    bypass, once_key = properties.pop("once", True) is False, properties.pop("once_key", None)
    if (bypass or once_key) and HEADER not in headers:
        headers[HEADER] = Header(bypass=bypass, once_key=once_key).dump()


def _on_worker_setup(instance: Any = None, **_: Any) -> None:
    doctor.log_findings(instance.app)


def _on_beat_start(sender: Any = None, **_: Any) -> None:
    doctor.log_findings(sender.app)


def _on_worker_ready(sender: Any = None, **_: Any) -> None:
    """Pools without child processes sweep in their only one; a prefork parent never touches Postgres (W2)."""
    if type(sender.pool).__module__ != "celery.concurrency.prefork":
        _start_sweeping(sender.app)


def _start_sweeping(app: Any) -> None:
    if any(_is_guarded(task) and task.blueprint.policy.correctness for task in app.tasks.values()):
        here = runtime_of(app)
        Round("outbox", here.outbox_age, here.sweep).start()


def _on_process_init(**_: Any) -> None:
    enforce_limits()
    _start_sweeping(current_app._get_current_object())


def _is_guarded(task: Any) -> bool:
    return hasattr(task, "_blueprint") and hasattr(task, "once")


signals.task_postrun.connect(_on_postrun, weak=False, dispatch_uid="celery_once_fenced.postrun")
signals.task_revoked.connect(_on_revoked, weak=False, dispatch_uid="celery_once_fenced.revoked")
signals.before_task_publish.connect(_on_before_publish, weak=False, dispatch_uid="celery_once_fenced.publish")
signals.celeryd_after_setup.connect(_on_worker_setup, weak=False, dispatch_uid="celery_once_fenced.setup")
signals.beat_init.connect(_on_beat_start, weak=False, dispatch_uid="celery_once_fenced.beat")
signals.worker_ready.connect(_on_worker_ready, weak=False, dispatch_uid="celery_once_fenced.ready")
signals.worker_process_init.connect(_on_process_init, weak=False, dispatch_uid="celery_once_fenced.process")
