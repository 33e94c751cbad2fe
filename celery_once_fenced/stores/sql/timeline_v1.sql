-- The timeline this server writes, or 0 where the role may not see it.
--
-- A promoted standby and pg_upgrade write another timeline than the server whose tokens they may have missed (C2).
-- pg_control_checkpoint() would be the obvious source, but right after a promotion it still shows the old timeline.
create or replace function once_fenced_timeline_v1() returns bigint
language plpgsql stable set search_path from current as $$
begin
  return ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint;
exception when insufficient_privilege or undefined_function or feature_not_supported then
  return 0;
end $$;
