"""Negative controls: each rule is broken in a script, and the sentence about it must be found false.

The broken variants are those that people use: plain DEL at the end, release and renewal without compare, a
lost reply that counts as a refusal, renewal by SET, identity by task id.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import pytest
import redis

from celery_once_fenced.stores.redis import RedisLeaseStore
from celery_once_fenced.stores.redis_link import Script, script
from example_project.servers import Servers
from tests.conformance import test_lease_order as order
from tests.conformance import test_lease_stores as sentences
from tests.conformance.lease_bench import Bench, redis_bench

Sentence = Callable[[Bench], None]


@dataclass(frozen=True)
class Fault:
    script: str
    right: str
    wrong: str
    found_by: tuple[Sentence, ...]


SWEEP = """  if not limit and clock[2] % 8 ~= 0 then
    return
  end
  local over = redis.pcall('ZRANGEBYSCORE', index, '-inf', now, 'LIMIT', 0, limit or 64)
  for _, entry in ipairs(over) do
    local slot, name, task = parts(entry)
    local hold = slot and occupant(slot, name)
"""
"""How every script begins to sweep, one call in eight."""

FAULTS = {
    "plain_del_at_the_end": Fault(
        "end",
        "r ~= nil and r.holder == holder",
        "r ~= nil",
        (
            sentences.test_late_finisher_does_not_free_the_next_holder,
            sentences.test_what_acquired_nothing_frees_nothing,
            sentences.test_end_twice_is_once,
        ),
    ),
    "end_identified_by_task_id": Fault(
        "end",
        "r.holder == holder",
        "r.task_id == task_id",
        (sentences.test_what_acquired_nothing_frees_nothing,),
    ),
    "no_mark_from_a_late_finisher": Fault(
        "end", "if mark > 0", "if ours and mark > 0", (sentences.test_mark_is_left_by_a_late_finisher_too,)
    ),
    "requeue_overwrites_q": Fault(
        "end", "if not occupant('q', digest) then", "do", (sentences.test_requeue_leaves_the_q_of_another,)
    ),
    "release_without_compare": Fault(
        "release",
        "hold ~= nil and hold.holder == holder",
        "hold ~= nil",
        (sentences.test_release_compares_the_holder,),
    ),
    "release_by_a_person_is_a_loss": Fault(
        "end",
        "elseif not freed and redis.call('EXISTS', bucket .. 'freed:' .. holder) == 0 then",
        "else",
        (
            sentences.test_release_by_a_person_is_counted_and_is_no_loss,
            sentences.test_release_by_a_person_is_no_loss_though_the_next_one_runs,
            sentences.test_mark_of_a_release_lasts_as_long_as_its_lease_would_have,
        ),
    ),
    "every_release_is_by_hand": Fault(
        "release", "if by_hand and", "if", (sentences.test_release_that_nobody_decided_is_a_loss,)
    ),
    "release_identified_by_delivery": Fault(
        "release",
        "hold.holder == holder",
        "hold.delivery == holder",
        (sentences.test_release_compares_the_holder,),
    ),
    "lost_reply_of_enqueue_is_a_refusal": Fault(
        "enqueue",
        "q ~= nil and q.delivery == delivery",
        "false",
        (sentences.test_lost_reply_of_enqueue_is_no_refusal,),
    ),
    "enqueue_identified_by_task_id": Fault(
        "enqueue",
        "q.delivery == delivery",
        "q.task_id == task_id",
        (sentences.test_same_task_id_in_another_delivery_is_a_duplicate,),
    ),
    "retry_meets_its_own_lock": Fault(
        "enqueue",
        "q.task_id == task_id and",
        "false and",
        (sentences.test_retry_takes_the_q_of_its_own_task,),
    ),
    "retry_takes_anybodys_q": Fault(
        "enqueue",
        "(not q or (q.task_id == task_id and task_id ~= ''))",
        "true",
        (sentences.test_retry_leaves_the_q_of_another_task_and_is_not_refused,),
    ),
    "deferral_takes_the_key": Fault(
        "defer",
        "    if mine and not window",
        "    occupy('q', digest, digest, task, ttl, delivery .. '||1||')\n    if mine and not window",
        (
            sentences.test_deferral_of_another_delivery_moves_nothing,
            sentences.test_deferral_takes_no_free_key,
        ),
    ),
    "window_slides": Fault(
        "enqueue",
        "if not window and left(q)",
        "if left(q)",
        (sentences.test_window_is_as_long_as_the_first_call_said,),
    ),
    "lost_reply_of_start_is_a_refusal": Fault(
        "start",
        "r and r.holder == holder",
        "false",
        (sentences.test_lost_reply_of_start_is_granted_and_extended,),
    ),
    "start_identified_by_task_id": Fault(
        "start",
        "r and r.holder == holder",
        "r and r.task_id == task_id",
        (
            sentences.test_retry_waits_for_its_predecessor_then_runs,
            sentences.test_redelivery_meets_its_twin_and_waits_for_its_lease,
        ),
    ),
    "start_identified_by_delivery": Fault(
        "start",
        "r and r.holder == holder",
        "r and r.delivery == delivery",
        (sentences.test_redelivery_meets_its_twin_and_waits_for_its_lease,),
    ),
    "twin_identified_by_task_id": Fault(
        "start",
        "r.delivery == delivery and",
        "r.task_id == task_id and",
        (sentences.test_retry_waits_for_its_predecessor_then_runs,),
    ),
    "start_frees_any_q": Fault(
        "start",
        "q.delivery == delivery or (",
        "true or (",
        (sentences.test_dropped_redelivery_frees_its_leftover_q_and_no_others,),
    ),
    "start_frees_no_q_but_its_deliverys": Fault(
        "start",
        "also_of_the_task and same_task(q)",
        "false",
        (sentences.test_retry_that_was_published_twice_takes_over_the_q_of_the_other,),
    ),
    "tombstone_named_by_task_id": Fault(
        "start",
        "bucket .. 'done:' .. delivery",
        "bucket .. 'done:d' .. 1",
        (sentences.test_retry_with_the_same_task_id_is_no_redelivery,),
    ),
    "no_ending_mark": Fault(
        "start",
        "redelivery and redis.call('PTTL'",
        "false and redis.call('PTTL'",
        (sentences.test_redelivery_between_end_and_settle_waits_for_the_mark,),
    ),
    "no_tombstone": Fault(
        "settle", "if window > 0", "if false", (sentences.test_redelivery_after_settle_is_dropped,)
    ),
    "renewal_by_set": Fault(
        "renew",
        "  if ours then\n",
        "  ours = redis.call('EXISTS', key) == 0 or ours\n"
        "  if ours then\n"
        "    redis.call('SET', key, ARGV[i + 2] .. '|||0|||')\n",
        (sentences.test_lapsed_lease_is_never_made_again,),
    ),
    "renewal_without_compare": Fault(
        "renew",
        "is_of(ARGV[i + 2], redis.pcall('GET', key))",
        "redis.call('EXISTS', key) == 1",
        (sentences.test_zombie_does_not_renew_its_successors_lease,),
    ),
    "older_runs_after_newer": Fault(
        "start",
        "local by = newer()",
        "local by = nil",
        (
            order.test_older_message_is_superseded_by_a_newer_queued_one,
            order.test_older_message_is_superseded_by_a_newer_started_one,
            order.test_retry_is_superseded_like_its_call,
        ),
    ),
    "queued_call_supersedes_before_it_is_published": Fault(
        "start",
        "if not age and not has('d') then",
        "if false then",
        (order.test_retry_waits_for_a_newer_queued_call_which_may_never_be_published,),
    ),
    "unconfirmed_replacement_supersedes": Fault(
        "start",
        "elseif not age then",
        "elseif true then",
        (order.test_older_message_waits_while_a_replacement_is_not_confirmed_then_runs,),
    ),
    "redelivery_of_what_was_started_is_superseded": Fault(
        "start",
        "started.delivery == delivery",
        "false",
        (order.test_started_message_is_not_superseded_by_its_redelivery_being_older,),
    ),
    "retry_supersedes_itself": Fault(
        "start",
        "not same_task(q) and q.seq",
        "q.seq",
        (order.test_retry_is_not_superseded_by_a_q_of_its_own_task,),
    ),
    "failed_publish_frees_q": Fault(
        "confirm",
        "if was and ms > 0 then",
        "if false then",
        (
            order.test_replacement_that_was_not_published_gives_q_back,
            order.test_what_two_unconfirmed_replacements_displaced_is_not_lost,
        ),
    ),
    "failed_publish_restores_the_unconfirmed": Fault(
        "enqueue",
        "if aside and aside.delivery == q.delivery then",
        "if false then",
        (order.test_what_two_unconfirmed_replacements_displaced_is_not_lost,),
    ),
    "anybody_confirms": Fault(
        "confirm",
        "aside ~= nil and aside.delivery == delivery",
        "aside ~= nil",
        (order.test_confirmation_of_another_moves_nothing,),
    ),
    "numbers_are_the_time": Fault(
        "enqueue",
        "math.max(tonumber(now_us), before + 1)",
        "tonumber(now_us)",
        (order.test_numbers_go_up_though_the_clock_goes_back,),
    ),
    "retry_gets_a_new_number": Fault(
        "enqueue",
        "if numbered and numbered ~= '' then",
        "if false then",
        (order.test_retry_is_superseded_like_its_call, order.test_retry_runs_where_nothing_newer_has_come),
    ),
    "kept_call_is_cleared_at_start": Fault(
        "start",
        "    kept, call = last_kept(digest)",
        "    kept, call = last_kept(digest)\n    redis.call('DEL', bucket .. 'next:' .. digest)",
        (order.test_kept_call_is_there_until_its_run_is_settled,),
    ),
    "settle_clears_any_kept_call": Fault(
        "settle",
        "(last_kept(digest)) == seq",
        "true",
        (order.test_settle_leaves_a_newer_kept_call,),
    ),
    "awaited_call_is_kept": Fault(
        "enqueue",
        "if mode == 'awaited' then",
        "if false then",
        (order.test_awaited_call_is_numbered_and_not_kept,),
    ),
    "holder_of_q_overflows": Fault(
        "defer", "and not mine and type", "and type", (order.test_holder_of_q_may_always_wait,)
    ),
    "waiter_overflows_itself": Fault(
        "defer",
        "and type(known) ~= 'string'",
        "",
        (order.test_one_waiter_too_many_overflows,),
    ),
    "waiters_stay_in_line": Fault(
        "start", "if waited ~= '' and not stays", "if false", (order.test_waiter_that_runs_leaves_the_line,)
    ),
    "waiters_always_leave_the_line": Fault(
        "start",
        "if waited ~= '' and not stays",
        "if waited ~= ''",
        (order.test_waiter_that_meets_another_holder_stays_in_the_line,),
    ),
    "lost_waiters_are_believed_for_ever": Fault(
        "defer",
        "redis.pcall('ZREMRANGEBYSCORE', waiting, '-inf', now)",
        "redis.pcall('PERSIST', waiting)",
        (order.test_waiter_that_never_comes_back_is_forgotten,),
    ),
    "refusals_are_counted_for_ever": Fault(
        "start",
        "redis.pcall('DEL', bucket .. 'streak:' .. digest)",
        "now = now",
        (order.test_refusals_in_a_row_are_counted_until_the_key_runs,),
    ),
    "rush_is_a_warning": Fault(
        "enqueue",
        " or age < math.max(patience, longest)",
        "",
        (
            order.test_rush_on_a_key_that_runs_as_it_should_is_no_warning,
            order.test_run_that_takes_as_long_as_runs_do_is_no_wonder,
        ),
    ),
    "unseen_expiry_is_forgotten": Fault(
        "start",
        SWEEP,
        SWEEP[SWEEP.index("  local over") :].replace("occupant(slot, name)", "{ key = bucket, task = task }"),
        (sentences.test_expiry_is_counted_once_for_the_task_that_lapsed,),
    ),
}

CONTROLS = [
    pytest.param(fault, sentence, id=f"{name}-{sentence.__name__.removeprefix('test_')}")
    for name, fault in FAULTS.items()
    for sentence in fault.found_by
]


def broken(fault: Fault) -> type[RedisLeaseStore]:
    right = script(fault.script).source
    assert right.count(fault.right) == 1
    wrong = Script.of(right.replace(fault.right, fault.wrong))

    class Broken(RedisLeaseStore):
        def _script(self, name: str) -> Script:
            return wrong if name == fault.script else super()._script(name)

    return Broken


@pytest.mark.parametrize(("fault", "sentence"), CONTROLS)
def test_broken_store_is_found_out(
    servers: Servers, namespace: str, fault: Fault, sentence: Sentence
) -> None:
    kind = broken(fault)
    with redis.Redis.from_url(servers.redis_url) as client:
        bench = redis_bench(client, servers.redis_url, namespace, kind)
        with closing(bench.store), pytest.raises(AssertionError):
            sentence(bench)
