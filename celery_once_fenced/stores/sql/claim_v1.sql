-- Claim: may this delivery run its operation now?  One durable transaction of its own, READ COMMITTED (OF004).
--
--   granted       the fence is p_holder's under a new token, the entry is running under p_holder
--   completed     succeeded before: here is the result (replay)
--   failed_final  failed for good before: here is the error
--   busy          another holder's lease on the resource is live; same_key: for this very operation
--   key_reused    same key, other fingerprint; or other resource while the entry is not finished (L2)
--   in_doubt      an effect was started and nobody knows how it ended
--   exhausted     taken over too often: parked as failed (L1)
--
-- Answers that stand in the ledger take no lock and write nothing (but the message of an entry in doubt that has none,
-- so that it can run again: L14); a duplicate of a finished key costs one read.  All others hold fence, then ledger (C7).
-- Claiming again as the same holder (the reply was lost) is granted again: higher token (C1), same attempt.
-- A running entry of another holder whose fence is free or lapsed is taken over: attempt + 1, takeovers + 1.  The old
-- holder is evicted, and what it still sends finds a higher token.  Its effects of unknown outcome are decided here
-- for the policies hold and fail, with a bump, so that it can neither complete nor start another one (L4).
-- An entry past its retention counts as pruned: replay_for must not depend on when prune last ran.  One that answers
-- later calls no more still answers its own run, so that no redelivery runs again however short replay_for is.
create or replace function once_fenced_claim_v1(
  p_digest bytea, p_key text, p_scope text, p_task_name text, p_task_id text, p_fingerprint bytea, p_resource text,
  p_holder text, p_worker text, p_lease double precision, p_max_takeovers integer, p_on_unknown text,
  p_retention double precision, p_message text, p_run_id text, p_namespace text,
  out verdict text, out token bigint, out attempt integer, out takeovers integer, out result text, out omitted text,
  out error text, out task_id text, out same_key boolean, out effect text, out since text, out wait double precision
) language plpgsql set search_path from current as $$
#variable_conflict use_column
declare
  exhausted constant text :=
    '{"type": "celery_once_fenced.errors.ExhaustedError", "message": "given up after too many takeovers"}';
  l once_fenced_ledger;
  f once_fenced_fence;
  x once_fenced_effect;
  higher bigint;
  again bigint;
  policy text;
  problem text;
  mine boolean;
  known boolean;  -- there is an entry
  expired boolean := false;
  locked boolean := false;
  born boolean := false;  -- the fence row is new, and ours already
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'once_fenced_claim needs READ COMMITTED, not %', current_setting('transaction_isolation')
      using errcode = 'OF004';
  end if;

  -- 1. What the ledger says: first without any lock, then again under fence and entry.
  loop
    if locked then
      select * into l from once_fenced_ledger where key_digest = p_digest for no key update;
    else
      select * into l from once_fenced_ledger where key_digest = p_digest;
    end if;
    known := found;
    if known then
      expired := coalesce(l.state in ('succeeded', 'failed') and l.retain_until < clock_timestamp(), false)
        or coalesce(l.state = 'succeeded' and l.replay_until < clock_timestamp() and l.run_id <> p_run_id, false);
      verdict := case
        when expired then null
        when l.fingerprint <> p_fingerprint then 'key_reused'
        when l.state = 'succeeded' then 'completed'
        when l.state = 'failed' and l.error = exhausted then 'exhausted'
        when l.state = 'failed' then 'failed_final'
        when l.state = 'in_doubt' then 'in_doubt'
        when l.resource <> p_resource then 'key_reused'
      end;
    end if;
    exit when locked or verdict is not null;

    -- A resource without a row: the row is born as the grant leaves it.
    if not known and not exists (select 1 from once_fenced_fence where resource = p_resource) then
      higher := once_fenced_token_v1(0);
      insert into once_fenced_fence (resource, token, holder, key_digest, task_id, task_name, key, worker,
                                     acquired_at, expires_at)
      values (p_resource, higher, p_holder, p_digest, p_task_id, p_task_name, p_key, p_worker,
              clock_timestamp(), clock_timestamp() + make_interval(secs => p_lease))
      on conflict do nothing;
      born := found;
    end if;
    if born then  -- and ours: only now is it certain which floor an older row has left (C3)
      again := once_fenced_token_v1(0);
      if again <> higher then
        higher := again;
        update once_fenced_fence set token = higher where resource = p_resource;
      end if;
    else
      wait := once_fenced_lock_v1(p_resource, p_holder);
    end if;
    if wait is not null then
      select * into f from once_fenced_fence where resource = p_resource;
      verdict := 'busy';
      task_id := f.task_id;
      same_key := coalesce(f.key_digest = p_digest, false);
      return;
    end if;
    locked := true;
  end loop;
  if known and (verdict is null or verdict = 'in_doubt' or l.error like '%OutcomeUnknownError%') then
    select * into x from once_fenced_effect where key_digest = p_digest and state = 'started'
     order by case coalesce(on_unknown, p_on_unknown) when 'hold' then 1 when 'fail' then 2 else 3 end, started_at
     limit 1;
    effect := x.name;
    since := to_char(x.started_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"');
  end if;
  if verdict is not null then
    if born then
      update once_fenced_fence set holder = null, expires_at = null where resource = p_resource;
    end if;
    attempt := l.attempt;
    takeovers := l.takeovers;
    task_id := l.task_id;
    if verdict = 'in_doubt' and l.message is null and p_message is not null then
      update once_fenced_ledger set message = p_message, task_id = p_task_id, namespace = p_namespace
       where key_digest = p_digest and state = 'in_doubt' and message is null;
    end if;
    if verdict = 'completed' then token := l.token; result := l.result; omitted := l.result_omitted; end if;
    if verdict in ('failed_final', 'exhausted') then error := l.error; end if;
    return;
  end if;

  perform once_fenced_durable_v1();
  if not born then
    select * into f from once_fenced_fence where resource = p_resource;
    higher := once_fenced_token_v1(f.token);
    if f.holder <> p_holder then perform once_fenced_evict_v1(f.holder); end if;
  end if;
  if expired then
    delete from once_fenced_ledger where key_digest = p_digest;
    l := null;
  end if;
  mine := coalesce(l.state = 'running' and l.holder = p_holder, false);
  attempt := coalesce(l.attempt, 1);
  takeovers := coalesce(l.takeovers, 0);

  -- 2. Ends instead of a run.  An unknown outcome comes before too many takeovers: it must not be buried.
  if l.key_digest is not null and not mine then
    policy := case when effect is not null then coalesce(x.on_unknown, p_on_unknown) end;
    if policy = 'hold' then
      verdict := 'in_doubt';
    elsif policy = 'fail' then
      verdict := 'failed_final';
      error := json_build_object('type', 'celery_once_fenced.errors.OutcomeUnknownError',
                                 'message', format('the outcome of effect %s is not known', effect));
    elsif l.state = 'running' and l.takeovers >= p_max_takeovers then
      verdict := 'exhausted';
      error := exhausted;
    end if;
  end if;
  if verdict is not null then
    task_id := l.task_id;
    problem := error;
    update once_fenced_fence set token = higher, holder = null, expires_at = null where resource = p_resource;
    update once_fenced_ledger
       set holder = p_holder, error = problem,
           state = case verdict when 'in_doubt' then 'in_doubt' else 'failed' end,
           message = case verdict when 'in_doubt' then p_message end,
           task_id = case when verdict = 'in_doubt' and p_message is not null then p_task_id else task_id end,
           namespace = case when verdict = 'in_doubt' and p_message is not null then p_namespace else namespace end,
           finished_at = case when verdict <> 'in_doubt' then clock_timestamp() end,
           retain_until = case when verdict <> 'in_doubt' then clock_timestamp() + make_interval(secs => p_retention) end
     where key_digest = p_digest;
    insert into once_fenced_event (kind, resource, key_digest, task_name, token, old_key_digest, old_task_id,
                                   old_holder, old_worker, old_token, detail)
    values (case verdict when 'exhausted' then 'ledger.exhausted' else 'effect.interrupted' end,
            p_resource, p_digest, p_task_name, higher, p_digest, l.task_id,
            l.holder, case when f.holder = l.holder then f.worker end, l.token, effect);
    return;
  end if;

  -- 3. The grant.
  if not born then
    update once_fenced_fence
       set token = higher, holder = p_holder, key_digest = p_digest, task_id = p_task_id, task_name = p_task_name,
           key = p_key, worker = p_worker, acquired_at = clock_timestamp(),
           expires_at = clock_timestamp() + make_interval(secs => p_lease)
     where resource = p_resource;
  end if;
  if l.key_digest is null then
    insert into once_fenced_ledger (key_digest, key, scope, task_name, task_id, run_id, namespace, fingerprint, state,
                                    attempt, holder, resource, token)
    values (p_digest, p_key, p_scope, p_task_name, p_task_id, p_run_id, p_namespace, p_fingerprint, 'running',
            1, p_holder, p_resource, higher)
    on conflict do nothing;
    if not found then  -- same key for another resource, at the same moment
      update once_fenced_fence set holder = null, expires_at = null where resource = p_resource;
      verdict := 'key_reused';
      task_id := (select t.task_id from once_fenced_ledger t where t.key_digest = p_digest);
      return;
    end if;
  else
    update once_fenced_ledger
       set state = 'running', attempt = attempt + (not mine)::int,
           takeovers = takeovers + (state = 'running' and not mine)::int, holder = p_holder, token = higher,
           task_id = p_task_id, run_id = p_run_id, namespace = p_namespace, started_at = clock_timestamp(), error = null,
           message = null, finished_at = null,
           replay_until = null, retain_until = null
     where key_digest = p_digest
    returning once_fenced_ledger.attempt, once_fenced_ledger.takeovers into attempt, takeovers;
  end if;
  if f.holder <> p_holder then
    insert into once_fenced_event (kind, resource, key_digest, task_name, task_id, holder, worker, token,
                                   old_key_digest, old_task_id, old_holder, old_worker, old_token)
    values ('fence.taken_over', p_resource, p_digest, p_task_name, p_task_id, p_holder, p_worker, higher,
            f.key_digest, f.task_id, f.holder, f.worker, f.token);
  end if;
  verdict := 'granted';
  token := higher;
end $$;
