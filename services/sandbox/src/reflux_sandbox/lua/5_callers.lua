-- What callers change: cancelling, order, dead letters. The last lines run the operation.

-- ids, run, group, older_than (of policies; '' and 0: any), keep_seconds -> {{id, owner or ''} of those ended now},
-- then the ids that are unknown
function operations.cancel(a)
  local ended, unknown = {}, {}
  for _, id in ipairs(a.ids) do
    local row = fields_of(id, 'state', 'owner', 'run', 'group', 'policy')
    local wanted = (a.run == '' or row.run == a.run) and (a.group == '' or row.group == a.group)
      and (a.older_than == 0 or tonumber(row.policy or 0) < a.older_than)
    if not row.state then
      unknown[#unknown + 1] = id
    elseif row.state ~= 'ended' and wanted then
      end_unknown(id, 'cancelled', a.message, a.keep_seconds)
      ended[#ended + 1] = { id, row.state == 'running' and row.owner or '' }
    end
  end
  return { ended, unknown }
end

-- id, head_start_us, priority -> 1 when the job still waits
function operations.prefer(a)
  local row = fields_of(a.id, 'state', 'queue', 'verifier', 'score', 'head_start')
  if not row.state then return nil end
  if row.state == 'ended' then return 0 end
  local score = tonumber(row.score) + tonumber(row.head_start or 0) - a.head_start_us
  redis.call('HSET', job(a.id), 'score', score, 'head_start', a.head_start_us, 'priority', a.priority)
  if row.state == 'queued' then
    redis.call('ZADD', p .. 'queue:' .. row.queue, 'XX', score, row.verifier .. SEPARATOR .. a.id)
  end
  return row.state == 'running' and 0 or 1
end

-- id -> 1 when it was a dead letter
function operations.forget(a)
  if not redis.call('ZSCORE', p .. 'dead', a.id) then return 0 end
  forget_dead_letter(a.id)
  return 1
end

local raw = {}
for i = 3, #ARGV do raw[i - 2] = ARGV[i] end
return operations[ARGV[1]](cjson.decode(ARGV[2]), raw)
