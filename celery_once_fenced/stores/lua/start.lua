-- Ask to run: q becomes r, as the span says (E1, E3, E8, E9, E10, E13).
--
-- ARGV  1 digest  2 name of r  3 task  4 flags of the span  5 delivery  6 holder  7 task id  8 worker  9 lease in ms
--       10 "1" where a redelivery is possible  11 text  12 when it began to wait, or "": it did not
--       ordered spans (o):  13 number of the call  14 for how many ms a started call is remembered
-- Answers {what, ms to wait}; where something is in the way {…, slot, value}, with slot "q" for a newer call;
-- where it was granted {"granted", 0, "", since of the q that it freed or ""}, and under a number {…, number, call}, the
-- call being the kept one, if newer.
--
-- mine (r of this very holder)   → extended, granted: the reply to the first sending was lost
-- this delivery left a tombstone → done; its own q, a leftover, is freed
-- this delivery left its mark    → ending: its result is not out yet
-- r is of this delivery          → twin: the same message runs elsewhere, or ran and its worker died
-- a newer call was started, or is in q → superseded, unless the newest started one is this delivery
--   … is in q and not confirmed  → busy for a while: its publish may have failed; then it counts for nothing
--   … is in q without d          → busy: its publish may fail, and nobody would say so; it counts when it has started
-- r is of this task id           → successor: the delivery before this one (a retry's) is still in its body
-- r is of another                → busy
-- else                           → granted: r is set; q is freed if it is of this delivery or task id
-- Nothing of another's is extended or freed.  A late caller, whose lease lapsed meanwhile, gets what anybody gets.

local digest, name, task, flags, delivery, holder = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local task_id, worker, ttl, redelivery, text = ARGV[7], ARGV[8], tonumber(ARGV[9]), ARGV[10] == '1', ARGV[11]
local waited, seq, remembered = ARGV[12], tonumber(ARGV[13]), tonumber(ARGV[14])
local UNCONFIRMED = 10000

local function has(flag)
  return flags:find(flag, 1, true) ~= nil
end

local function same_task(hold)
  return hold.task_id == task_id and task_id ~= ''
end

-- Answers since when it was held, for one that is given back (C10).
local function clear_q(also_of_the_task)
  local q = has('c') and occupant('q', digest)
  if q and (q.delivery == delivery or (also_of_the_task and same_task(q))) then
    free('q', digest, digest, q.task)
    return whole(q.seq)
  end
  return ''
end

-- What is in the way of an older call: {what, ms to wait, "q", value}, or nil.
local function newer()
  if not (has('o') and seq) then
    return nil
  end
  local started, q = newest_started(digest), occupant('q', digest)
  if started and started.delivery == delivery then
    return nil
  elseif started and seq < started.seq then
    return { 'superseded', 0, 'q', started.value }
  elseif q and q.delivery ~= delivery and not same_task(q) and q.seq and seq < q.seq then
    local aside = displacement(digest)
    local age = aside and aside.delivery == q.delivery and now - aside.since
    if not age and not has('d') then
      return { 'busy', left(q, ttl), 'q', q.value }
    elseif not age then
      return { 'superseded', 0, 'q', q.value }
    elseif age < UNCONFIRMED then
      return { 'busy', UNCONFIRMED - age, 'q', q.value }
    end
  end
end

-- Under which number it runs, and the call that was left to it, if that is newer.
local function remember(since)
  local kept, call = 0, nil
  if has('k') then
    kept, call = last_kept(digest)
  end
  local number = math.max(seq, kept)
  local started = newest_started(digest)
  if not started or started.seq <= number then
    local value = table.concat({ delivery, task_id, whole(number), task, text }, '|')
    redis.pcall('SET', bucket .. 'mark:' .. digest, value, 'PX', remembered)
  end
  return { 'granted', 0, '', since, whole(number), kept > seq and call or '' }
end

local function granted(since)
  return has('o') and seq and remember(since) or { 'granted', 0, '', since }
end

local function answer()
  local r = (has('n') or has('R')) and occupant('r', name) or nil
  if r and r.holder == holder then
    extend('r', name, digest, r.task, ttl)
    return granted(''), false
  end
  if redelivery and redis.call('EXISTS', bucket .. 'done:' .. delivery) == 1 then
    clear_q(false)
    return { 'done', 0 }, true
  end
  local ending = redelivery and redis.call('PTTL', bucket .. 'ending:' .. delivery) or -2
  if ending ~= -2 then
    return { 'ending', math.max(ending, 0) }, true
  end
  if r and has('n') and r.delivery == delivery and delivery ~= '' then
    return { 'twin', left(r, ttl), 'r', r.value }, true
  end
  local by = newer()
  if by then
    if by[1] == 'superseded' then
      clear_q(true)
    end
    return by, true
  end
  if r and has('n') then
    return { same_task(r) and 'successor' or 'busy', left(r, ttl), 'r', r.value }, true
  end
  if has('R') then
    occupy('r', name, digest, task, ttl, table.concat({ holder, task_id, delivery, now_us, worker, task, text }, '|'), r)
  end
  local since = clear_q(true)
  redis.pcall('DEL', bucket .. 'streak:' .. digest)
  return granted(since), true
end

local said, first = answer()
if first then
  count(task, said[1])
end
local stays = said[1] == 'busy' or said[1] == 'twin' or said[1] == 'successor' or said[1] == 'ending'
if waited ~= '' and not stays then
  redis.pcall('ZREM', bucket .. 'waiting:' .. digest, delivery .. '|' .. waited)
end
sweep()
return said
