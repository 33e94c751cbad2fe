-- Extend many running holds of one bucket (E5).
--
-- ARGV  1 task  2 lease in ms  then three for each hold: digest, name of r ("" = the digest), holder
-- Answers 1 or 0 for each: whether it was still the holder's.
--
-- r is of this holder → extended.  Anything else, also nothing → 0: a lease that lapsed is never made again, and
-- another's is not touched.  Compare and PEXPIRE: works on a server that is full.

-- A process renews many at once, so a value is not taken apart: it is of the holder, a random id, whose name it begins with.

local task, ttl, said, scores = ARGV[1], tonumber(ARGV[2]), {}, {}

local function is_of(holder, value)
  return type(value) == 'string' and value:sub(1, #holder + 1) == holder .. '|'
end

for i = 3, #ARGV, 3 do
  local digest, name = ARGV[i], ARGV[i + 1]
  local key = bucket .. 'r:' .. (name ~= '' and name or digest)
  local ours = is_of(ARGV[i + 2], redis.pcall('GET', key))
  if ours then
    redis.call('PEXPIRE', key, ttl)
    scores[#scores + 1] = now + ttl
    scores[#scores + 1] = 'r|' .. name .. '|' .. digest .. '|' .. task
  end
  said[#said + 1] = ours and 1 or 0
end
if #scores > 0 then
  redis.pcall('ZADD', index, unpack(scores))
  count(task, 'renewed', #scores / 2)
end
sweep()
return said
