-- Resolve: a person decides an entry in doubt: in_doubt -> succeeded | failed | retryable (run again).
--
-- Compared with the state only: whoever is shown an entry in doubt may decide it, the first one does.  Answers done =
-- false where it is in doubt no more, and then changes nothing.
--
-- retryable releases its effects of unknown outcome: the next attempt calls again, with the same downstream key, so
-- that the provider can recognise the call.  The stored message goes into the outbox, taken by the caller, who publishes
-- it now; should that fail, a sweep does (L9, L14).  One of another app's namespace is left to that app's sweep.
-- A late receipt of the old holder still counts for a released effect (L4).  Who and why go into the event table.
create or replace function once_fenced_resolve_v1(
  p_digest bytea, p_state text, p_result text, p_error text, p_retention double precision, p_actor text, p_reason text,
  p_namespace text, out done boolean, out message text, out task_id text
) language plpgsql set search_path from current as $$
#variable_conflict use_column
declare
  l once_fenced_ledger;
begin
  perform once_fenced_durable_v1();
  select * into l from once_fenced_ledger where key_digest = p_digest and state = 'in_doubt' for no key update;
  done := found;
  if not done then return; end if;
  update once_fenced_ledger
     set state = p_state, result = p_result, error = p_error, message = null,
         finished_at = case when p_state <> 'retryable' then clock_timestamp() end,
         retain_until = clock_timestamp() + make_interval(secs => p_retention)
   where key_digest = p_digest;
  if p_state = 'retryable' then
    if l.namespace = p_namespace then
      message := l.message;
      task_id := l.task_id;
    end if;
    if l.message is not null then
      insert into once_fenced_outbox (namespace, key_digest, task_id, message, taken_at)
      values (l.namespace, p_digest, l.task_id, l.message, case when message is not null then clock_timestamp() end);
    end if;
    update once_fenced_effect set state = 'released' where key_digest = p_digest and state = 'started';
  end if;
  insert into once_fenced_event (kind, resource, key_digest, task_name, task_id, token, old_holder, actor, detail)
  values ('ledger.resolved', l.resource, p_digest, l.task_name, l.task_id, l.token, l.holder, p_actor,
          json_build_object('state', p_state, 'reason', p_reason)::text);
end $$;
