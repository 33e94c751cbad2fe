-- The fence outside tasks: the same acquire, check and release, without a ledger entry.
--
--   acquire  granted (token) | busy (wait): as claim takes the fence, and as carefully (C1, C2, C9)
--   check    last statement of each transaction under the fence: OF001 when a newer token was issued, OF002 when the
--            transaction is not the one begin opened.  Locks the fence row until COMMIT, so that nobody can take over
--            in between (C6), and leaves it held
--   free     gives the fence back; false when it is another's by now
create or replace function once_fenced_acquire_v1(
  p_resource text, p_holder text, p_name text, p_worker text, p_lease double precision,
  out verdict text, out token bigint, out wait double precision
) language plpgsql set search_path from current as $$
#variable_conflict use_column
declare
  f once_fenced_fence;
  higher bigint;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'once_fenced_acquire needs READ COMMITTED, not %', current_setting('transaction_isolation')
      using errcode = 'OF004';
  end if;
  wait := once_fenced_lock_v1(p_resource, p_holder);
  if wait is not null then
    verdict := 'busy';
    return;
  end if;
  perform once_fenced_durable_v1();
  select * into f from once_fenced_fence where resource = p_resource;
  higher := once_fenced_token_v1(f.token);
  if f.holder <> p_holder then perform once_fenced_evict_v1(f.holder); end if;
  update once_fenced_fence
     set token = higher, holder = p_holder, key_digest = null, task_id = null, task_name = p_name, key = null,
         worker = p_worker, acquired_at = clock_timestamp(),
         expires_at = clock_timestamp() + make_interval(secs => p_lease)
   where resource = p_resource;
  if f.holder <> p_holder then
    insert into once_fenced_event (kind, resource, task_name, holder, worker, token,
                                   old_key_digest, old_task_id, old_holder, old_worker, old_token)
    values ('fence.taken_over', p_resource, p_name, p_holder, p_worker, higher,
            f.key_digest, f.task_id, f.holder, f.worker, f.token);
  end if;
  verdict := 'granted';
  token := higher;
end $$;

create or replace function once_fenced_check_v1(p_resource text, p_token bigint, p_holder text) returns void
language plpgsql set search_path from current as $$
begin
  if current_setting('once_fenced.holder', true) is distinct from p_holder then
    raise exception 'the body ended the transaction it was given' using errcode = 'OF002';
  end if;
  perform 1 from once_fenced_fence
    where resource = p_resource and token = p_token and holder = p_holder for no key update;
  if not found then
    raise exception 'fenced off: token % has been superseded', p_token using errcode = 'OF001';
  end if;
  perform once_fenced_durable_v1();
end $$;

create or replace function once_fenced_free_v1(p_resource text, p_token bigint, p_holder text) returns boolean
language plpgsql set search_path from current as $$
begin
  update once_fenced_fence set holder = null, expires_at = null
   where resource = p_resource and token = p_token and holder = p_holder;
  return found;
end $$;
