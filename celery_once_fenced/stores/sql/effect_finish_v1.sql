-- Effect finish: started | released -> done | failed, after the external call.
--
-- Compared with the effect's own holder and not with the fence: the receipt of a call that did happen counts, however
-- late (L4).  False: the effect was started again by another attempt, or is finished; the outcome then goes into the
-- event table, where a person finds it.
create or replace function once_fenced_effect_finish_v1(
  p_digest bytea, p_name text, p_holder text, p_state text, p_result text, p_error text
) returns boolean language plpgsql set search_path from current as $$
begin
  perform once_fenced_durable_v1();
  update once_fenced_effect set state = p_state, result = p_result, error = p_error, finished_at = clock_timestamp()
   where key_digest = p_digest and name = p_name and state in ('started', 'released') and holder = p_holder;
  if found then return true; end if;
  insert into once_fenced_event (kind, key_digest, holder, detail)
  values ('effect.late_outcome', p_digest, p_holder,
          json_build_object('effect', p_name, 'state', p_state, 'result', p_result, 'error', p_error));
  return false;
end $$;
