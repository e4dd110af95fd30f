-- Turns delivered stream entries into claims with a fencing token. A prompt that is not open any more is acknowledged.
-- KEYS: ledger, prompts, claims, counters, samples, takes. ARGV: group, then entry id and index of each entry.
-- Returns one {token, takes, stored samples} per entry; token 0 means that there is nothing to do.
local answers = {}
for at = 2, #ARGV, 2 do
  local entry, index = ARGV[at], ARGV[at + 1]
  if redis.call('HGET', KEYS[1], index) ~= 'issued' then
    redis.call('XACK', KEYS[2], ARGV[1], entry)
    redis.call('XDEL', KEYS[2], entry)
    answers[#answers + 1] = {0, 0, ''}
  else
    local token = redis.call('HINCRBY', KEYS[4], 'token', 1)
    redis.call('HSET', KEYS[3], index, token)
    local takes = redis.call('HINCRBY', KEYS[6], index, 1)
    answers[#answers + 1] = {token, takes, redis.call('HGET', KEYS[5], index) or ''}
  end
end
return answers
