-- Decides one optimizer step: its operations, the prompts that it consumes and the cursor behind it, all or nothing.
-- KEYS: cursor, ledger, groups, operations.
-- ARGV: attempt, first op id, number of operations, the operations, number of cursor fields, names and values,
--       state of the prompts, then index and stream entry of each.
-- Returns 'logged', or 'known' when the same step was logged before (a retried call).
if redis.call('HGET', KEYS[1], 'attempt') ~= ARGV[1] then return redis.error_reply('FENCED') end
local first, operations = tonumber(ARGV[2]), tonumber(ARGV[3])
local last = tonumber(redis.call('HGET', KEYS[1], 'op_id') or '0')
if last >= first + operations - 1 then return 'known' end
if last ~= first - 1 then return redis.error_reply('GAP after operation ' .. last) end
local at = 4 + operations
local fields = tonumber(ARGV[at])
local prompts = at + 2 * fields + 2
for each = prompts, #ARGV, 2 do
  local state = redis.call('HGET', KEYS[2], ARGV[each])
  if state ~= 'emitted' then return redis.error_reply('PROMPT ' .. ARGV[each] .. ' is ' .. tostring(state)) end
end
for each = 1, operations do redis.call('HSET', KEYS[4], first + each - 1, ARGV[3 + each]) end
for each = 0, fields - 1 do redis.call('HSET', KEYS[1], ARGV[at + 1 + 2 * each], ARGV[at + 2 + 2 * each]) end
redis.call('HSET', KEYS[1], 'op_id', first + operations - 1)
for each = prompts, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[each], ARGV[prompts - 1])
  redis.call('XDEL', KEYS[3], ARGV[each + 1])
end
return 'logged'
