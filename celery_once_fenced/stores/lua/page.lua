-- Holds of a bucket that a page wants, beside a cursor in the order of the index (E19: no KEYS, no SCAN).
--
-- ARGV  1 "next" or "prev"  2 score and 3 member of the cursor, "" = from the end  4 how many holds, at most
--       5 how many members to look at, at most  6 slot, or ""
--       7 tasks, one per line, or "": "task", or "task|microseconds" before which a running hold must have begun
--       8 worker, or ""
--       9 lower-case texts, one per line, or "": one of them task, task id or worker has in it, or it is the holder, or
--         the beginning of the digest; encoded, as those fields are
--       10 "1": with waiters only
--       11 the same texts as they are: the key, which is not encoded, has one of them in it
-- Answers {members in all, score, member, {score, member, value, ms left, waiters}, …}: score and member are those of
-- the last one looked at, false where the bucket is through.  Changes nothing.
--
-- Most of what is looked at is not wanted, so as little as possible is done with it: no pattern is matched before a
-- chunk is known to hold the text at all.

local CHUNK = 500
local step = ARGV[1] == 'next' and 1 or -1
local cursor, at = ARGV[2], ARGV[3]
local limit, budget = tonumber(ARGV[4]), tonumber(ARGV[5])
local slot_wanted, worker_wanted, waited = ARGV[6], ARGV[8], ARGV[10] == '1'
local DIGEST = 64

local function lines(given)
  local found = {}
  for line in given:gmatch('[^\n]+') do
    found[#found + 1] = line
  end
  return found
end

local needles, plain = lines(ARGV[9]), lines(ARGV[11])

local tasks = ARGV[7] ~= '' and {} or nil
for line in ARGV[7]:gmatch('[^\n]+') do
  local task, before = line:match('^([^|]*)|?(%d*)$')
  tasks[task or line] = before or ''
end

-- The rank that follows the cursor.  Where its member has gone, that of its score: what shares it is met again.
local function first()
  if cursor == '' then
    return step == 1 and 0 or redis.call('ZCARD', index) - 1
  end
  local rank = redis.call('ZRANK', index, at)
  if rank and tonumber(redis.call('ZSCORE', index, at)) == tonumber(cursor) then
    return rank + step
  elseif step == 1 then
    return redis.call('ZCOUNT', index, '-inf', '(' .. cursor)
  end
  return redis.call('ZCOUNT', index, '-inf', cursor) - 1
end

-- The members from `rank` on, in the order of the page.
local function chunk(rank, size)
  if rank < 0 then
    return {}
  elseif step == 1 then
    return redis.call('ZRANGE', index, rank, rank + size - 1)
  end
  local back = redis.call('ZCARD', index) - 1 - rank
  return redis.call('ZREVRANGE', index, back, back + size - 1)
end

-- Those that the index itself does not rule out, and the keys of their slots.
local function candidates(members)
  local rows, keys = {}, {}
  for i, entry in ipairs(members) do
    local slot = entry:sub(1, 1)
    if slot_wanted == '' or slot == slot_wanted then
      local bar = entry:find('|', 3, true)
      if bar and (not tasks or tasks[entry:sub(bar + DIGEST + 2)]) then
        rows[#rows + 1] = i
        keys[#keys + 1] = bucket .. slot .. ':' .. (bar > 3 and entry:sub(3, bar - 1) or entry:sub(4, DIGEST + 3))
      end
    end
  end
  return rows, keys
end

-- Whether one of some needles is in a text, which is lower case.
local function has_one(of, text)
  for _, needle in ipairs(of) do
    if text:find(needle, 1, true) then
      return true
    end
  end
  return false
end

local function has(field)
  return has_one(needles, field:lower())
end

-- Whether a value may have one in any of its fields.
local function has_any(value)
  local text = value:lower()
  return has_one(needles, text) or has_one(plain, text)
end

-- The values of the candidates as one text, to see at once whether any of them can match.
local function may_match(members, values)
  if #needles == 0 and worker_wanted == '' then
    return true
  end
  local present = {}
  for i = 1, #values do
    present[i] = values[i] or ''
  end
  local text = table.concat(present, '\n')
  return (worker_wanted == '' or text:find('|' .. worker_wanted .. '|', 1, true))
    and (#needles == 0 or has_any(text) or has_one(needles, table.concat(members, '\n')))
end

-- Whether a hold runs for long enough, where that is asked.
local function is_old(task, since)
  local before = tasks and tasks[task] or ''
  return before == '' or (since and (#since < #before or (#since == #before and since < before)))
end

-- Whether a needle names a hold: its holder, or the beginning of its digest.
local function is_named(holder, digest)
  for _, needle in ipairs(needles) do
    if holder == needle or digest:sub(1, #needle) == needle then
      return true
    end
  end
  return false
end

-- Whether a value is a hold of the task the index names, as in list.lua, and one that is wanted.
local function matches(entry, value)
  if #needles > 0 and not has_any(value) and not has(entry) then
    return false
  end
  local slot, _, digest, task = entry:match('^([qr])|([^|]*)|([^|]*)|(.*)$')
  local holder, task_id, _, since, worker, named, text
  if slot == 'r' then
    holder, task_id, _, since, worker, named, text = value:match(LAYOUT.r)
  elseif slot then
    holder, task_id, _, named, text = value:match(LAYOUT.q)
    worker = ''
  end
  if not holder or named ~= task or not is_old(task, since) or (worker_wanted ~= '' and worker ~= worker_wanted) then
    return false
  end
  return #needles == 0 or has_one(plain, text:lower()) or has(task) or has(task_id) or has(worker) or is_named(holder, digest)
end

-- How many messages wait for a hold; a queued call does not wait for itself.
local function waiters(entry, value)
  local bar = entry:find('|', 3, true)
  local digest = entry:sub(bar + 1, bar + DIGEST)
  local number = redis.pcall('ZCOUNT', bucket .. 'waiting:' .. digest, '(' .. now, '+inf')
  if type(number) ~= 'number' or number == 0 then
    return 0
  end
  local own = entry:sub(1, 1) == 'q' and in_line(digest, value:match('^[^|]*'))
  return own and number - 1 or number
end

local said = {}

-- Adds what is wanted of these members; returns how many of them it came to.
local function read(members)
  local rows, keys = candidates(members)
  local values = #keys > 0 and redis.call('MGET', unpack(keys)) or {}
  if may_match(members, values) then
    for i, place in ipairs(rows) do
      local entry, value = members[place], values[i]
      local number = value and waited and waiters(entry, value)
      if value and number ~= 0 and matches(entry, value) then
        local score = redis.call('ZSCORE', index, entry)
        said[#said + 1] = { score, entry, value, redis.call('PTTL', keys[i]), number or waiters(entry, value) }
        if #said == limit then
          return place
        end
      end
    end
  end
  return #members
end

local looked, member = 0, false
local rank, size = first(), (slot_wanted == '' and ARGV[7] == '' and #needles == 0 and worker_wanted == '' and not waited)
  and limit or CHUNK
while looked < budget and #said < limit do
  local members = chunk(rank, size)
  if #members == 0 then
    member = false
    break
  end
  local read_of_them = read(members)
  looked, rank, member = looked + read_of_them, rank + step * read_of_them, members[read_of_them]
end

local answer = { redis.call('ZCARD', index), member and redis.call('ZSCORE', index, member), member }
for _, row in ipairs(said) do
  answer[#answer + 1] = row
end
return answer
