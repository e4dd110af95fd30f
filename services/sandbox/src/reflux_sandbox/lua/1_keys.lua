-- All changes of verification jobs, each atomic. KEYS[1] is the prefix with the hash tag; ARGV[1] names the operation,
-- ARGV[2] holds its arguments as JSON, further ones are raw texts. The files of this folder are one script, in order.
--
-- <p>job:<id>         hash: the job; state is queued, parked (waits for answers that other jobs run), running or ended;
--                     g<i> is the grade of its i-th distinct answer, `rest` the grade of those that never got one;
--                     `waits` while its turn in a session that has claimed several has not come
-- <p>queue:<name>     sorted set: "verifier \31 id" of jobs that wait, by age and priority
-- <p>running          sorted set: id -> end of its lease (ms)
-- <p>deadlines        sorted set: id -> deadline (ms) of jobs that have not ended
-- <p>live:<run>       sorted set: id -> creation (us) of jobs that have not ended
-- <p>group:<run> <g>  set: ids of jobs of a group that have not ended
-- <p>payload:<hash>   hash: text and number of users of a payload
-- <p>flight:<key>     id of the job that runs this answer now (single flight)
-- <p>parked:<key>     set: ids of jobs that wait for this answer
-- <p>cache:<key>      grade of an answer, with a time to live
-- <p>ended:<run>      stream: ids of ended jobs, oldest first
-- <p>dead             sorted set: id -> end (ms) of jobs that nothing could grade
-- <p>report:<run>     hash: counts and moments over the answers of a run
-- <p>runs             sorted set: run -> last end (ms), for the reports
-- <p>reuse            hash: answers of all runs that were executed, and that were equal to one that was
-- <p>bytes            bytes of payloads and answers of jobs that have not ended

local p = KEYS[1]
local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)
local SEPARATOR = '\31'
local KEY_LENGTH = 32
local STREAM_LENGTH = 65536
local WEEK_SECONDS = 7 * 86400
local MOST_DEAD = 1000
local MOST_RUNS = 1000
local EXTERNAL = 'external/'
local requeued = 0

local function job(id) return p .. 'job:' .. id end

local function group_key(run, group) return p .. 'group:' .. run .. SEPARATOR .. group end

local function starts_with(text, beginning) return string.sub(text, 1, #beginning) == beginning end

-- Fields of a job by name; nil where it has none.
local function fields_of(id, ...)
  local values, row = redis.call('HMGET', job(id), ...), {}
  for i, name in ipairs({ ... }) do row[name] = values[i] or nil end
  return row
end

-- The distinct answers of a job: number and key of the i-th, from 0.
local function count_of(keys) return #keys / KEY_LENGTH end

local function key_at(keys, i) return string.sub(keys, i * KEY_LENGTH + 1, (i + 1) * KEY_LENGTH) end

local function enqueue(id)
  local row = fields_of(id, 'queue', 'verifier', 'score')
  redis.call('HSET', job(id), 'state', 'queued')
  redis.call('ZADD', p .. 'queue:' .. row.queue, row.score, row.verifier .. SEPARATOR .. id)
  requeued = requeued + 1
end

local function unqueue(id)
  local row = fields_of(id, 'queue', 'verifier')
  redis.call('ZREM', p .. 'queue:' .. row.queue, row.verifier .. SEPARATOR .. id)
end

-- Payloads are shared. The time to live is a second safety: no user outlives its deadline and its time as a dead letter.
local function keep_payload(hash, text, deadline)
  local key = p .. 'payload:' .. hash
  local seconds = math.floor((deadline - now) / 1000) + 2 * WEEK_SECONDS
  if redis.call('HINCRBY', key, 'users', 1) == 1 then
    redis.call('HSET', key, 'text', text)
    redis.call('EXPIRE', key, seconds)
    redis.call('INCRBY', p .. 'bytes', #text)
  else
    redis.call('EXPIRE', key, seconds, 'GT')
  end
end

local function drop_payload(hash)
  local key = p .. 'payload:' .. hash
  if redis.call('HINCRBY', key, 'users', -1) > 0 then return end
  redis.call('DECRBY', p .. 'bytes', redis.call('HSTRLEN', key, 'text'))
  redis.call('DEL', key)
end

local function drop_content(id)
  local hash = redis.call('HGET', job(id), 'payload')
  if not hash then return end
  drop_payload(hash)
  redis.call('DECRBY', p .. 'bytes', redis.call('HSTRLEN', job(id), 'answers'))
  redis.call('HDEL', job(id), 'payload', 'answers')
end
