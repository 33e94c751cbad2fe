-- One page of the holds of a bucket, soonest to lapse first, from the index (E19: no KEYS, no SCAN).
--
-- ARGV  1 lowest score  2 how many at that score to leave out  3 page size
-- Answers {score, member, value, ms left} for each member; value is false where the hold has gone.

sweep(100)
local said = {}
local page = redis.call('ZRANGEBYSCORE', index, ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', ARGV[2], ARGV[3])
for i = 1, #page, 2 do
  local slot, name, _, task = page[i]:match('^([qr])|([^|]*)|([^|]*)|(.*)$')
  local hold = slot and occupant(slot, name)
  local listed = hold and hold.task == task
  said[#said + 1] = { page[i + 1], page[i], listed and hold.value or false, listed and left(hold) or 0 }
end
return said
