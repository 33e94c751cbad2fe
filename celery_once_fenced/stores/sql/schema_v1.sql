-- The tables of the correctness tier.
--
-- fence   one row per resource: the highest token ever issued for it, and who holds it now.
--         free = expires_at IS NULL; held = expires_at in the future; lapsed = in the past, and then the token is
--         still the highest: until somebody takes over, the holder may renew and complete.
--         Moved by claim, complete, abandon, renew, force_release and prune, always under the row's lock (C1, C7).
-- ledger  one row per idempotency key: running -> succeeded | failed | retryable | in_doubt (L1).
--         retain_until is set where the entry may be forgotten: finished and retryable ones.
-- effect  one row per named external step of an entry: started -> done | failed.  started and left = unknown (L4);
--         released = unknown, and a person said to call again with the same downstream key.
-- outbox  messages of committed bodies: published and then confirmed (L9).
-- event   append-only: who did what to which key, and why.
-- epoch   one row: what keeps tokens from going back after a fail-over and after prune (C2, C3).
--
-- Texts hold ASCII JSON made by the caller, never jsonb, which refuses NaN, NUL and lone surrogates (L6).
-- Checks are those of types: a table's the server reads from its text again in every statement that writes a row.
-- Every default is clock_timestamp(): now() is the start of the transaction, and a claim may have waited (C4).

do $$
declare
  type text;
begin
  foreach type in array array[
    'once_fenced_resource as text check (length(value) between 1 and 255)',
    'once_fenced_digest as bytea check (octet_length(value) = 32)',
    'once_fenced_state as text check (value in (''running'', ''succeeded'', ''failed'', ''retryable'', ''in_doubt''))',
    'once_fenced_step as text check (value in (''started'', ''done'', ''failed'', ''released''))'
  ] loop
    execute 'create domain ' || type;
  end loop;
exception when duplicate_object then null;  -- then all of them are there
end $$;

create table if not exists once_fenced_epoch (
  one boolean primary key default true check (one),
  timeline bigint not null default 0,  -- the last one seen; 0 = never seen, or not ours to see
  epoch bigint not null default 0,     -- bumped whenever another timeline is seen
  floor bigint not null default 0      -- no token up to this one is ever issued again
);

-- No index but the primary key and room on every page: a renewal is then a HOT update.
create table if not exists once_fenced_fence (
  resource once_fenced_resource primary key,
  token bigint not null,
  holder text,
  key_digest bytea,
  task_id text,
  task_name text,
  key text,
  worker text,
  acquired_at timestamptz,
  expires_at timestamptz
) with (fillfactor = 70);

create table if not exists once_fenced_ledger (
  key_digest once_fenced_digest primary key,
  key text not null,
  scope text not null,
  task_name text not null,
  task_id text,
  run_id text,  -- of the call that ran: kept by redelivery, deferral and retry
  namespace text not null default '',  -- of the app that ran it last, whose message it is (L14)
  fingerprint bytea,
  state once_fenced_state not null,
  attempt integer not null,
  takeovers integer not null default 0,
  holder text not null,
  resource text not null,
  token bigint not null,
  result text,
  result_omitted text,
  error text,
  message text,  -- of an entry in doubt, so that "run again" can publish it (L14)
  created_at timestamptz not null default clock_timestamp(),
  started_at timestamptz not null default clock_timestamp(),
  finished_at timestamptz,
  replay_until timestamptz,  -- until then a succeeded entry answers later calls; to its own run it answers longer
  retain_until timestamptz
) with (fillfactor = 80);
create index if not exists once_fenced_ledger_retain on once_fenced_ledger (retain_until)
  where retain_until is not null;
create index if not exists once_fenced_ledger_key on once_fenced_ledger (key);
create index if not exists once_fenced_ledger_in_doubt on once_fenced_ledger (started_at)
  where state = 'in_doubt';

create table if not exists once_fenced_effect (
  key_digest bytea not null references once_fenced_ledger on delete cascade,
  name text not null,
  state once_fenced_step not null,
  generation integer not null default 1,
  downstream_key text not null,
  holder text not null,
  token bigint not null,
  on_unknown text,  -- the effect's own policy; NULL = the task's at the time it is asked
  result text,
  error text,
  started_at timestamptz not null default clock_timestamp(),
  finished_at timestamptz,
  primary key (key_digest, name)
);

create table if not exists once_fenced_outbox (
  id bigint generated always as identity primary key,
  namespace text not null,  -- of the app that wrote it, and that alone publishes it: another has another broker
  key_digest bytea not null,
  task_id text not null,
  message text not null,
  created_at timestamptz not null default clock_timestamp(),
  taken_at timestamptz,  -- by a sweep
  confirmed_at timestamptz
);
create index if not exists once_fenced_outbox_open on once_fenced_outbox (namespace, created_at)
  where confirmed_at is null;
create index if not exists once_fenced_outbox_task on once_fenced_outbox (task_id) where confirmed_at is null;

-- Of a takeover, the plain columns are the successor and old_* the one it took over from; without a successor
-- (released by hand, given up) the plain holder is NULL and token is the one that shuts the old holder out.
create table if not exists once_fenced_event (
  id bigint generated always as identity primary key,
  at timestamptz not null default clock_timestamp(),
  kind text not null,
  resource text,
  key_digest bytea,
  task_name text,
  task_id text,
  holder text,
  worker text,
  token bigint,
  old_key_digest bytea,
  old_task_id text,
  old_holder text,
  old_worker text,
  old_token bigint,
  actor text,
  detail text
);
create index if not exists once_fenced_event_key on once_fenced_event (key_digest);
create index if not exists once_fenced_event_old_key on once_fenced_event (old_key_digest)
  where old_key_digest is not null;
