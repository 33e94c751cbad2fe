-- The token that follows p_token.  The caller holds the fence row's lock (C1).
--
-- greatest(token + 1, floor + 1, ((epoch - 1) << 44) + 1): the floor covers rows that prune deleted, the epoch what a
-- promoted standby may not have received (C2).  Both are read here, after the row is ours: a prune that removed an
-- older row of this resource has committed its floor by now (C3).
-- A role that cannot see the timeline (0) neither bumps nor resets it, else two roles would bump it in turns.
-- The epoch row is made again when missing: test runners flush tables.
create or replace function once_fenced_token_v1(p_token bigint) returns bigint
language plpgsql set search_path from current as $$
declare
  e once_fenced_epoch;
  seen bigint := once_fenced_timeline_v1();
begin
  select * into e from once_fenced_epoch;
  if not found then
    insert into once_fenced_epoch default values on conflict do nothing;
    select * into e from once_fenced_epoch;
  end if;
  if seen <> 0 and seen <> e.timeline then
    update once_fenced_epoch set timeline = seen, epoch = epoch + 1 where timeline <> seen;
    select * into e from once_fenced_epoch;
  end if;
  return greatest(p_token + 1, e.floor + 1, ((e.epoch - 1) << 44) + 1);
end $$;
