-- Forgets operations that a committed checkpoint covers. KEYS: cursor, operations. ARGV: last covered operation.
local from = tonumber(redis.call('HGET', KEYS[1], 'trimmed_op_id') or '0')
local to = tonumber(ARGV[1])
if to <= from then return 0 end
for id = from + 1, to do redis.call('HDEL', KEYS[2], id) end
redis.call('HSET', KEYS[1], 'trimmed_op_id', to)
return to - from
