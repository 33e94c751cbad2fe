-- Force release: a person frees the fence of exactly the holder they were shown.  Returns the new token, or NULL when
-- another has it by now, or nobody, or when its row stays locked.
--
-- The token is raised and the holder's session ended, so that it can write no more, wherever it hangs (C9).  Its
-- ledger entry stays running: the next claim takes it over, or its own abandon makes it retryable.
create or replace function once_fenced_force_release_v1(
  p_resource text, p_holder text, p_actor text, p_reason text
) returns bigint language plpgsql set search_path from current as $$
declare
  f once_fenced_fence;
  higher bigint;
begin
  for tries in 1..20 loop
    select * into f from once_fenced_fence where resource = p_resource;
    if f.holder is distinct from p_holder then return null; end if;
    select * into f from once_fenced_fence where resource = p_resource for no key update skip locked;
    exit when found;
    perform once_fenced_evict_v1(p_holder), pg_sleep(least(0.005 * tries, 0.05));
  end loop;
  if f.holder is distinct from p_holder then return null; end if;
  perform once_fenced_durable_v1();
  higher := once_fenced_token_v1(f.token);
  update once_fenced_fence set token = higher, holder = null, expires_at = null where resource = p_resource;
  perform once_fenced_evict_v1(p_holder);
  insert into once_fenced_event (kind, resource, key_digest, task_name, token, old_key_digest, old_task_id, old_holder,
                                 old_worker, old_token, actor, detail)
  values ('fence.force_released', p_resource, f.key_digest, f.task_name, higher, f.key_digest, f.task_id, f.holder,
          f.worker, f.token, p_actor, p_reason);
  return higher;
end $$;
