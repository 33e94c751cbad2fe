-- What is known of one key beside who holds it, for people.  ARGV  1 digest
-- Answers {waiters, since of the first in unix ms or "", {refusals in a row, since of the first in unix ms}, number of the kept call or 0,
--          value of the newest started call or "", delivery of an unconfirmed replacement or "", q value it displaced,
--          resource that the waiters found held by another key or "", 1 where the call in q is itself one of them}.
-- Changes nothing.

local digest = ARGV[1]
local waiting = bucket .. 'waiting:' .. digest
local LOOKED_AT = 1000

local function first_since()
  local first
  for _, member in ipairs(redis.pcall('ZRANGEBYSCORE', waiting, '(' .. now, '+inf', 'LIMIT', 0, LOOKED_AT)) do
    local since = member:match('|(%d+)$')
    if since and #since <= MICROSECONDS and (not first or tonumber(since) < first) then
      first = tonumber(since)
    end
  end
  return first and whole(first) or ''
end

local counted = redis.pcall('ZCOUNT', waiting, '(' .. now, '+inf')
local waiters = type(counted) == 'number' and counted or 0
local refused = redis.pcall('HMGET', bucket .. 'streak:' .. digest, 'times', 'since')
local started, aside, queued = newest_started(digest), displacement(digest), occupant('q', digest)
return {
  waiters,
  first_since(),
  type(refused[1]) == 'string' and refused or { 0, 0 },
  whole((last_kept(digest))),
  started and started.value or '',
  aside and aside.delivery or '',
  aside and aside.value or '',
  waiters > 0 and text_of('wants', digest) or '',
  waiters > 0 and queued and in_line(digest, queued.delivery) and 1 or 0,
}
