-- Who waits for a resource in this bucket, for people (C10).  ARGV  1 resource
-- Answers {waiters, since of the first in unix ms or ""}; of very many, of some.  Changes nothing.

local LOOKED_AT = 1000
local wanted = bucket .. 'wanted:' .. redis.sha1hex(ARGV[1])
local number, first = 0, nil

for _, entry in ipairs(redis.pcall('ZRANGEBYSCORE', wanted, '(' .. now, '+inf', 'LIMIT', 0, LOOKED_AT)) do
  local digest, place, since = entry:match('^(%x+)|([^|]*|(%d+))$')
  local til = digest and redis.pcall('ZSCORE', bucket .. 'waiting:' .. digest, place)
  if type(til) == 'string' and tonumber(til) > now and #since <= MICROSECONDS then
    number, first = number + 1, math.min(first or tonumber(since), tonumber(since))
  end
end
return { number, first and whole(first) or '' }
