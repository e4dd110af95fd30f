-- Counts a failure of a prompt, which goes back to the stream, or at the limit to the dead letters (the trainer hears).
-- KEYS: ledger, prompts, claims, attempts, dead, groups, samples, takes.
-- ARGV: group, entry id, index, token, counted (0 or 1), limit, error.
local index = ARGV[3]
if redis.call('HGET', KEYS[3], index) ~= ARGV[4] then return 'stale' end
local attempts = redis.call('HINCRBY', KEYS[4], index, ARGV[5])
local entry = redis.call('XRANGE', KEYS[2], ARGV[2], ARGV[2])[1]
redis.call('XACK', KEYS[2], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[2], ARGV[2])
redis.call('HDEL', KEYS[3], index)
-- A peer that was away is no sign that the prompt takes its workers down.
if ARGV[5] == '0' then redis.call('HINCRBY', KEYS[8], index, -1) end
if attempts < tonumber(ARGV[6]) and entry then
  redis.call('XADD', KEYS[2], '*', unpack(entry[2]))
  return 'retry'
end
redis.call('HSET', KEYS[1], index, 'dead')
redis.call('HDEL', KEYS[7], index)
redis.call('HDEL', KEYS[8], index)
redis.call('HDEL', KEYS[4], index)
redis.call('XADD', KEYS[5], '*', 'i', index, 'error', ARGV[7])
redis.call('XADD', KEYS[6], '*', 'i', index, 'p', '')
return 'dead'
