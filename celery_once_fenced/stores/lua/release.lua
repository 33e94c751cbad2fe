-- Free a slot from outside: a failed publish, a revoke, a person (E11, W3).
--
-- ARGV  1 digest  2 slot  3 name of the slot  4 holder (the delivery for q)
--       5 "1" where this question is sent a second time for want of an answer
-- Answers 1 if the slot was this holder's, else 0.
--
-- Of this holder → freed.  Of another, or gone → nothing.  Gone on the second sending: the first one freed it.

local digest, slot, name, holder, again = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local hold = occupant(slot, name)
local ours = hold ~= nil and hold.holder == holder
if ours then
  free(slot, name, digest, hold.task)
end
sweep()
return (ours or (again and hold == nil)) and 1 or 0
