-- Take q for a message that is about to be published (E3, E10, E13, D1).
--
-- ARGV  1 digest  2 task  3 flags of the span  4 mode  5 delivery  6 task id  7 hold in ms  8 text
--       9 for how many ms refusals in a row are no wonder
--       ordered spans (o):  10 number the call already has, or ""  11 the call itself, where it may be kept (k)
-- Answers 1 where q is taken, or nothing had to be.  Else
--   {"granted", seq}                    taken under a number, and {…, "q", value, ms left} of the hold it displaced
--   {"refused", times, slot, value, ms left, ms}   who is in the way, how often in a row the key has refused a call, and
--                                              for how many ms, where that is to be told, else 0
--   {"kept", seq, "q", value, ms left}         the call is left to the one in q
--   {"awaiting", seq, "q", value, ms left}     as refused, numbered: it is published all the same
--
-- mine (q of this delivery) → extended, granted: the reply to the first sending was lost
-- new, awaited              → refused by q and r as the span says (q is named first), else q is taken
--                             displaces: q is taken from whoever has it, and put aside until the publish is confirmed
--                             keeps_last: while q is held, only the newest call is kept for it
-- successor                 → q is taken if it is free or of the same task id; never refused (E10)
-- A q that start does not clear is a window (until_expired): only a new call opens one, and nothing moves its end.
-- A hold is never shortened here.  Numbers of one key only go up, whatever the clock does.

local digest, task, flags, mode, delivery, task_id = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local ttl, text, patience, numbered, call = tonumber(ARGV[7]), ARGV[8], tonumber(ARGV[9]), ARGV[10], ARGV[11]
local DAY = 86400000

local function has(flag)
  return flags:find(flag, 1, true) ~= nil
end

local window = has('Q') and not has('c')
local q = occupant('q', digest)
local mine = q ~= nil and q.delivery == delivery

local function number()
  if numbered and numbered ~= '' then
    return numbered
  end
  local started = newest_started(digest)
  local before = math.max(q and q.seq or 0, started and started.seq or 0, (last_kept(digest)))
  return whole(math.max(tonumber(now_us), before + 1))
end

local function take(seq)
  occupy('q', digest, digest, task, ttl, table.concat({ delivery, task_id, seq, task, text }, '|'), q)
end

local function keep()
  if not window and left(q) < ttl then
    extend('q', digest, digest, q.task, ttl)
  end
end

local function put_aside()
  local aside = q and displacement(digest)
  local value, til = q and q.value or '', now + (q and left(q) or 0)
  if aside and aside.delivery == q.delivery then -- what an unconfirmed call displaced is what would be lost
    value, til = aside.value, aside.til
  end
  redis.call('SET', bucket .. 'displaced:' .. digest, table.concat({ delivery, now, til, value }, '|'), 'PX', ttl)
end

-- The answer to a call that is asked for again.
local function taken_before()
  local aside = displacement(digest)
  local said = { 'granted', whole(q.seq) }
  if aside and aside.delivery == delivery and aside.value ~= '' then
    said[3], said[4], said[5] = 'q', aside.value, math.max(aside.til - now, 0)
  end
  return said
end

local function grant()
  if not has('o') then
    if has('Q') then
      take(now_us)
    end
    return 1
  end
  local said = { 'granted', number() }
  if has('d') then
    put_aside()
    if q then
      said[3], said[4], said[5] = 'q', q.value, left(q, ttl)
      count(task, 'replaced')
    end
  end
  take(said[2])
  return said
end

local function in_the_way()
  if q and has('q') then
    return q
  end
  return has('r') and occupant('r', digest) or nil
end

-- For how many ms a streak has lasted, where it is to be told: of ten, a hundred and so on, longer than is no wonder, and
-- than any run of the task took that ended in this bucket.  A rush on a key that runs as it should is not.
local function untold(name, times)
  local known = redis.pcall('HMGET', name, 'since', 'due')
  local age = now - (tonumber(known[1]) or now)
  local longest = tonumber(redis.pcall('HGET', bucket .. 'stats:' .. task, 'hold_max_ms')) or 0
  if times < (tonumber(known[2]) or 10) or age < math.max(patience, longest) then
    return 0
  end
  redis.pcall('HSET', name, 'due', whole(10 ^ #tostring(times)))
  count(task, 'repeated')
  return math.max(age, 1)
end

-- A key that refuses calls and never runs is an outage that nobody notices.  A window refuses by design.
local function streak()
  if window then
    return 0, 0
  end
  local name = bucket .. 'streak:' .. digest
  local times = redis.pcall('HINCRBY', name, 'times', 1)
  if type(times) ~= 'number' then
    return 0, 0
  end
  if times == 1 then
    redis.pcall('HSET', name, 'since', whole(now))
    redis.pcall('PEXPIRE', name, math.max(DAY, ttl))
  end
  return times, times < 10 and 0 or untold(name, times)
end

local function refused(by)
  local what, n, lasting = 'refused', 0, 0
  if mode == 'awaited' then
    what, n = 'awaiting', has('o') and number() or 0
    count(task, 'awaiting')
  elseif has('k') then
    what, n = 'kept', number()
    redis.call('SET', bucket .. 'next:' .. digest, n .. '|' .. call, 'PX', math.max(ttl, left(by, ttl)))
    count(task, 'kept_last')
  else
    n, lasting = streak()
    count(task, 'suppressed')
  end
  return { what, n, by.slot, by.value, left(by, ttl), lasting }
end

local function answer()
  if mine and has('Q') then
    keep()
    return has('o') and taken_before() or 1
  elseif mode == 'successor' then
    if has('Q') and not window and (not q or (q.task_id == task_id and task_id ~= '')) then
      local seq = has('o') and number() or now_us
      take(seq)
      return has('o') and { 'granted', seq } or 1
    end
    return has('o') and { 'granted', number() } or 1
  end
  local by = in_the_way()
  return by and refused(by) or grant()
end

local said = answer()
sweep()
return said
