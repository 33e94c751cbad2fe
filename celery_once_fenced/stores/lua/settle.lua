-- The result is out: the ending mark of a delivery becomes its tombstone (E8).
--
-- ARGV  1 delivery  2 window in ms, 0 = no tombstone
--
-- Whoever settles a delivery has finished it, so nothing is compared; a second time changes nothing but the time.

local delivery, window = ARGV[1], tonumber(ARGV[2])
if window > 0 then
  redis.call('SET', bucket .. 'done:' .. delivery, '1', 'PX', window)
end
redis.call('DEL', bucket .. 'ending:' .. delivery)
sweep()
return 1
