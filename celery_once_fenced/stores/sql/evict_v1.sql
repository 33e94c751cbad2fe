-- End the session whose open transaction carries this holder (begin named it so); returns how many ended.
--
-- A body frozen anywhere, also between complete and COMMIT, gives up its row locks at once; when it wakes up, it
-- finds its connection gone (57P01).  Waits at most p_ms milliseconds per session (C9).
-- pg_stat_activity is cached for the transaction, hence the clear.  The role is ours where we have its privileges:
-- current_user would be wrong under SET ROLE.  A superuser's session is not ours to end: nobody is evicted then.
create or replace function once_fenced_evict_v1(p_holder text, p_ms integer default 500) returns integer
language plpgsql set search_path from current as $$
declare
  ended integer;
begin
  perform pg_stat_clear_snapshot();
  select count(*) filter (where pg_terminate_backend(a.pid, p_ms)) into ended
    from pg_stat_activity a
   where a.application_name = 'once_fenced:' || p_holder
     and a.datname = current_database()
     and a.pid <> pg_backend_pid()
     and pg_has_role(a.usesysid, 'usage');
  return ended;
exception when insufficient_privilege then
  return 0;
end $$;
