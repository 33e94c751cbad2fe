-- Counts a stretch of a bucket's index by slot and task (E19: no KEYS, no SCAN).  ARGV  1 first rank  2 how many
-- Answers {next rank or -1, members in all, {slot, task, how many, since of the oldest running hold or 0}…, {"worker", name}…}.
-- A renewal between two stretches moves a member, so a sum over several is a good estimate.  Changes nothing.

local CHUNK = 500
local DIGEST = 64
local MANY_WORKERS = 100
local from, size = tonumber(ARGV[1]), tonumber(ARGV[2])
local counts = { q = {}, r = {} }
local oldest, workers, worker_count = {}, {}, 0

local function look_at(keys, tasks)
  for i, value in ipairs(#keys > 0 and redis.call('MGET', unpack(keys)) or {}) do
    local since, worker = (value or ''):match('^[^|]+|[^|]*|[^|]*|(%d+)|([^|]*)|')
    if since and #since <= MICROSECONDS then
      local known = oldest[tasks[i]]
      if not known or #since < #known or (#since == #known and since < known) then
        oldest[tasks[i]] = since
      end
      if not workers[worker] and worker_count < MANY_WORKERS then
        workers[worker], worker_count = true, worker_count + 1
      end
    end
  end
end

local rank, through = from, false
while rank < from + size and not through do
  local members = redis.call('ZRANGE', index, rank, rank + CHUNK - 1)
  local keys, tasks = {}, {}
  for _, entry in ipairs(members) do
    local slot, bar = entry:sub(1, 1), entry:find('|', 3, true)
    local counted = bar and counts[slot]
    if counted then
      local task = entry:sub(bar + DIGEST + 2)
      counted[task] = (counted[task] or 0) + 1
      if slot == 'r' then
        keys[#keys + 1], tasks[#tasks + 1] = bucket .. 'r:' .. (bar > 3 and entry:sub(3, bar - 1) or entry:sub(4, DIGEST + 3)), task
      end
    end
  end
  look_at(keys, tasks)
  rank = rank + #members
  through = #members < CHUNK
end

local answer = { through and -1 or rank, redis.call('ZCARD', index) }
for slot, by_task in pairs(counts) do
  for task, number in pairs(by_task) do
    answer[#answer + 1] = { slot, task, number, slot == 'r' and oldest[task] or 0 }
  end
end
for worker in pairs(workers) do
  answer[#answer + 1] = { 'worker', worker }
end
return answer
