-- Forget: a person lets a finished or retryable key run again from the start; its entry and effects are deleted.
-- Never a running one, never one in doubt (that is resolved).  Who and why go into the event table.
create or replace function once_fenced_forget_v1(p_digest bytea, p_actor text, p_reason text) returns boolean
language plpgsql set search_path from current as $$
declare
  l once_fenced_ledger;
begin
  perform once_fenced_durable_v1();
  delete from once_fenced_ledger
   where key_digest = p_digest and state in ('succeeded', 'failed', 'retryable') returning * into l;
  if not found then return false; end if;
  insert into once_fenced_event (kind, resource, key_digest, task_name, task_id, token, actor, detail)
  values ('ledger.forgotten', l.resource, p_digest, l.task_name, l.task_id, l.token, p_actor,
          json_build_object('state', l.state, 'reason', p_reason)::text);
  return true;
end $$;
