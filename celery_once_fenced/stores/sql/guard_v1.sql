-- Guard: the row trigger of a fenced table, BEFORE INSERT OR UPDATE OR DELETE.  Its column is fence_token: the highest
-- token that wrote the row.
--
-- Arguments: mode (stamp | require), then the resource of a row as text, column, text, column, ..., text.  A value is
-- written with % as %25 and : as %3A, so that the parts of a resource cannot run into each other.
--
-- The transaction carries a token (begin set it):
--   OF007  the row is not of the resource that the token is for: their tokens cannot be compared.  An update must
--          leave the row with its resource too
--   OF001  the row has seen a newer token: this holder is stale, whatever it believes
--   else   the row is stamped with the token
-- It carries none:
--   OF005  under require, outside once_fenced_unfenced_v1
--   else   an update keeps the column, whatever the statement says (a save() of an old instance cannot lower it), and
--          clears it where it moves the row to another resource; an insert keeps what it is given, because COPY of a
--          dump, and the second half of a move between partitions, look like any insert
--
-- OLD is the version that the update or delete has locked, so the check is in the writing transaction, by row lock
-- (C6).  The row is rendered by EXECUTE, not by to_jsonb(OLD): that would detoast every column, and fail on some.
-- The errors name their table, which tells them from those of begin and complete, and hold what they are about in the
-- DETAIL, as JSON.
create or replace function once_fenced_guard_v1() returns trigger
language plpgsql set search_path from current as $$
declare
  held bigint := nullif(current_setting('once_fenced.token', true), '')::bigint;
  granted text := nullif(current_setting('once_fenced.resource', true), '');
  part constant text :=
    $f$ || replace(replace((%s).%I::text collate "C", '%%', '%%25'), ':', '%%3A') || %L$f$;
  before text := 'select ' || quote_literal(tg_argv[1]);
  after text := ', ' || quote_literal(tg_argv[1]);
  was text;      -- the row's resource before the write
  becomes text;  -- and after it
  stranger text;
begin
  if held is null then
    if tg_argv[0] = 'require' and coalesce(current_setting('once_fenced.unfenced', true), '') = '' then
      raise exception 'write to % without a fencing token', tg_table_name
        using errcode = 'OF005', schema = tg_table_schema, table = tg_table_name;
    end if;
    if tg_op = 'DELETE' then return old; end if;
    if tg_op = 'INSERT' then return new; end if;
    new.fence_token := old.fence_token;
    if old.fence_token is null then return new; end if;
  end if;

  for place in 2 .. tg_nargs - 2 by 2 loop
    before := before || format(part, '$1', tg_argv[place], tg_argv[place + 1]);
    after := after || format(part, '$2', tg_argv[place], tg_argv[place + 1]);
  end loop;
  case tg_op
    when 'INSERT' then execute before || after into was, becomes using new, new;
    when 'DELETE' then execute before || after into was, becomes using old, old;
    else execute before || after into was, becomes using old, new;
  end case;

  if held is null then
    if was is distinct from becomes then new.fence_token := null; end if;
    return new;
  end if;
  if (was = granted and becomes = granted) is not true then
    stranger := case when was = granted then becomes else was end;
    raise exception 'the row belongs to resource %, the token is for %', stranger, granted
      using errcode = 'OF007', schema = tg_table_schema, table = tg_table_name,
            detail = json_build_object('resource', coalesce(stranger, ''), 'granted', coalesce(granted, ''));
  end if;
  if tg_op <> 'INSERT' and old.fence_token > held then
    raise exception 'fenced off: the row has seen token %, newer than %', old.fence_token, held
      using errcode = 'OF001', schema = tg_table_schema, table = tg_table_name,
            detail = json_build_object('resource', granted, 'token', held);
  end if;
  if tg_op = 'DELETE' then return old; end if;
  new.fence_token := held;
  return new;
end $$;
