-- Keeps a worker's claims from being taken over and shows that it lives.
-- KEYS: prompts, claims, workers. ARGV: group, worker, then entry id, index and token of each claim.
-- Returns the indices whose claim was lost.
redis.call('HINCRBY', KEYS[3], ARGV[2], 1)
local lost = {}
for at = 3, #ARGV, 3 do
  if redis.call('HGET', KEYS[2], ARGV[at + 1]) == ARGV[at + 2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[at], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[at + 1]
  end
end
return lost
