-- One page of the holds of a bucket, soonest to lapse first, from the index (E19: no KEYS, no SCAN).
--
-- ARGV  1 lowest score  2 how many at that score to leave out  3 page size
-- Answers {members looked at, score of the last one, how many of them have that score, "ms left|member|value"…}, with
-- those only whose hold is there.  One text for each: a list of lists takes a client several times as long to read.

sweep(100)
local page = redis.call('ZRANGEBYSCORE', index, ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', ARGV[2], ARGV[3])
local last, same = page[#page] or ARGV[1], 0
local said = { #page / 2, last, 0 }
for i = 1, #page, 2 do
  local slot, name, _, task = page[i]:match('^([qr])|([^|]*)|([^|]*)|(.*)$')
  local hold = slot and occupant(slot, name)
  if hold and hold.task == task then
    said[#said + 1] = whole(left(hold)) .. '|' .. page[i] .. '|' .. hold.value
  end
  if page[i + 1] == last then
    same = same + 1
  end
end
said[3] = same
return said
