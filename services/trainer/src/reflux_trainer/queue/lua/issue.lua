-- Puts prompts on the stream; an index that the ledger knows is left alone.
-- KEYS: cursor, ledger, prompts. ARGV: attempt, then index and payload of each prompt. Returns the number issued.
if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[1] then return redis.error_reply('FENCED') end
local issued = 0
for at = 2, #ARGV, 2 do
  local index = ARGV[at]
  if redis.call('HSETNX', KEYS[2], index, 'issued') == 1 then
    redis.call('XADD', KEYS[3], '*', 'i', index, 'p', ARGV[at + 1])
    issued = issued + 1
  end
  local following = tonumber(index) + 1
  if following > tonumber(redis.call('HGET', KEYS[1], 'next_prompt_index') or '0') then
    redis.call('HSET', KEYS[1], 'next_prompt_index', following)
  end
end
return issued
