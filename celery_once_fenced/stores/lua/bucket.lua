-- What every script begins with; the driver puts it before each of them.
--
-- KEYS[1] is the bucket, "{namespace:b}:", b being the first hexadecimal digit of the key's digest.  It is no key by
-- itself: every key a script touches begins with it, so its hash tag puts them all into one hash slot, and a script
-- is atomic on one node.
--
--   <bucket>q:<digest>          queued hold    delivery|task_id|seq|task|text
--   <bucket>r:<name>            running hold   holder|task_id|delivery|since|worker|task|text
--   <bucket>ending:<delivery>   the body is over, its result is not out yet (E8)
--   <bucket>done:<delivery>     tombstone: a redelivery is dropped (E8)
--   <bucket>freed:<holder>      a person released the r of this holder, who is yet to find out (E7)
--   <bucket>mark:<digest>       the newest call that was started, as a q value (E13)
--   <bucket>next:<digest>       seq|call: the newest call that was left to the one in q (E13b)
--   <bucket>displaced:<digest>  delivery|since|until|value: the q that an unconfirmed replacement put aside (E13a)
--   <bucket>waiting:<digest>    sorted set of deferred deliveries by expiry in unix ms: "delivery|since" (D3)
--   <bucket>wants:<digest>      the resource that its waiters last found held by another key (C10)
--   <bucket>wanted:<sha1>       sorted set, as waiting, of those who wait for a resource: "digest|delivery|since"
--   <bucket>streak:<digest>     hash: how many times the key was refused since it last ran, since when (unix ms), and at how
--                               many times it is to be told
--   <bucket>index               sorted set of the holds by expiry in unix ms: "q||digest|task", "r|name|digest|task"
--   <bucket>stats:<task>        hash of counters;  <bucket>tasks  set of the tasks that have one
--   <bucket>hours:<task>        hash of the counters of HOURLY by unix hour: "<hour>:<counter>", not yet in stats
--
-- name is the digest, which the index leaves out, or a delivery id where a span without r looks for its twin.  seq and
-- since are microseconds of this server's clock; in displaced and waiting, since and until are milliseconds.  The text comes last and may contain
-- anything; in the other fields the driver encodes "|" and "%", and scripts only compare them.
--
-- A slot is moved only by the hold in it: every script reads it, compares delivery or holder, and then acts (E1).
-- A value that is no hold of ours occupies its slot as an unknown holder, "?" and the SHA-1 of the value: nobody is it,
-- so nobody extends or ends it, and a person can release exactly what they saw.  No hold lives for ever.
--
-- The write that an answer rests on comes first, bookkeeping last: a server that refuses writes has changed nothing.
-- Index and counters never fail an operation.  Runs on Redis 6.2, 7, 8 and Valkey.

local bucket = KEYS[1]
local index = bucket .. 'index'
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local now_us = clock[1] .. string.format('%06d', clock[2])

local LAYOUT = {
  q = '^([^|]+)|([^|]*)|(%d+)|([^|]*)|(.*)$',
  r = '^([^|]+)|([^|]*)|([^|]*)|(%d+)|([^|]*)|([^|]*)|(.*)$',
}
local MICROSECONDS = 17 -- digits; a longer number is none of ours

local function parse(slot, value)
  local a, task_id, b, c, d, task = value:match(LAYOUT[slot])
  if slot == 'q' and a and #b <= MICROSECONDS then
    return { holder = a, delivery = a, task_id = task_id, seq = tonumber(b), task = c, value = value }
  elseif slot == 'r' and a and #c <= MICROSECONDS then
    return { holder = a, delivery = b, task_id = task_id, task = task, value = value }
  end
end

local function stranger(slot, value)
  local name = '?' .. (type(value) == 'string' and redis.sha1hex(value) or 'type')
  return parse(slot, name .. (slot == 'q' and '||0||' or '|||0|||'))
end

-- The hold in a slot, or nil.
local function occupant(slot, name)
  local key = bucket .. slot .. ':' .. name
  local value = redis.pcall('GET', key)
  if not value then
    return nil
  end
  local hold = type(value) == 'string' and parse(slot, value) or stranger(slot, value)
  hold.slot, hold.key = slot, key
  return hold
end

-- Milliseconds until a hold lapses.  `lapse`: what to give one that would never lapse.
local function left(hold, lapse)
  local ms = redis.call('PTTL', hold.key)
  if ms < 0 and lapse then
    redis.call('PEXPIRE', hold.key, lapse)
    return lapse
  end
  return ms
end

-- What is stored under a name of the key, as text, or nil.
local function text_of(name, digest)
  local value = redis.pcall('GET', bucket .. name .. ':' .. digest)
  return type(value) == 'string' and value or nil
end

-- The newest call that was started, or nil (E13).
local function newest_started(digest)
  local value = text_of('mark', digest)
  return value and parse('q', value)
end

-- The newest call that was left to the one in q: its number and the call, or 0 (E13b).
local function last_kept(digest)
  local value = text_of('next', digest)
  local seq, call = (value or ''):match('^(%d+)|(.*)$')
  if seq and #seq <= MICROSECONDS then
    return tonumber(seq), call
  end
  return 0
end

-- What an unconfirmed replacement put aside: {delivery, since, until, q value, which may be empty}, or nil (E13a).
local function displacement(digest)
  local value = text_of('displaced', digest)
  local delivery, since, til, old = (value or ''):match('^([^|]+)|(%d+)|(%d+)|(.*)$')
  return delivery and { delivery = delivery, since = tonumber(since), til = tonumber(til), value = old }
end

-- Whether a message stands in the line of a key, of which a person is told: no more of it is looked at than that takes (D3).
local function in_line(digest, delivery)
  local waiting, begins = bucket .. 'waiting:' .. digest, delivery .. '|'
  for _, place in ipairs(redis.pcall('ZRANGEBYSCORE', waiting, '(' .. now, '+inf', 'LIMIT', 0, 1000)) do
    if place:sub(1, #begins) == begins then
      return true
    end
  end
  return false
end

local function whole(number)
  return string.format('%.0f', number)
end

-- Counted by the hour, for a day: what a person wants to see the course of.  Older hours are added to the totals.
local HOURLY = { granted = true, not_entered = true, suppressed = true, expired = true, lost = true, fenced_off = true, repeated = true }
local HOURS_KEPT = 26

-- The counters that are kept by the hour, as hour, counter and number each.
local function hourly(task)
  local said, fields = {}, redis.pcall('HGETALL', bucket .. 'hours:' .. task)
  for i = 1, #fields, 2 do
    local hour, counter = fields[i]:match('^(%d+):(.+)$')
    if hour and #hour <= MICROSECONDS then
      said[#said + 1] = { tonumber(hour), counter, fields[i + 1], fields[i] }
    end
  end
  return said
end

local function add_old_hours(task, this_hour)
  for _, row in ipairs(hourly(task)) do
    if row[1] <= this_hour - HOURS_KEPT then
      redis.pcall('HINCRBY', bucket .. 'stats:' .. task, row[2], row[3])
      redis.pcall('HDEL', bucket .. 'hours:' .. task, row[4])
    end
  end
end

local function count(task, counter, by)
  local kind, field, this_hour = 'stats:', counter, nil
  if HOURLY[counter] then
    this_hour = math.floor(clock[1] / 3600)
    kind, field = 'hours:', this_hour .. ':' .. counter
  end
  by = by or 1
  if redis.pcall('HINCRBY', bucket .. kind .. task, field, by) == by then -- perhaps the first of this task, or hour
    redis.pcall('SADD', bucket .. 'tasks', task)
    if this_hour then
      add_old_hours(task, this_hour)
    end
  end
end

local function member(slot, name, digest, task)
  return slot .. '|' .. (name ~= digest and name or '') .. '|' .. digest .. '|' .. task
end

-- The slot of an index member, its name, and the task; or nil.
local function parts(entry)
  local slot, name, digest, task = entry:match('^([qr])|([^|]*)|([^|]*)|(.*)$')
  return slot, name ~= '' and name or digest, task
end

-- Occupies a slot that is free or `was` ours to take over.
local function occupy(slot, name, digest, task, ttl, value, was)
  redis.call('SET', bucket .. slot .. ':' .. name, value, 'PX', ttl)
  local new = redis.pcall('ZADD', index, now + ttl, member(slot, name, digest, task))
  if was and was.task ~= task then
    redis.pcall('ZREM', index, member(slot, name, digest, was.task))
  elseif not was and new == 0 and slot == 'r' then -- the one before us lapsed and nobody saw it
    count(task, 'expired')
  end
end

-- Sets what is left of a hold.  Never SET: a full server refuses that, and lets PEXPIRE pass (E5).
local function extend(slot, name, digest, task, ttl)
  redis.call('PEXPIRE', bucket .. slot .. ':' .. name, ttl)
  redis.pcall('ZADD', index, now + ttl, member(slot, name, digest, task))
end

local function free(slot, name, digest, task)
  redis.call('DEL', bucket .. slot .. ':' .. name)
  redis.pcall('ZREM', index, member(slot, name, digest, task))
end

-- Drops index members whose time is over, and counts running holds among them as expired.  Queued holds are not
-- counted: that of until_expired is meant to lapse.  Without a limit one call in eight sweeps, for all of them.
local function sweep(limit)
  if not limit and clock[2] % 8 ~= 0 then
    return
  end
  local over = redis.pcall('ZRANGEBYSCORE', index, '-inf', now, 'LIMIT', 0, limit or 64)
  for _, entry in ipairs(over) do
    local slot, name, task = parts(entry)
    local hold = slot and occupant(slot, name)
    if hold and hold.task == task then -- somebody extended it by hand
      redis.pcall('ZADD', index, now + math.max(left(hold), 1000), entry)
    else
      redis.pcall('ZREM', index, entry)
      if slot == 'r' then
        count(task, 'expired')
      end
    end
  end
end
