-- How a job ends, and what that means for jobs with equal answers.

-- Counts the answers of an ended job by outcome; an answer that occurs several times counts each time.
local function tally(id, row)
  local times, known = {}, 0
  local count = count_of(row.keys)
  if row.slots then
    for _, slot in ipairs(cjson.decode(row.slots)) do times[slot] = (times[slot] or 0) + 1 end
  end
  local outcomes = {}
  for i = 0, count - 1 do
    local grade = redis.call('HGET', job(id), 'g' .. i)
    local outcome = string.match(grade or row.rest, '^%["([a-z_]+)"')
    local repeated = times[i] or 1
    outcomes[outcome] = (outcomes[outcome] or 0) + repeated
    if grade then known = known + repeated end
  end
  local report = p .. 'report:' .. row.run
  for outcome, number in pairs(outcomes) do redis.call('HINCRBY', report, outcome, number) end
  local reused = math.max(0, known - tonumber(row.executed or 0))
  redis.call('HINCRBY', report, 'reused', reused)
  redis.call('HINCRBY', p .. 'reuse', 'reused', reused)
  redis.call('EXPIRE', report, WEEK_SECONDS)
  redis.call('ZADD', p .. 'runs', now, row.run)
  redis.call('ZREMRANGEBYRANK', p .. 'runs', 0, -MOST_RUNS - 1)
end

local function forget_dead_letter(id)
  redis.call('ZREM', p .. 'dead', id)
  if redis.call('EXISTS', job(id)) == 1 then drop_content(id) end
end

-- A dead letter keeps its content, to be tried again.
local function bury(id, reason)
  redis.call('HSET', job(id), 'reason', reason)
  redis.call('EXPIRE', job(id), WEEK_SECONDS + 86400)
  redis.call('ZADD', p .. 'dead', now, id)
  for _, old in ipairs(redis.call('ZRANGE', p .. 'dead', 0, -MOST_DEAD - 1)) do forget_dead_letter(old) end
end

-- A job that ends without some grades hears of them no more.
local function stop_listening(id, keys)
  for i = 0, count_of(keys) - 1 do redis.call('SREM', p .. 'parked:' .. key_at(keys, i), id) end
end

-- Ends a job; answers without a grade get the row of `outcome`, in the form that grade_to_json in jobs.py writes.
local function mark_ended(id, keep_seconds, outcome, message, dead)
  if outcome then redis.call('HSET', job(id), 'rest', cjson.encode({ outcome, 0, {}, message }), 'error', message) end
  local row = fields_of(id, 'run', 'group', 'state', 'started', 'attempts', 'keys', 'slots', 'rest', 'executed')
  if outcome then stop_listening(id, row.keys) end
  if row.state == 'queued' then unqueue(id) end
  redis.call('HSET', job(id), 'state', 'ended', 'ended', now)
  redis.call('HDEL', job(id), 'own', 'score', 'waits')
  if row.state == 'running' then redis.call('HSET', job(id), 'run_ms', now - tonumber(row.started)) end
  redis.call('ZREM', p .. 'running', id)
  redis.call('ZREM', p .. 'deadlines', id)
  redis.call('ZREM', p .. 'live:' .. row.run, id)
  if row.group then redis.call('SREM', group_key(row.run, row.group), id) end
  tally(id, row)
  if dead then
    bury(id, message)
  else
    drop_content(id)
    redis.call('EXPIRE', job(id), keep_seconds)
  end
  redis.call('XADD', p .. 'ended:' .. row.run, 'MAXLEN', '~', STREAM_LENGTH, '*', 'id', id)
  redis.call('EXPIRE', p .. 'ended:' .. row.run, WEEK_SECONDS)
end

-- Stores the grade of one distinct answer; returns how many have none yet.
local function fill(id, index, grade)
  if redis.call('HSETNX', job(id), 'g' .. index, grade) == 1 then
    return redis.call('HINCRBY', job(id), 'missing', -1)
  end
  return tonumber(redis.call('HGET', job(id), 'missing'))
end

-- Tells the jobs that wait for an answer its grade. Without one (nil: its run gave none) they go back to their queue:
-- the first of them runs it.
local function resolve(key, grade, keep_seconds)
  local set = p .. 'parked:' .. key
  local waiting = redis.call('SMEMBERS', set)
  if grade then redis.call('DEL', set) end
  for _, id in ipairs(waiting) do
    local row = fields_of(id, 'state', 'keys')
    if not row.state or row.state == 'ended' then
      redis.call('SREM', set, id)
    elseif not grade then
      if row.state == 'parked' then enqueue(id) end
    else
      for i = 0, count_of(row.keys) - 1 do
        if key_at(row.keys, i) == key and fill(id, i, grade) == 0 and row.state ~= 'running' then
          mark_ended(id, keep_seconds)
        end
      end
    end
  end
end

-- Gives up the single flight of answers that `id` does not run any more.
local function land(id, keep_seconds)
  local keys = redis.call('HGET', job(id), 'keys')
  for i = 0, count_of(keys) - 1 do
    local key = key_at(keys, i)
    if redis.call('GET', p .. 'flight:' .. key) == id then
      redis.call('DEL', p .. 'flight:' .. key)
      resolve(key, nil, keep_seconds)
    end
  end
end

local function end_unknown(id, outcome, message, keep_seconds, dead)
  redis.call('HSET', job(id), 'owner', '')
  mark_ended(id, keep_seconds, outcome, message, dead)
  land(id, keep_seconds)
end

local function use(id, cpu_seconds)
  if not cpu_seconds or cpu_seconds <= 0 then return end
  redis.call('HINCRBYFLOAT', job(id), 'cpu', cpu_seconds)
  redis.call('HINCRBYFLOAT', p .. 'report:' .. redis.call('HGET', job(id), 'run'), 'cpu', cpu_seconds)
end

-- `failed` is false for a job that was only a neighbour of the one that failed: that costs no attempt.
local function release(id, message, most_attempts, failed, keep_seconds)
  local attempts = tonumber(redis.call('HGET', job(id), 'attempts'))
  redis.call('ZREM', p .. 'running', id)
  if redis.call('HGET', job(id), 'missing') == '0' then -- equal jobs were graded while this one was at work
    redis.call('HSET', job(id), 'owner', '')
    mark_ended(id, keep_seconds)
    land(id, keep_seconds)
    return 'ended'
  end
  if failed and attempts >= most_attempts then
    local text = message .. ' (attempt ' .. attempts .. ' of ' .. most_attempts .. ')'
    end_unknown(id, 'infra_error', text, keep_seconds, true)
    return 'ended'
  end
  redis.call('HSET', job(id), 'owner', '', 'error', message)
  redis.call('HDEL', job(id), 'own', 'waits')
  if not failed then redis.call('HINCRBY', job(id), 'attempts', -1) end
  land(id, keep_seconds)
  enqueue(id)
  return 'queued'
end
