-- Record: add the result to an entry whose transaction is over (L12: the body went on after its atomic block).
-- Only the execution that completed it may: succeeded, same attempt, same holder.  Returns whether it did.
-- Killed before this, the entry keeps the marker that complete left in result_omitted.
create or replace function once_fenced_record_v1(
  p_digest bytea, p_holder text, p_attempt integer, p_result text, p_omitted text
) returns boolean language plpgsql set search_path from current as $$
begin
  update once_fenced_ledger set result = p_result, result_omitted = p_omitted
   where key_digest = p_digest and state = 'succeeded' and attempt = p_attempt and holder = p_holder;
  return found;
end $$;
