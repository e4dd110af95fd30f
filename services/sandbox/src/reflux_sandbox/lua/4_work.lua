-- Leases, results, failures.

-- owner, lease_ms, jobs = {id, ...}, begun = {id: progress} of them whose turn has come -> ids whose lease is no longer
-- ours
function operations.heartbeat(a)
  local lost = {}
  for _, id in ipairs(a.jobs) do
    local row = fields_of(id, 'owner', 'state')
    if row.owner == a.owner and row.state == 'running' then
      redis.call('ZADD', p .. 'running', now + a.lease_ms, id)
      redis.call('HSET', job(id), 'beat', now)
      if a.begun[id] then
        redis.call('HDEL', job(id), 'waits')
        redis.call('HSET', job(id), 'progress', a.begun[id])
      end
    else
      lost[#lost + 1] = id
    end
  end
  return lost
end

-- For the correlation of timeouts with the length of answers: see report.py.
local function count_lengths(id, m)
  local report = p .. 'report:' .. redis.call('HGET', job(id), 'run')
  for name, value in pairs(m) do redis.call('HINCRBYFLOAT', report, 'length_' .. name, value) end
end

local function finish_one(f, a)
  local row = fields_of(f.id, 'owner', 'state', 'keys', 'run')
  if row.owner ~= f.owner then return 0 end
  if row.state ~= 'running' then return 1 end
  local rewards = 0
  for _, grade in ipairs(f.grades) do
    local index, text, is_reward = grade[1], grade[2], grade[3]
    local key = key_at(row.keys, index)
    fill(f.id, index, text)
    if is_reward then
      rewards = rewards + 1
      redis.call('SET', p .. 'cache:' .. key, text, 'EX', a.cache_seconds)
      if redis.call('GET', p .. 'flight:' .. key) == f.id then redis.call('DEL', p .. 'flight:' .. key) end
      resolve(key, text, a.keep_seconds)
    end
  end
  redis.call('HINCRBY', job(f.id), 'executed', #f.grades)
  redis.call('HINCRBY', p .. 'report:' .. row.run, 'executed', #f.grades)
  redis.call('HINCRBY', p .. 'reuse', 'executed', #f.grades)
  use(f.id, f.cpu)
  count_lengths(f.id, f.lengths)
  if f.outcome then
    mark_ended(f.id, a.keep_seconds, f.outcome, f.message, f.outcome == 'infra_error')
  elseif redis.call('HGET', job(f.id), 'missing') == '0' then
    mark_ended(f.id, a.keep_seconds)
  else -- other jobs are at work on the rest
    redis.call('ZREM', p .. 'running', f.id)
    redis.call('HSET', job(f.id), 'run_ms', now - tonumber(redis.call('HGET', job(f.id), 'started')))
    enqueue(f.id)
  end
  land(f.id, a.keep_seconds)
  return 1
end

-- ends = {{id, owner, grades = {{index, row, is reward}}, cpu, lengths, outcome and message for what has no grade}},
-- keep_seconds, cache_seconds -> 1 per end that this call or an earlier equal one stored, then jobs put back in a queue
function operations.finish(a)
  local stored = {}
  for n, f in ipairs(a.ends) do stored[n] = finish_one(f, a) end
  stored[#stored + 1] = requeued
  return stored
end

-- id, owner, message, most_attempts, failed, cpu, keep_seconds -> 'queued', 'ended' or 'lost'
function operations.release(a)
  local row = fields_of(a.id, 'owner', 'state')
  if row.owner ~= a.owner or row.state ~= 'running' then return 'lost' end
  use(a.id, a.cpu)
  return release(a.id, a.message, a.most_attempts, a.failed, a.keep_seconds)
end

-- The distinct answers that a completion with `token` has grades for; nil when the token is not good for any.
local function to_complete(row, token)
  if not row.token then return nil end
  if row.token ~= token then return row.owner == token and cjson.decode(row.own or '[]') or nil end
  if row.slots then return cjson.decode(row.slots) end
  local numbers = {}
  for i = 1, count_of(row.keys) do numbers[i] = i - 1 end
  return numbers
end

-- id, token, count, lease_ms -> {running | done | refused | count, numbers of the distinct answers}. The token of a claim
-- is good for its answers while its lease lasts; a job's own token for all its answers, whoever has a lease on it.
function operations.take(a)
  local row = fields_of(a.id, 'token', 'state', 'owner', 'keys', 'slots', 'own')
  local numbers = to_complete(row, a.token)
  if not numbers or (row.state == 'ended' and row.owner ~= a.token) then return { 'refused', {} } end
  if row.state ~= 'running' and row.owner == a.token then return { 'done', {} } end
  if #numbers ~= a.count then return { 'count', numbers } end
  if row.token == a.token then
    if row.state == 'queued' then unqueue(a.id) end
    redis.call('HSET', job(a.id), 'state', 'running', 'owner', a.token, 'started', now, 'beat', now)
    redis.call('ZADD', p .. 'running', now + a.lease_ms, a.id)
  end
  return { 'running', numbers }
end

-- identity, owner, most_attempts, keep_seconds, grace_ms -> {jobs taken back, jobs ended by their deadline}
function operations.sweep(a)
  local taken, late = 0, 0
  for _, id in ipairs(redis.call('ZRANGE', p .. 'running', 0, -1)) do
    local row = fields_of(id, 'owner', 'waits')
    local owner = row.owner
    local expired = tonumber(redis.call('ZSCORE', p .. 'running', id) or now) < now
    local earlier_self = owner and owner ~= a.owner and starts_with(owner, a.identity .. '#')
    if not owner then
      redis.call('ZREM', p .. 'running', id)
    elseif expired or earlier_self then
      release(id, 'its worker died during the attempt', a.most_attempts, not row.waits, a.keep_seconds)
      taken = taken + 1
    end
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. 'deadlines', '-inf', now, 'LIMIT', 0, 1000)) do
    local row = fields_of(id, 'state', 'deadline', 'queue')
    local grace = row.state == 'running' and not starts_with(row.queue, EXTERNAL) and a.grace_ms or 0
    if not row.state then
      redis.call('ZREM', p .. 'deadlines', id)
    elseif tonumber(row.deadline) + grace <= now then
      local where = row.state == 'running' and 'no verdict by the deadline' or 'the deadline passed in the queue'
      end_unknown(id, 'timeout', where, a.keep_seconds)
      late = late + 1
    end
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. 'dead', '-inf', now - WEEK_SECONDS * 1000, 'LIMIT', 0, 100)) do
    forget_dead_letter(id)
  end
  return { taken, late }
end
