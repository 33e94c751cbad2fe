-- Ask to run: q becomes r, as the span says (E1, E3, E8, E9, E10).
--
-- ARGV  1 digest  2 name of r  3 task  4 flags of the span  5 delivery  6 holder  7 task id  8 worker  9 lease in ms
--       10 "1" where a redelivery is possible  11 text
-- Answers {what, ms to wait} and, where a hold is in the way, its value.
--
-- mine (r of this very holder)   → extended, granted: the reply to the first sending was lost
-- this delivery left a tombstone → done; its own q, a leftover, is freed
-- this delivery left its mark    → ending: its result is not out yet
-- r is of this delivery          → twin: the same message runs elsewhere, or ran and its worker died
-- r is of this task id           → successor: the delivery before this one (a retry's) is still in its body
-- r is of another                → busy
-- else                           → granted: r is set; q is freed if it is of this delivery or task id
-- Nothing of another's is extended or freed.  A late caller, whose lease lapsed meanwhile, gets what anybody gets.

local digest, name, task, flags, delivery, holder = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local task_id, worker, ttl, redelivery, text = ARGV[7], ARGV[8], tonumber(ARGV[9]), ARGV[10] == '1', ARGV[11]

local function has(flag)
  return flags:find(flag, 1, true) ~= nil
end

local function same_task(hold)
  return hold.task_id == task_id and task_id ~= ''
end

local function clear_q(also_of_the_task)
  local q = has('c') and occupant('q', digest)
  if q and (q.delivery == delivery or (also_of_the_task and same_task(q))) then
    free('q', digest, digest, q.task)
  end
end

local function relation(r)
  if r.delivery == delivery and delivery ~= '' then
    return 'twin'
  end
  return same_task(r) and 'successor' or 'busy'
end

local function answer()
  local r = (has('n') or has('R')) and occupant('r', name) or nil
  if r and r.holder == holder then
    extend('r', name, digest, r.task, ttl)
    return { 'granted', 0 }, false
  end
  if redelivery and redis.call('EXISTS', bucket .. 'done:' .. delivery) == 1 then
    clear_q(false)
    return { 'done', 0 }, true
  end
  local ending = redelivery and redis.call('PTTL', bucket .. 'ending:' .. delivery) or -2
  if ending ~= -2 then
    return { 'ending', math.max(ending, 0) }, true
  end
  if r and has('n') then
    return { relation(r), left(r, ttl), r.value }, true
  end
  if has('R') then
    occupy('r', name, digest, task, ttl, table.concat({ holder, task_id, delivery, now_us, worker, task, text }, '|'), r)
  end
  clear_q(true)
  return { 'granted', 0 }, true
end

local said, first = answer()
if first then
  count(task, said[1])
end
sweep()
return said
