-- Effect start: committed before the external call, in a commit that checks fence, token and holder (L4).
--
--   go       call now, with downstream_key
--   done     recorded by an earlier attempt: replay the result, do not call (L5)
--   unknown  started and not finished: by this attempt (it swallowed the outcome), or by an earlier one and the policy
--            is not rerun.  The caller probes: happened -> effect_finish as effect_holder; did not -> start as rerun
--   fenced   a newer token was issued: do not call
--
-- downstream_key is random and kept over unknown outcomes, so that the provider recognises the call; it is renewed
-- only after a certain failure, else the provider would replay its refusal.
-- p_own is the effect's own policy, stored for claim and abandon; NULL = the task's, p_on_unknown.
create or replace function once_fenced_effect_start_v1(
  p_digest bytea, p_name text, p_resource text, p_token bigint, p_holder text, p_on_unknown text, p_own text,
  out verdict text, out downstream_key text, out effect_holder text, out result text, out error text
) language plpgsql set search_path from current as $$
#variable_conflict use_column
declare
  x once_fenced_effect;
begin
  perform 1 from once_fenced_fence where resource = p_resource and token = p_token and holder = p_holder for share;
  if not found then
    verdict := 'fenced';
    return;
  end if;
  perform once_fenced_durable_v1();
  insert into once_fenced_effect (key_digest, name, state, downstream_key, holder, token, on_unknown)
  values (p_digest, p_name, 'started', gen_random_uuid()::text, p_holder, p_token, p_own)
  on conflict do nothing returning * into x;
  if found then
    verdict := 'go';
  else
    select * into x from once_fenced_effect where key_digest = p_digest and name = p_name for no key update;
    verdict := case
      when x.state = 'done' then 'done'
      when x.state = 'started' and x.holder = p_holder then 'unknown'
      when x.state = 'started' and coalesce(p_own, p_on_unknown) <> 'rerun' then 'unknown'
      else 'again' end;
  end if;
  if verdict = 'again' then
    update once_fenced_effect
       set state = 'started', holder = p_holder, token = p_token, on_unknown = p_own, error = null, finished_at = null,
           started_at = clock_timestamp(), generation = generation + (state = 'failed')::int,
           downstream_key = case state when 'failed' then gen_random_uuid()::text else downstream_key end
     where key_digest = p_digest and name = p_name
    returning * into x;
    verdict := 'go';
  end if;
  downstream_key := x.downstream_key;
  effect_holder := x.holder;
  result := x.result;
  error := x.error;
end $$;
