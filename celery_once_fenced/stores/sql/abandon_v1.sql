-- Abandon: the body did not end in a COMMIT that we know of.  What is true, and whose is it now (C13)?
--
--   succeeded            the COMMIT did happen, ours or another attempt's: here is the result
--   taken_over           the entry is another holder's (or was pruned or forgotten)
--   retryable | failed   what was asked for, now recorded (L3); retryable where the fence was not ours any more
--   in_doubt | failed    an effect was started and the policy is hold | fail; rerun and probe leave it retryable (L4).
--                        p_on_unknown = doubt: the probe could not know, so it is in doubt whatever the policy
--
-- Safe to repeat: a lost reply finds its own record.  The question can only be asked when our body's session can
-- commit no more: it is evicted first, wherever it hangs (a cut connection leaves a server session that may hold the
-- fence row, or user rows that the next attempt wants).  Fence before entry (C7), and only rows that are still ours: a
-- successor between complete and COMMIT has locked both, and is not waited for.  Should our own fence row stay locked,
-- OF006 is raised, nothing is changed and the caller asks again later.
-- fence_ours: no other token was issued since ours, by a takeover or by hand.
create or replace function once_fenced_abandon_v1(
  p_digest bytea, p_resource text, p_token bigint, p_holder text, p_attempt integer,
  p_state text, p_error text, p_on_unknown text, p_retention double precision, p_message text,
  out state text, out ours boolean, out fence_ours boolean, out task_id text, out result text, out omitted text,
  out error text, out effect text, out since text
) language plpgsql set search_path from current as $$
#variable_conflict use_column
declare
  l once_fenced_ledger;
  f once_fenced_fence;
  x once_fenced_effect;
  policy text;
  next_state text;
  problem text := p_error;
  tries integer := 0;
  locked boolean := false;
begin
  perform once_fenced_evict_v1(p_holder);
  loop
    select * into f from once_fenced_fence where resource = p_resource;
    fence_ours := coalesce(f.token = p_token, false);
    exit when locked or not fence_ours;
    perform 1 from once_fenced_fence where resource = p_resource for no key update skip locked;
    locked := found;
    if not locked then
      tries := tries + 1;
      if tries > 40 then
        raise exception 'the fence row stays locked by another session' using errcode = 'OF006';
      end if;
      if tries % 10 = 0 then perform once_fenced_evict_v1(p_holder); end if;
      perform pg_sleep(least(0.005 * tries, 0.05));
    end if;
  end loop;
  perform once_fenced_durable_v1();
  update once_fenced_fence set holder = null, expires_at = null
   where resource = p_resource and token = p_token and holder = p_holder;

  select * into l from once_fenced_ledger
   where key_digest = p_digest and holder = p_holder and attempt = p_attempt for no key update;
  ours := found;
  if not ours then select * into l from once_fenced_ledger where key_digest = p_digest; end if;
  task_id := l.task_id;
  select * into x from once_fenced_effect where key_digest = p_digest and state = 'started'
   order by case coalesce(on_unknown, p_on_unknown) when 'hold' then 1 when 'fail' then 2 else 3 end, started_at
   limit 1;
  effect := x.name;
  since := to_char(x.started_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"');
  if l.state = 'succeeded' or not ours then
    state := case when l.state = 'succeeded' then 'succeeded' else 'taken_over' end;
  elsif l.state <> 'running' then
    state := l.state;
  end if;
  if state is not null then
    result := l.result;
    omitted := l.result_omitted;
    error := l.error;
    return;
  end if;

  -- A final error of an attempt that had lost its fence may come of that: the work is done again (C13, L10).
  next_state := case when fence_ours then p_state else 'retryable' end;
  policy := case p_on_unknown when 'doubt' then 'hold' else coalesce(x.on_unknown, p_on_unknown) end;
  if effect is not null then
    next_state := case policy when 'hold' then 'in_doubt' when 'fail' then 'failed' else 'retryable' end;
    if policy = 'fail' then
      problem := json_build_object('type', 'celery_once_fenced.errors.OutcomeUnknownError',
                                   'message', format('the outcome of effect %s is not known', effect));
    end if;
  end if;
  update once_fenced_ledger
     set state = next_state, error = problem,
         message = case when next_state = 'in_doubt' then p_message end,
         finished_at = case when next_state = 'failed' then clock_timestamp() end,
         retain_until = case when next_state <> 'in_doubt' then clock_timestamp() + make_interval(secs => p_retention) end
   where key_digest = p_digest;
  state := next_state;
  error := problem;
end $$;
