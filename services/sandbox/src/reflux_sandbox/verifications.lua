-- All changes of verification jobs, each atomic. KEYS[1] is the prefix with the hash tag; ARGV[1] names the operation.
--
-- <p>job:<id>        hash: the job; state is queued, running or ended
-- <p>queue:<fid>     list: "verifier \31 id" of jobs that wait, oldest first
-- <p>running         sorted set: id -> end of its lease (ms)
-- <p>deadlines       sorted set: id -> deadline (ms) of jobs that have not ended
-- <p>flight:<hash>   id of the job that does this work now (single flight)
-- <p>followers:<id>  list: ids of equal jobs that wait for its result
-- <p>cache:<hash>    grades of finished work, with a time to live
-- <p>request:<rid>   id of the job that a request id made, for one day
-- <p>ended:<run>     stream: ids of ended jobs, oldest first

local p = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local SEPARATOR = '\31'
local STREAM_LENGTH = 4096
local DAY_SECONDS = 86400

local function job(id) return p .. 'job:' .. id end

local function enqueue(id, front)
  local row = redis.call('HMGET', job(id), 'fidelity', 'verifier')
  local push = front and 'LPUSH' or 'RPUSH'
  redis.call('HSET', job(id), 'state', 'queued')
  redis.call(push, p .. 'queue:' .. row[1], row[2] .. SEPARATOR .. id)
end

local function unqueue(id)
  local row = redis.call('HMGET', job(id), 'fidelity', 'verifier', 'leader')
  redis.call('LREM', p .. 'queue:' .. row[1], 1, row[2] .. SEPARATOR .. id)
  if row[3] then redis.call('LREM', p .. 'followers:' .. row[3], 1, id) end
end

local function mark_ended(id, grades, error, cached, keep_seconds)
  local row = redis.call('HMGET', job(id), 'run', 'started', 'created')
  local started = tonumber(row[2] or row[3])
  redis.call('HSET', job(id), 'state', 'ended', 'grades', grades, 'error', error, 'cached', cached,
    'run_ms', row[2] and now - started or 0)
  redis.call('HDEL', job(id), 'payload', 'answers')
  redis.call('EXPIRE', job(id), keep_seconds)
  redis.call('ZREM', p .. 'running', id)
  redis.call('ZREM', p .. 'deadlines', id)
  redis.call('XADD', p .. 'ended:' .. row[1], 'MAXLEN', '~', STREAM_LENGTH, '*', 'id', id)
  redis.call('EXPIRE', p .. 'ended:' .. row[1], DAY_SECONDS)
end

-- A reward is shared with all followers; anything else says nothing about them: the first one takes over.
local function finish(id, grades, error, is_reward, keep_seconds, cache_seconds)
  local hash = redis.call('HGET', job(id), 'hash')
  local leads = redis.call('GET', p .. 'flight:' .. hash) == id
  mark_ended(id, grades, error, '0', keep_seconds)
  if is_reward then redis.call('SET', p .. 'cache:' .. hash, grades, 'EX', cache_seconds) end
  if not leads then return end
  redis.call('DEL', p .. 'flight:' .. hash)
  local followers = redis.call('LRANGE', p .. 'followers:' .. id, 0, -1)
  redis.call('DEL', p .. 'followers:' .. id)
  if is_reward then
    for _, follower in ipairs(followers) do mark_ended(follower, grades, '', '1', keep_seconds) end
  elseif #followers > 0 then
    local heir = table.remove(followers, 1)
    redis.call('SET', p .. 'flight:' .. hash, heir)
    redis.call('HDEL', job(heir), 'leader')
    for _, follower in ipairs(followers) do
      redis.call('HSET', job(follower), 'leader', heir)
      redis.call('RPUSH', p .. 'followers:' .. heir, follower)
    end
    enqueue(heir, true)
  end
end

-- The same rows as grades_to_json in jobs.py; cjson writes an empty table as {}.
local function unknown_grades(id, outcome, message)
  local rows = {}
  for i = 1, tonumber(redis.call('HGET', job(id), 'count')) do rows[i] = { outcome, 0, {}, message } end
  return cjson.encode(rows)
end

local function finish_unknown(id, outcome, message, keep_seconds)
  finish(id, unknown_grades(id, outcome, message), message, false, keep_seconds, 0)
end

local function release(id, error, max_attempts, counted, keep_seconds)
  local attempts = tonumber(redis.call('HGET', job(id), 'attempts'))
  redis.call('ZREM', p .. 'running', id)
  redis.call('HSET', job(id), 'owner', '', 'error', error)
  if counted and attempts >= max_attempts then
    finish_unknown(id, 'infra_error', error .. ' (attempt ' .. attempts .. ' of ' .. max_attempts .. ')', keep_seconds)
    return 'ended'
  end
  if not counted then redis.call('HINCRBY', job(id), 'attempts', -1) end
  enqueue(id, true)
  return 'queued'
end

local operations = {}

-- request id, job id, hash, fidelity, verifier, payload, answers, count, deadline ms, run, traceparent, most queued,
-- keep seconds -> {known | full | cached | joined | queued, job id or depth}
function operations.create(a)
  local known = redis.call('GET', p .. 'request:' .. a[1])
  if known and redis.call('EXISTS', job(known)) == 1 then return { 'known', known } end
  local id, hash, queue = a[2], a[3], p .. 'queue:' .. a[4]
  local cached = redis.call('GET', p .. 'cache:' .. hash)
  local leader = redis.call('GET', p .. 'flight:' .. hash)
  if not cached then
    local waiting = leader and redis.call('LLEN', p .. 'followers:' .. leader) or redis.call('LLEN', queue)
    if waiting >= tonumber(a[12]) then return { 'full', tostring(waiting) } end
  end
  redis.call('SET', p .. 'request:' .. a[1], id, 'EX', DAY_SECONDS)
  redis.call('HSET', job(id), 'hash', hash, 'fidelity', a[4], 'verifier', a[5], 'payload', a[6], 'answers', a[7],
    'count', a[8], 'deadline', now + tonumber(a[9]), 'run', a[10], 'traceparent', a[11], 'created', now, 'attempts', 0,
    'state', 'queued')
  if cached then
    mark_ended(id, cached, '', '1', tonumber(a[13]))
    return { 'cached', id }
  end
  redis.call('ZADD', p .. 'deadlines', now + tonumber(a[9]), id)
  if leader then
    redis.call('HSET', job(id), 'leader', leader)
    redis.call('RPUSH', p .. 'followers:' .. leader, id)
    return { 'joined', id }
  end
  redis.call('SET', p .. 'flight:' .. hash, id)
  enqueue(id, false)
  return { 'queued', id }
end

-- fidelity, verifier or '', most, owner, lease ms -> {verifier at the head of the queue or '', rows}
function operations.claim(a)
  local queue, wanted, rows = p .. 'queue:' .. a[1], a[2], {}
  local head = ''
  while #rows < tonumber(a[3]) do
    local entry = redis.call('LINDEX', queue, 0)
    if not entry then return { '', rows } end
    local at = string.find(entry, SEPARATOR, 1, true)
    head = string.sub(entry, 1, at - 1)
    if wanted ~= '' and head ~= wanted then break end
    wanted = head
    redis.call('LPOP', queue)
    local id = string.sub(entry, at + 1)
    if redis.call('HGET', job(id), 'state') == 'queued' then
      local attempt = redis.call('HINCRBY', job(id), 'attempts', 1)
      local r = redis.call('HMGET', job(id), 'payload', 'answers', 'run', 'traceparent', 'deadline', 'created')
      redis.call('HSET', job(id), 'state', 'running', 'owner', a[4], 'started', now, 'queue_ms', now - tonumber(r[6]))
      redis.call('ZADD', p .. 'running', now + tonumber(a[5]), id)
      rows[#rows + 1] = { id, head, r[1], r[2], r[3], r[4], attempt, tonumber(r[5]) - now }
    end
  end
  return { head, rows }
end

-- owner, lease ms, ids... -> ids whose lease is no longer ours
function operations.heartbeat(a)
  local lost = {}
  for i = 3, #a do
    local row = redis.call('HMGET', job(a[i]), 'owner', 'state')
    if row[1] == a[1] and row[2] == 'running' then
      redis.call('ZADD', p .. 'running', now + tonumber(a[2]), a[i])
    else
      lost[#lost + 1] = a[i]
    end
  end
  return lost
end

-- id, owner, grades, error, is reward, keep seconds, cache seconds -> 1 when this call or an earlier equal one ended it
function operations.finish(a)
  local row = redis.call('HMGET', job(a[1]), 'owner', 'state')
  if row[1] ~= a[2] then return 0 end
  if row[2] == 'running' then finish(a[1], a[3], a[4], a[5] == '1', tonumber(a[6]), tonumber(a[7])) end
  return 1
end

-- id, owner, error, most attempts, counted, keep seconds -> 'queued', 'ended' or 'lost'
function operations.release(a)
  local row = redis.call('HMGET', job(a[1]), 'owner', 'state')
  if row[1] ~= a[2] or row[2] ~= 'running' then return 'lost' end
  return release(a[1], a[3], tonumber(a[4]), a[5] == '1', tonumber(a[6]))
end

-- id, keep seconds -> the owner that was at work on it, '' when nobody was, nil when there is no such job
function operations.cancel(a)
  local row = redis.call('HMGET', job(a[1]), 'state', 'owner')
  if not row[1] then return nil end
  if row[1] == 'ended' then return '' end
  if row[1] == 'queued' then unqueue(a[1]) end
  redis.call('HSET', job(a[1]), 'owner', '')
  finish_unknown(a[1], 'cancelled', 'cancelled on request', tonumber(a[2]))
  return row[2] or ''
end

-- owner identity, owner, most attempts, keep seconds -> {jobs taken back, jobs ended by their deadline in the queue}
function operations.sweep(a)
  local taken, late = 0, 0
  for _, id in ipairs(redis.call('ZRANGE', p .. 'running', 0, -1)) do
    local owner = redis.call('HGET', job(id), 'owner')
    local expired = tonumber(redis.call('ZSCORE', p .. 'running', id)) < now
    local earlier_self = owner and owner ~= a[2] and string.sub(owner, 1, #a[1] + 1) == a[1] .. '#'
    if not owner then
      redis.call('ZREM', p .. 'running', id)
    elseif expired or earlier_self then
      release(id, 'the sandbox service died during the attempt', tonumber(a[3]), true, tonumber(a[4]))
      taken = taken + 1
    end
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. 'deadlines', '-inf', now, 'LIMIT', 0, 1000)) do
    if redis.call('HGET', job(id), 'state') == 'queued' then
      unqueue(id)
      finish_unknown(id, 'timeout', 'the deadline passed in the queue', tonumber(a[4]))
      late = late + 1
    end
  end
  return { taken, late }
end

local arguments = {}
for i = 2, #ARGV do arguments[i - 1] = ARGV[i] end
return operations[ARGV[1]](arguments)
