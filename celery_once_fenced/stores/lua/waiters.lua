-- Who waits for resources in this bucket, for people (C10).
--
-- ARGV  1 resource  2 digest of the key that has it, whose own line counts as well, or ""; then the next two, and so on
-- Answers {waiters, since of the first of other keys in unix ms or ""} for each; of very many, of some.  Changes nothing.

local LOOKED_AT = 1000

local function of_other_keys(resource)
  local wanted = bucket .. 'wanted:' .. redis.sha1hex(resource)
  local number, first = 0, nil
  for _, entry in ipairs(redis.pcall('ZRANGEBYSCORE', wanted, '(' .. now, '+inf', 'LIMIT', 0, LOOKED_AT)) do
    local digest, place, since = entry:match('^(%x+)|([^|]*|(%d+))$')
    local til = digest and redis.pcall('ZSCORE', bucket .. 'waiting:' .. digest, place)
    if type(til) == 'string' and tonumber(til) > now and #since <= MICROSECONDS then
      number, first = number + 1, math.min(first or tonumber(since), tonumber(since))
    end
  end
  return number, first
end

local function of_its_own(digest)
  local number = redis.pcall('ZCOUNT', bucket .. 'waiting:' .. digest, '(' .. now, '+inf')
  return type(number) == 'number' and number or 0
end

local said = {}
for i = 1, #ARGV, 2 do
  local number, first = of_other_keys(ARGV[i])
  if ARGV[i + 1] ~= '' then
    number = number + of_its_own(ARGV[i + 1])
  end
  said[#said + 1] = { number, first and whole(first) or '' }
end
return said
