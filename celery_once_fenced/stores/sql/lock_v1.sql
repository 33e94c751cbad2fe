-- Lock the fence row of a resource for p_holder without ever waiting for it (C9).
--
-- Returns NULL: the row exists, is locked by this transaction, and is free, lapsed or p_holder's own.
-- Returns seconds: it is held by another for about that long.
--
-- The row is read unlocked first: live is an answer, and a body between complete and COMMIT still looks live then.
-- Locked and not live is a neighbour in flight (wait a little) or a lapsed holder frozen between complete and COMMIT
-- (evict it, then try again).  Only the holder that was *seen* lapsed is evicted, never who came after it.
create or replace function once_fenced_lock_v1(p_resource text, p_holder text) returns double precision
language plpgsql set search_path from current as $$
declare
  f once_fenced_fence;
  lapsed text;
  locked boolean := false;
  tries integer := 0;
  deadline timestamptz := clock_timestamp() + interval '2 seconds';
begin
  loop
    select * into f from once_fenced_fence where resource = p_resource;
    if not found then
      insert into once_fenced_fence (resource, token) values (p_resource, 0) on conflict do nothing;
      if found then return null; end if;
      continue;
    end if;
    if f.holder <> p_holder and f.expires_at > clock_timestamp() then
      return greatest(extract(epoch from f.expires_at - clock_timestamp()), 0);
    end if;
    if locked then return null; end if;

    lapsed := f.holder;
    perform 1 from once_fenced_fence where resource = p_resource for no key update skip locked;
    locked := found;
    if not locked then
      if clock_timestamp() > deadline then return 0.5; end if;
      if tries > 0 and lapsed <> p_holder then perform once_fenced_evict_v1(lapsed); end if;
      tries := tries + 1;
      perform pg_sleep(least(0.005 * tries, 0.05));
    end if;
  end loop;
end $$;
