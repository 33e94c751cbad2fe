-- Extend many running holds of one bucket (E5).
--
-- ARGV  five for each: digest, name of r, task, holder, lease in ms
-- Answers 1 or 0 for each: whether it was still the holder's.
--
-- r is of this holder → extended.  Anything else, also nothing → 0: a lease that lapsed is never made again, and
-- another's is not touched.  Compare and PEXPIRE: works on a server that is full.

local said, renewed = {}, {}
for i = 1, #ARGV, 5 do
  local digest, name, task, holder, ttl = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], tonumber(ARGV[i + 4])
  local r = occupant('r', name)
  local ours = r ~= nil and r.holder == holder
  if ours then
    extend('r', name, digest, r.task, ttl)
    renewed[task] = (renewed[task] or 0) + 1
  end
  said[#said + 1] = ours and 1 or 0
end
for task, times in pairs(renewed) do
  count(task, 'renewed', times)
end
sweep()
return said
