-- Keeps generated samples, so that a worker that takes over need not generate again.
-- KEYS: claims, samples. ARGV: index, token, samples. Returns 1, or 0 when the claim was lost.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
return 1
