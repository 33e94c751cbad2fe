-- Begin: first statement of the body's transaction.  Raises OF001 when a newer token was issued, OF004 when the
-- transaction is not READ COMMITTED.
--
-- Names the transaction by token, resource and holder, for complete, for the guards of fenced tables and, through
-- application_name, for eviction; all of it ends with the transaction.  The look at the fence takes no lock (C7: the
-- body must not block renewal) and proves nothing: it only refuses a zombie before it locks any row.
-- Under REPEATABLE READ the first renewal would make complete fail to serialize, so it is refused here.
create or replace function once_fenced_begin_v1(p_resource text, p_token bigint, p_holder text) returns void
language plpgsql set search_path from current as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'a fenced body needs READ COMMITTED, not %', current_setting('transaction_isolation')
      using errcode = 'OF004';
  end if;
  perform set_config('once_fenced.token', p_token::text, true),
          set_config('once_fenced.resource', p_resource, true),
          set_config('once_fenced.holder', p_holder, true),
          set_config('application_name', 'once_fenced:' || p_holder, true);
  perform 1 from once_fenced_fence where resource = p_resource and token = p_token and holder = p_holder;
  if not found then
    raise exception 'fenced off: token % has been superseded', p_token using errcode = 'OF001';
  end if;
end $$;
