-- The result is out: the ending mark of a delivery becomes its tombstone (E8).
--
-- ARGV  1 delivery  2 window in ms, 0 = no tombstone
--       3 digest  4 number under which the body ran, where it ended and may have run a kept call (E13b), or ""
--       5 when it began to wait, or "": it did not (D3)
--
-- Whoever settles a delivery has finished it, so nothing is compared; a second time changes nothing but the time.
-- A kept call that has run is forgotten, unless a newer one has come in its place.
-- A delivery that ran without a start (E17) is still in the line: it leaves it here.

local delivery, window, digest, seq, waited = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), ARGV[5] or ''
if window > 0 then
  redis.call('SET', bucket .. 'done:' .. delivery, '1', 'PX', window)
end
redis.call('DEL', bucket .. 'ending:' .. delivery)
if seq and (last_kept(digest)) == seq then
  redis.call('DEL', bucket .. 'next:' .. digest)
end
if waited ~= '' then
  redis.pcall('ZREM', bucket .. 'waiting:' .. digest, delivery .. '|' .. waited)
end
sweep()
return 1
