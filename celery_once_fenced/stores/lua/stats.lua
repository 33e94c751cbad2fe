-- The counters of a bucket: {task, {field, value, …}} for each task.
-- Expiries nobody was there to see are counted first, up to a bound.

sweep(1000)
local said = {}
for _, task in ipairs(redis.call('SMEMBERS', bucket .. 'tasks')) do
  said[#said + 1] = { task, redis.call('HGETALL', bucket .. 'stats:' .. task) }
end
return said
