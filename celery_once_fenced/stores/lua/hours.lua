-- The hourly counters of a bucket.  ARGV  1 how many hours back  2… counters
-- Answers {hour now, {task, "n,n,…"}…}: for each task the oldest hour first, in each hour the counters as asked.

local this_hour = math.floor(clock[1] / 3600)
local said = { this_hour }
for _, task in ipairs(redis.call('SMEMBERS', bucket .. 'tasks')) do
  local fields = {}
  for hour = this_hour - ARGV[1] + 1, this_hour do
    for i = 2, #ARGV do
      fields[#fields + 1] = string.format('%d:%s', hour, ARGV[i])
    end
  end
  local counted = redis.pcall('HMGET', bucket .. 'hours:' .. task, unpack(fields))
  if not counted.err then
    for i = 1, #fields do
      counted[i] = counted[i] or '0'
    end
    said[#said + 1] = { task, table.concat(counted, ',') }
  end
end
return said
