-- All changes of fidelity ladders, each atomic. KEYS[1] is the prefix with the hash tag; ARGV[1] names the operation,
-- ARGV[2] is a JSON document, further ARGV are the events that it tells.
--
-- <p>ladder:<id>           hash: spec and state (JSON), revision, run
-- <p>ladders:open          sorted set: id -> creation (ms) of ladders that have work left
-- <p>ladders:events:<run>  stream: what watchers see
-- <p>ladders:window:<run>  list: records of the calibration, newest first
-- <p>ladders:run:<run>     hash: trusted, newest policy version, records ever, counters; spent:<version> in CPU seconds

local p, a = KEYS[1], cjson.decode(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local operations = {}

local function run_key(run) return p .. 'ladders:run:' .. run end

local function tell(run)
  for i = 3, #ARGV do
    redis.call('XADD', p .. 'ladders:events:' .. run, 'MAXLEN', '~', a.most_events, '*', 'e', ARGV[i])
  end
end

-- A settled ladder whose last verifications are cancelled needs no more attention.
function operations.close()
  return redis.call('ZREM', p .. 'ladders:open', a.id)
end

-- Returns 1 when the ladder is new, 0 when the same request made it before.
function operations.create()
  local key = p .. 'ladder:' .. a.id
  if redis.call('EXISTS', key) == 1 then return 0 end
  redis.call('HSET', key, 'spec', a.spec, 'state', a.state, 'revision', 0, 'run', a.run)
  redis.call('ZADD', p .. 'ladders:open', now, a.id)
  local newest = tonumber(redis.call('HGET', run_key(a.run), 'newest') or '0')
  if a.version > newest then redis.call('HSET', run_key(a.run), 'newest', a.version) end
  redis.call('HINCRBY', run_key(a.run), 'groups_created', 1)
  redis.call('EXPIRE', run_key(a.run), a.run_seconds)
  return 1
end

-- One step of a ladder: state, events, records and counters together, or nothing when another step was first (0).
function operations.commit()
  local key = p .. 'ladder:' .. a.id
  if redis.call('HGET', key, 'revision') ~= a.revision then return 0 end
  redis.call('HSET', key, 'state', a.state)
  redis.call('HINCRBY', key, 'revision', 1)
  tell(a.run)
  for _, record in ipairs(a.records) do redis.call('LPUSH', p .. 'ladders:window:' .. a.run, record) end
  if #a.records > 0 then
    redis.call('LTRIM', p .. 'ladders:window:' .. a.run, 0, a.most_records - 1)
    redis.call('HINCRBY', run_key(a.run), 'records', #a.records)
  end
  for _, count in ipairs(a.counts) do redis.call('HINCRBYFLOAT', run_key(a.run), count[1], count[2]) end
  if a.trusted then redis.call('HSET', run_key(a.run), 'trusted', a.trusted) end
  if a.settled then redis.call('EXPIRE', key, a.keep_seconds) end
  for _, name in ipairs({ 'ladders:run:', 'ladders:window:', 'ladders:events:' }) do
    redis.call('EXPIRE', p .. name .. a.run, a.run_seconds)
  end
  return 1
end

return operations[ARGV[1]]()
