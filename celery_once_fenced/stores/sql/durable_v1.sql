-- Make the commit of this transaction survive a crash, whatever the role's default is (C5).
--
-- A SET clause of a function would be undone before COMMIT.  set_config(..., true) lasts to the end of the
-- transaction, also out of a function that has a SET clause of another setting.  remote_apply is stronger: kept.
create or replace function once_fenced_durable_v1() returns void
language plpgsql set search_path from current as $$
begin
  if current_setting('synchronous_commit') in ('off', 'local', 'remote_write') then
    perform set_config('synchronous_commit', 'on', true);
  end if;
end $$;
