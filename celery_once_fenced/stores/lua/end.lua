-- The body is over: free r, and leave what the delivery needs next (E8, E8b, C10).
--
-- ARGV  1 digest  2 name of r  3 task  4 delivery  5 holder  6 task id  7 mark in ms  8 requeue in ms
--       9 histogram field ("" = no body ran)  10 ms it ran  11 more counters, with spaces between  12 text
--       13 number of the call, or ""  14 "1" where the holder knows that a person released r
--       15 "1" where this question is sent a second time for want of an answer
-- Answers 1 if r was this holder's, else 0.
--
-- r is of this holder → freed.  Of another, or gone: we are late, and nothing of the next holder's is touched.  Gone on
-- the second sending: the first one freed it.  Released by a person → that is counted already, and it is not lost.
-- mark    → "ending" is left in any case, also by a late caller: its result is still on its way out
-- requeue → q goes back to this delivery if it is free

local digest, name, task, delivery, holder, task_id = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local mark, requeue, field, ran, extra, text = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9], tonumber(ARGV[10]), ARGV[11], ARGV[12]
local seq, freed, again = ARGV[13] ~= '' and ARGV[13] or now_us, ARGV[14] == '1', ARGV[15] == '1'

local function give_back_q()
  if not occupant('q', digest) then
    occupy('q', digest, digest, task, requeue, table.concat({ delivery, task_id, seq, task, text }, '|'))
  end
end

local function note_duration()
  local stats = bucket .. 'stats:' .. task
  count(task, field)
  count(task, 'hold_sum_ms', ran)
  local longest = redis.pcall('HGET', stats, 'hold_max_ms')
  if not longest or ran > (tonumber(longest) or 0) then
    redis.pcall('HSET', stats, 'hold_max_ms', ran)
  end
end

local r = occupant('r', name)
local ours = r ~= nil and r.holder == holder
local answered = again and r == nil

if ours then
  free('r', name, digest, r.task)
end
if mark > 0 then
  redis.call('SET', bucket .. 'ending:' .. delivery, holder, 'PX', mark)
end
if requeue > 0 then
  give_back_q()
end
if not answered then
  if ours then
    count(task, 'released')
  elseif not freed and redis.call('EXISTS', bucket .. 'freed:' .. holder) == 0 then
    count(task, 'lost')
  end
  if field ~= '' then
    note_duration()
  end
  for counter in extra:gmatch('%S+') do
    count(task, counter)
  end
end
sweep()
return (ours or answered) and 1 or 0
