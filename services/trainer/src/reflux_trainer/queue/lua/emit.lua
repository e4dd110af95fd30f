-- Hands a graded group to the trainer exactly once.
-- KEYS: ledger, prompts, claims, samples, groups, takes, attempts. ARGV: group, entry id, index, token, payload.
local state = redis.call('HGET', KEYS[1], ARGV[3])
if state ~= 'issued' then
  redis.call('XACK', KEYS[2], ARGV[1], ARGV[2])
  redis.call('XDEL', KEYS[2], ARGV[2])
  return 'duplicate'
end
if redis.call('HGET', KEYS[3], ARGV[3]) ~= ARGV[4] then return 'stale' end
redis.call('XADD', KEYS[5], '*', 'i', ARGV[3], 'p', ARGV[5])
redis.call('HSET', KEYS[1], ARGV[3], 'emitted')
redis.call('XACK', KEYS[2], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[2], ARGV[2])
redis.call('HDEL', KEYS[3], ARGV[3])
redis.call('HDEL', KEYS[4], ARGV[3])
redis.call('HDEL', KEYS[6], ARGV[3])
redis.call('HDEL', KEYS[7], ARGV[3])
return 'emitted'
