-- Outbox: messages that are published if and only if the body that wrote them commits (L9).
--
--   put      in the body's transaction; the message is there when that commits, and only then
--   mine     after the COMMIT: which of a worker's own messages there are.  They are its own for a while (see take), also
--            where the transaction took long after put.  One that a sweep has taken already is left to that
--   confirm  after the message was published
--   take     rows that were committed and not confirmed p_age seconds ago, or taken and not confirmed since: their
--            worker died between COMMIT and confirm.  Taken rows are the caller's for p_age seconds; rows another
--            sweep is taking are skipped.  Published twice at worst, under the same task id and delivery id
--
-- Apps that share the database may have other brokers and other tasks: each takes the rows of its own namespace only.
create or replace function once_fenced_outbox_put_v1(
  p_namespace text, p_digest bytea, p_task_id text, p_message text
) returns void
language sql set search_path from current as $$
  insert into once_fenced_outbox (namespace, key_digest, task_id, message)
  values (p_namespace, p_digest, p_task_id, p_message)
$$;

create or replace function once_fenced_outbox_mine_v1(p_task_ids text[])
returns table (task_id text, message text) language plpgsql set search_path from current as $$
#variable_conflict use_column
begin
  return query
  update once_fenced_outbox o set taken_at = clock_timestamp()
   where o.task_id = any (p_task_ids) and o.confirmed_at is null and o.taken_at is null
  returning o.task_id, o.message;
end $$;

create or replace function once_fenced_outbox_confirm_v1(p_task_ids text[]) returns integer
language plpgsql set search_path from current as $$
declare
  confirmed integer;
begin
  update once_fenced_outbox set confirmed_at = clock_timestamp()
   where task_id = any (p_task_ids) and confirmed_at is null;
  get diagnostics confirmed = row_count;
  return confirmed;
end $$;

create or replace function once_fenced_outbox_take_v1(p_namespace text, p_age double precision, p_limit integer)
returns table (task_id text, message text) language plpgsql set search_path from current as $$
#variable_conflict use_column
begin
  return query
  with open as (
    select o.id from once_fenced_outbox o
     where o.confirmed_at is null and o.namespace = p_namespace
       and coalesce(o.taken_at, o.created_at) < clock_timestamp() - make_interval(secs => p_age)
     order by o.created_at limit p_limit for update skip locked
  )
  update once_fenced_outbox o set taken_at = clock_timestamp()
    from open where o.id = open.id
  returning o.task_id, o.message;
end $$;
