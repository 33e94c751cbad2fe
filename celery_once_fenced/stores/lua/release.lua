-- Free a slot from outside: a failed publish, a revoke, a person (E11, W3).
--
-- ARGV  1 digest  2 slot  3 name of the slot  4 holder (the delivery for q)  5 "1" where a person decided so
--       6 "1" where this question is sent a second time for want of an answer
-- Answers 1 if the slot was this holder's, else 0.
--
-- Of this holder → freed.  Of another, or gone → nothing.  Gone on the second sending: the first one freed it.
-- By a person → counted, and r leaves a mark for its holder, who is to know that this is no loss (E7): for what was left
-- of its lease, within which a live holder renews.

local digest, slot, name, holder = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local by_hand, again = ARGV[5] == '1', ARGV[6] == '1'
local hold = occupant(slot, name)
local ours = hold ~= nil and hold.holder == holder
if ours then
  local ms = left(hold, 1)
  free(slot, name, digest, hold.task)
  if by_hand and hold.task ~= '' then
    if slot == 'r' then
      redis.pcall('SET', bucket .. 'freed:' .. holder, '1', 'PX', math.max(ms, 1))
    end
    count(hold.task, 'released_by_hand')
  end
end
sweep()
return (ours or (again and hold == nil)) and 1 or 0
