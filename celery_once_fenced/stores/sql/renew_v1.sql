-- Renew: all leases of a process in one statement; answers in the order asked.
--
--   renewed  expires_at moved on; also when it had lapsed and nobody took over.  The token never changes (C1)
--   locked   a claim or complete of this resource is in flight: try at the next beat
--   lost     another token or holder, or no row: superseded.  It never comes back
--
-- Rows are locked in resource order and skipped when locked: a plain UPDATE waits on a single busy row and renews
-- nothing (C8).  Losing a renewal in a crash is harmless, so its commit is asynchronous (C5).
create or replace function once_fenced_renew_v1(
  p_resources text[], p_tokens bigint[], p_holders text[], p_leases double precision[]
) returns table (place bigint, answer text) language plpgsql set search_path from current as $$
begin
  perform set_config('synchronous_commit', 'off', true);
  return query
  with asked as (
    select * from unnest(p_resources, p_tokens, p_holders, p_leases) with ordinality
      as a (resource, token, holder, lease, place)
  ), mine as (
    select f.resource, a.lease, a.place
      from once_fenced_fence f
      join asked a on f.resource = a.resource and f.token = a.token and f.holder = a.holder
     order by f.resource
       for no key update of f skip locked
  ), renewed as (
    update once_fenced_fence f set expires_at = clock_timestamp() + make_interval(secs => m.lease)
      from mine m where f.resource = m.resource
    returning m.place
  )
  select a.place, case when r.place is not null then 'renewed' when f.resource is not null then 'locked' else 'lost' end
    from asked a
    left join renewed r on r.place = a.place
    left join once_fenced_fence f on f.resource = a.resource and f.token = a.token and f.holder = a.holder
   order by a.place;
end $$;
