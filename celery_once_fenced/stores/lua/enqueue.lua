-- Take q for a message that is about to be published (E3, E10, D1).
--
-- ARGV  1 digest  2 task  3 flags of the span  4 mode  5 delivery  6 task id  7 hold in ms  8 text
-- Answers 1, or who is in the way: {slot, value, ms left}.
--
-- mine (q of this delivery) → extended, granted: the reply to the first sending was lost
-- new, awaited              → refused by q and r as the span says (q is named first), else q is taken
-- successor                 → q is taken if it is free or of the same task id; never refused (E10)
-- deferred                  → its own q is extended, nothing else; never refused (D1)
-- A q that start does not clear is a window (until_expired): only a new call opens one, and nothing moves its end.
-- A hold is never shortened here.

local digest, task, flags, mode, delivery, task_id = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local ttl, text = tonumber(ARGV[7]), ARGV[8]

local function has(flag)
  return flags:find(flag, 1, true) ~= nil
end

local window = has('Q') and not has('c')
local q = occupant('q', digest)
local mine = q ~= nil and q.delivery == delivery

local function take()
  occupy('q', digest, digest, task, ttl, table.concat({ delivery, task_id, now_us, task, text }, '|'), q)
end

local function keep()
  if not window and left(q) < ttl then
    extend('q', digest, digest, q.task, ttl)
  end
end

local function in_the_way()
  if q and has('q') then
    return q
  end
  return has('r') and occupant('r', digest) or nil
end

local function answer()
  if mode == 'deferred' then
    if mine then
      keep()
    end
    count(task, 'deferred')
  elseif mode == 'successor' then
    if mine then
      keep()
    elseif has('Q') and not window and (not q or (q.task_id == task_id and task_id ~= '')) then
      take()
    end
  elseif mine and has('Q') then
    keep()
  else
    local by = in_the_way()
    if by then
      count(task, mode == 'awaited' and 'awaiting' or 'suppressed')
      return { by.slot, by.value, left(by, ttl) }
    end
    if has('Q') then
      take()
    end
  end
  return 1
end

local said = answer()
sweep()
return said
