-- Prune: one batch of what nobody needs any more; the caller repeats while anything was deleted.
--
--   fence   rows free or lapsed for longer than p_grace seconds.  The floor is raised to the highest token deleted, in
--           the same transaction: a row that comes back starts above it (C3)
--   ledger  succeeded and failed entries past retain_until, retryable ones too unless they have effects.  Never
--           running, never in doubt (L7)
--   outbox  messages confirmed longer than p_grace ago
--
-- Takes rows in the order fence, ledger (C7) and skips locked ones, so it neither waits nor is waited for.
-- The epoch row is made when missing: test runners flush tables.
create or replace function once_fenced_prune_v1(
  p_grace double precision, p_batch integer, out fences integer, out entries integer, out messages integer
) language plpgsql set search_path from current as $$
declare
  before timestamptz := clock_timestamp() - make_interval(secs => p_grace);
  highest bigint;
begin
  with old as (
    select resource from once_fenced_fence
     where coalesce(expires_at, acquired_at, '-infinity') < before limit p_batch for update skip locked
  ), gone as (
    delete from once_fenced_fence f using old where f.resource = old.resource returning f.token
  )
  select max(gone.token), count(*) into highest, fences from gone;

  with old as (
    select l.key_digest from once_fenced_ledger l
     where l.retain_until < clock_timestamp()
       and (l.state in ('succeeded', 'failed')
            or l.state = 'retryable'
               and not exists (select 1 from once_fenced_effect x where x.key_digest = l.key_digest))
     order by l.retain_until limit p_batch for update skip locked
  )
  delete from once_fenced_ledger l using old where l.key_digest = old.key_digest;
  get diagnostics entries = row_count;

  with old as (
    select id from once_fenced_outbox where confirmed_at < before limit p_batch for update skip locked
  )
  delete from once_fenced_outbox o using old where o.id = old.id;
  get diagnostics messages = row_count;

  if highest is not null then
    insert into once_fenced_epoch (floor) values (highest)
    on conflict (one) do update set floor = greatest(once_fenced_epoch.floor, excluded.floor);
  end if;
end $$;
