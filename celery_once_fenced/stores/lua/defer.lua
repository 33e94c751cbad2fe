-- A message is about to be published again (D1, D3).
--
-- ARGV  1 digest  2 task  3 flags of the span  4 delivery  5 hold in ms
--       6 most waiters of the key, 0 = any number, "" = it does not wait for its turn
--       7 when it began to wait, in unix ms, or ""  8 for how many ms a waiter is believed
--       9 resource whose fence another key holds, or ""
-- Answers {"deferred", waiters, when it began to wait}, or {"overflow", waiters, …}: one waiter too many.
--
-- q of this delivery → extended, and it may always wait: the call was admitted
-- A window is left as it is.
-- Who waits for a resource is found from its holder as well (C10): believed only while it is in the line of its key.

local digest, task, flags, delivery, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local most, since, believed = tonumber(ARGV[6]), ARGV[7] ~= '' and ARGV[7] or whole(now), tonumber(ARGV[8])
local waiting, member, resource = bucket .. 'waiting:' .. digest, delivery .. '|' .. since, ARGV[9]

local window = flags:find('Q', 1, true) and not flags:find('c', 1, true)
local q = occupant('q', digest)
local mine = q ~= nil and q.delivery == delivery

local function stand_in(line, place)
  redis.pcall('ZADD', line, now + believed, place)
  if left({ key = line }) < believed then
    redis.pcall('PEXPIRE', line, believed)
  end
end

local function want()
  local wanted = bucket .. 'wanted:' .. redis.sha1hex(resource)
  redis.pcall('SET', bucket .. 'wants:' .. digest, resource, 'PX', believed)
  redis.pcall('ZREMRANGEBYSCORE', wanted, '-inf', now)
  stand_in(wanted, digest .. '|' .. member)
end

local function waiters()
  redis.pcall('ZREMRANGEBYSCORE', waiting, '-inf', now)
  local n = redis.pcall('ZCARD', waiting)
  return type(n) == 'number' and n or 0
end

local function wait_in_line()
  local others = waiters()
  local known = redis.pcall('ZSCORE', waiting, member)
  if most > 0 and others >= most and not mine and type(known) ~= 'string' then
    count(task, 'overflowed')
    return { 'overflow', others, since }
  end
  stand_in(waiting, member)
  if resource ~= '' then
    want()
  end
  return { 'deferred', waiters(), since }
end

local function answer()
  local said = most and wait_in_line() or { 'deferred', 0, since }
  if said[1] == 'deferred' then
    if mine and not window and left(q) < ttl then
      extend('q', digest, digest, q.task, ttl)
    end
    count(task, 'deferred')
  end
  return said
end

local said = answer()
sweep()
return said
