-- Indexes for people: lists of the ledger in Django's admin, newest first, under a second with millions of rows.
-- The protocol needs neither, so a schema without Django leaves them out.
--
-- open: the few entries that are anything but succeeded, by state; the fences that are held now are found by its
-- running ones, because an index on the fences themselves would make every renewal and claim dearer.
create index if not exists once_fenced_ledger_started on once_fenced_ledger (started_at);
create index if not exists once_fenced_ledger_open on once_fenced_ledger (state, started_at) where state <> 'succeeded';
