-- Closes groups that are not trained on. KEYS: cursor, ledger, groups.
-- ARGV: attempt, then index, state and stream entry of each group.
if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[1] then return redis.error_reply('FENCED') end
for at = 2, #ARGV, 3 do
  if redis.call('HGET', KEYS[2], ARGV[at]) == 'emitted' then redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1]) end
  redis.call('XDEL', KEYS[3], ARGV[at + 2])
end
return 1
