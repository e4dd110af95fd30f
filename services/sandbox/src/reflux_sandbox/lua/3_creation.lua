-- Creation and claims.

local operations = {}

-- Grades from the cache by number of the distinct answer, and whether there is one for each.
local function cached_grades(keys)
  local names, count = {}, count_of(keys)
  for i = 0, count - 1 do names[i + 1] = p .. 'cache:' .. key_at(keys, i) end
  local rows, all = redis.call('MGET', unpack(names)), true
  for i = 1, count do all = all and rows[i] ~= false end
  return rows, all
end

-- Which queue has no room for what a batch would add; nil when all fits.
local function full_queue(specs, hits, a)
  local depths, bytes = {}, tonumber(redis.call('GET', p .. 'bytes') or 0)
  for n, spec in ipairs(specs) do
    if hits[n] and not hits[n].all then
      depths[spec.queue] = (depths[spec.queue] or redis.call('ZCARD', p .. 'queue:' .. spec.queue)) + 1
      bytes = bytes + #spec.answers
    end
  end
  for queue, depth in pairs(depths) do
    if depth > a.most_queued then return queue, depth - 1 .. ' jobs' end
  end
  if next(depths) and bytes > a.most_bytes then return next(depths), bytes .. ' bytes' end
  if next(depths) and redis.call('ZCARD', p .. 'deadlines') > 4 * a.most_queued then
    return next(depths), 'too many equal jobs'
  end
end

local function write_job(spec, number, hit, payload)
  local id, score = spec.id, now_us + number - spec.head_start_us
  redis.call('HSET', job(id), 'state', 'queued', 'created', now, 'deadline', now + spec.deadline_ms, 'score', score,
    'missing', count_of(spec.keys), 'keys', spec.keys, 'attempts', 0, 'queue', spec.queue, unpack(spec.fields))
  for i, grade in ipairs(hit.rows) do
    if grade then fill(id, i - 1, grade) end
  end
  if hit.all then return 'cached' end
  redis.call('HSET', job(id), 'payload', spec.payload, 'answers', spec.answers)
  redis.call('INCRBY', p .. 'bytes', #spec.answers)
  keep_payload(spec.payload, payload, now + spec.deadline_ms)
  redis.call('ZADD', p .. 'deadlines', now + spec.deadline_ms, id)
  redis.call('ZADD', p .. 'live:' .. spec.run, now_us + number, id)
  if spec.group ~= '' then redis.call('SADD', group_key(spec.run, spec.group), id) end
  enqueue(id)
  return 'queued'
end

-- Nobody may ever claim a job of an external verifier: it must hear of equal answers while it waits in the queue.
local function listen(spec)
  for i = 0, count_of(spec.keys) - 1 do
    redis.call('SADD', p .. 'parked:' .. key_at(spec.keys, i), spec.id)
    redis.call('EXPIRE', p .. 'parked:' .. key_at(spec.keys, i), 2 * WEEK_SECONDS)
  end
end

-- jobs, most_queued, most_bytes, keep_seconds; payload texts -> {how of each job} or {full, queue, what waits}
function operations.create(a, payloads)
  local hits, known = {}, {}
  for n, spec in ipairs(a.jobs) do
    if redis.call('EXISTS', job(spec.id)) == 1 then
      known[n] = true
    else
      local rows, all = cached_grades(spec.keys)
      hits[n] = { rows = rows, all = all }
    end
  end
  local queue, what = full_queue(a.jobs, hits, a)
  if queue then return { 'full', queue, what } end
  local hows = {}
  for n, spec in ipairs(a.jobs) do
    if known[n] or redis.call('EXISTS', job(spec.id)) == 1 then
      hows[n] = 'known'
    else
      hows[n] = write_job(spec, n, hits[n], payloads[spec.payload_number])
      if hows[n] == 'cached' then
        mark_ended(spec.id, a.keep_seconds)
      elseif starts_with(spec.queue, EXTERNAL) then
        listen(spec)
      end
    end
  end
  return hows
end

-- The distinct answers that `id` is to run, and how many have no grade; of these another job may be at work on some.
local function take_answers(id, keys, keep_seconds)
  local own, missing = {}, tonumber(redis.call('HGET', job(id), 'missing'))
  for i = 0, count_of(keys) - 1 do
    if redis.call('HEXISTS', job(id), 'g' .. i) == 0 then
      local key = key_at(keys, i)
      local grade = redis.call('GET', p .. 'cache:' .. key)
      local holder = redis.call('GET', p .. 'flight:' .. key)
      if grade then
        missing = fill(id, i, grade)
      elseif holder and holder ~= id and redis.call('HGET', job(holder), 'state') == 'running' then
        redis.call('SADD', p .. 'parked:' .. key, id)
        redis.call('EXPIRE', p .. 'parked:' .. key, 2 * WEEK_SECONDS)
      else
        redis.call('SET', p .. 'flight:' .. key, id, 'EX', 2 * WEEK_SECONDS)
        own[#own + 1] = i
      end
    end
  end
  return own, missing
end

-- Starts a job that was taken off its queue; nil when there is nothing to run. `waits`: others have their turn before.
local function start(id, a, waits)
  local row = fields_of(id, 'state', 'keys', 'deadline', 'created', 'payload', 'answers', 'run', 'traceparent', 'verifier',
    'version')
  if row.state ~= 'queued' then return nil end
  if tonumber(row.deadline) <= now then
    end_unknown(id, 'timeout', 'the deadline passed in the queue', a.keep_seconds)
    return nil
  end
  local own, missing = take_answers(id, row.keys, a.keep_seconds)
  if missing == 0 then
    mark_ended(id, a.keep_seconds)
    return nil
  end
  if #own == 0 then
    redis.call('HSET', job(id), 'state', 'parked')
    return nil
  end
  local attempt = redis.call('HINCRBY', job(id), 'attempts', 1)
  redis.call('HSET', job(id), 'state', 'running', 'owner', a.owner, 'started', now, 'beat', now, 'own', cjson.encode(own),
    'queue_ms', now - tonumber(row.created))
  if waits then redis.call('HSET', job(id), 'waits', 1) end
  redis.call('ZADD', p .. 'running', now + a.lease_ms, id)
  return {
    id, row.verifier, redis.call('HGET', p .. 'payload:' .. row.payload, 'text'), row.answers, row.run,
    row.traceparent or '', attempt, tonumber(row.deadline) - now, cjson.encode(own),
    row.version or '',
  }
end

-- queue, verifier or '', most, owner, lease_ms, keep_seconds -> {verifier at the head of the queue or '', rows}
function operations.claim(a)
  local queue, wanted, rows = p .. 'queue:' .. a.queue, a.verifier, {}
  local head = ''
  local in_turn = a.verifier ~= '' and not starts_with(a.queue, EXTERNAL) -- further jobs of a session that is open
  while #rows < a.most do
    local entry = redis.call('ZRANGE', queue, 0, 0)[1]
    if not entry then return { '', rows } end
    local at = string.find(entry, SEPARATOR, 1, true)
    head = string.sub(entry, 1, at - 1)
    if wanted ~= '' and head ~= wanted then break end
    wanted = head
    redis.call('ZREM', queue, entry)
    rows[#rows + 1] = start(string.sub(entry, at + 1), a, in_turn and #rows > 0)
  end
  return { head, rows }
end
