-- The counters of a bucket: {task, {field, value, …}} for each task, to be added up.
-- Expiries nobody was there to see are counted first, up to a bound.

sweep(1000)
local said = {}
for _, task in ipairs(redis.call('SMEMBERS', bucket .. 'tasks')) do
  said[#said + 1] = { task, redis.call('HGETALL', bucket .. 'stats:' .. task) }
  local of_hours = {}
  for _, row in ipairs(hourly(task)) do
    of_hours[#of_hours + 1] = row[2]
    of_hours[#of_hours + 1] = row[3]
  end
  said[#said + 1] = { task, of_hours }
end
return said
