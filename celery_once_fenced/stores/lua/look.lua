-- Who holds one key.  ARGV  1 digest
-- Answers {slot, value, ms left} for q and r, as far as they are occupied.  Changes nothing but the bookkeeping.

local said = {}
for _, slot in ipairs({ 'q', 'r' }) do
  local hold = occupant(slot, ARGV[1])
  if hold then
    said[#said + 1] = { slot, hold.value, left(hold) }
  end
end
sweep()
return said
