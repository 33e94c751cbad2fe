-- What became of a replacement (E13a).
--
-- ARGV  1 digest  2 delivery  3 "1" = it is published, "0" = it is not and never will be
-- Answers 1 where this delivery had something to confirm, else 0.
--
-- published     → what it displaced is forgotten: an older message is superseded from now on
-- not published → q goes back to the hold it displaced, for the time that had left, else it is freed
-- q is another's by now → that one's displacement stands, and is not touched

local digest, delivery, published = ARGV[1], ARGV[2], ARGV[3] == '1'
local aside = displacement(digest)
local ours = aside ~= nil and aside.delivery == delivery

local function restore()
  local q = occupant('q', digest)
  if not q or q.delivery ~= delivery then
    return
  end
  local was, ms = parse('q', aside and ours and aside.value or ''), ours and aside.til - now or 0
  if was and ms > 0 then
    occupy('q', digest, digest, was.task, ms, was.value, q)
  else
    free('q', digest, digest, q.task)
  end
end

if not published then
  restore()
end
if ours then
  redis.call('DEL', bucket .. 'displaced:' .. digest)
end
sweep()
return ours and 1 or 0
