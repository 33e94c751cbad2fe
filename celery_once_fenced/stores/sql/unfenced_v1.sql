-- Unfenced: from here on, writes without a token are let into tables under require; to the end of the transaction, or
-- until the setting once_fenced.unfenced is put back to what this returns.
--
-- Why and by whom is kept in the same transaction: no such write without its record, no record of one that was rolled
-- back.  A transaction that carries a token is checked all the same.
create or replace function once_fenced_unfenced_v1(p_reason text, p_actor text, out before text)
language plpgsql set search_path from current as $$
begin
  before := coalesce(current_setting('once_fenced.unfenced', true), '');
  insert into once_fenced_event (kind, actor, detail)
  values ('table.unfenced', coalesce(nullif(p_actor, ''), current_user), p_reason);
  perform set_config('once_fenced.unfenced', 'on', true);
end $$;
