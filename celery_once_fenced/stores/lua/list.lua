-- One page of the holds of a bucket, soonest to lapse first, from the index (E19: no KEYS, no SCAN).
--
-- ARGV  1 lowest score  2 how many at that score to leave out  3 page size
-- Answers {members looked at, score of the last one, how many of them have that score, "ms left|member|value"…}, with
-- those only that have a value; the reader sees whether it is a hold of the task that the member names.  One text for
-- each: a list of lists takes a client several times as long to read.

sweep(100)
local page = redis.call('ZRANGEBYSCORE', index, ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', ARGV[2], ARGV[3])
local last, same = page[#page] or ARGV[1], 0
local said, keys = { #page / 2, last, 0 }, {}
for i = 1, #page, 2 do
  local slot, name = parts(page[i])
  keys[#keys + 1] = slot and bucket .. slot .. ':' .. name or bucket .. 'none'
  if page[i + 1] == last then
    same = same + 1
  end
end
for i, value in ipairs(#keys > 0 and redis.call('MGET', unpack(keys)) or {}) do
  if value then
    said[#said + 1] = whole(math.max(page[2 * i] - now, 0)) .. '|' .. page[2 * i - 1] .. '|' .. value
  end
end
said[3] = same
return said
