-- Complete: last statement of the body's transaction; its COMMIT makes the writes and the outcome durable together.
-- running -> succeeded, and the fence is freed.  It raises, and then everything rolls back:
--
--   OF001  fenced off: fence or entry have another token, holder, attempt or state by now (C6, L1)
--   OF002  the transaction is not the one begin opened: the body ended it
--   OF003  an effect of the entry has an unknown outcome; its name is the error's DETAIL (L4)
--
-- The entry answers later calls for p_replay seconds, and its own run for at least p_retention.
--
-- The fence row's lock, held to COMMIT, is the fence: whoever takes over waits for it or evicts us.  A lapsed lease
-- that nobody took over completes: its token is still the highest.
create or replace function once_fenced_complete_v1(
  p_digest bytea, p_resource text, p_token bigint, p_holder text, p_attempt integer,
  p_result text, p_omitted text, p_replay double precision, p_retention double precision
) returns void language plpgsql set search_path from current as $$
declare
  unknown text;
begin
  if current_setting('once_fenced.holder', true) is distinct from p_holder then
    raise exception 'the body ended the transaction it was given' using errcode = 'OF002';
  end if;
  update once_fenced_fence set holder = null, expires_at = null
   where resource = p_resource and token = p_token and holder = p_holder;
  if not found then
    raise exception 'fenced off: token % has been superseded', p_token using errcode = 'OF001';
  end if;
  select name into unknown from once_fenced_effect
   where key_digest = p_digest and state = 'started' order by started_at limit 1;
  if found then
    raise exception 'an effect of this operation has an unknown outcome' using errcode = 'OF003', detail = unknown;
  end if;
  update once_fenced_ledger
     set state = 'succeeded', result = p_result, result_omitted = p_omitted, finished_at = clock_timestamp(),
         replay_until = clock_timestamp() + make_interval(secs => p_replay),
         retain_until = clock_timestamp() + make_interval(secs => greatest(p_replay, p_retention))
   where key_digest = p_digest and state = 'running' and attempt = p_attempt and holder = p_holder;
  if not found then
    raise exception 'fenced off: the entry is not of attempt % any more', p_attempt using errcode = 'OF001';
  end if;
  perform once_fenced_durable_v1();
end $$;
