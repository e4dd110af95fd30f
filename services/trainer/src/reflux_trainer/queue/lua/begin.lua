-- Opens the queue for one attempt of the trainer; an older attempt is fenced from then on. The cursor is set once.
-- KEYS: cursor. ARGV: attempt, then names and values of the first cursor. Returns 1 when the cursor is new.
local known = redis.call('HGET', KEYS[1], 'attempt')
if known and tonumber(known) > tonumber(ARGV[1]) then return redis.error_reply('FENCED') end
redis.call('HSET', KEYS[1], 'attempt', ARGV[1])
if known then return 0 end
for at = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1]) end
return 1
