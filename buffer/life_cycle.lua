-- The life of an attempt.
--
--     queued -> leased -> ready -> claimed -> trained
--                 |         |        \-> ready again (rewind: the learner crashed before its checkpoint)
--                 |         \-> dropped: stale | filtered
--                 \-> queued again (lease expired, failed or released) | dropped: env_failed | poisoned
--
-- `transitions` holds one function per arrow and per question; the rules they share stand before them. Redis runs the
-- script atomically, and every transition may be repeated. An attempt "17/2" is member 2 of group "17", the 17th task.
--
-- KEYS[1] = "{run}:"    ARGV = transition, eta, batch size, lease in ms, most tries, Redis' run id ('' if the caller does
-- not know it yet), then the transition's own arguments

local eta, batch_size = tonumber(ARGV[2]), tonumber(ARGV[3])
local lease_ms, most_tries, server = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local run = KEYS[1]

-- Key names: here and nowhere else. The names of payloads and partials come from the caller and are kept in the attempt.

local key = {
  control = run .. 'control',     -- HASH    version, issued, next_index, committed, late, server
  ledger = run .. 'ledger',       -- HASH    <state or outcome>|<source> -> count
  queued = run .. 'queued',       -- ZSET    attempt -> index of its group
  leased = run .. 'leased',       -- ZSET    attempt -> deadline in ms
  ready = run .. 'ready',         -- ZSET    attempt -> ms when it came home
  claimed = run .. 'claimed',     -- ZSET    attempt -> learner step
  complete = run .. 'complete',   -- ZSET    group whose every member is home -> score(oldest sampled version, index)
  active = run .. 'active',       -- SET     groups that hold a place under the staleness bound
  manifests = run .. 'manifests', -- HASH    learner step -> its attempts
  unborn = run .. 'unborn',       -- HASH    attempt a learner claimed before Redis forgot its creation -> step
  failures = run .. 'failures',   -- LIST    the last infrastructure failures, newest first
  bell = run .. 'bell',           -- STREAM  one entry; a new one says: look again
}
local function attempt_key(id) return run .. 'attempt:' .. id end     -- HASH while live: see load()
local function group_key(group) return run .. 'group:' .. group end   -- HASH while live: size, task
local function answer_key(token) return run .. 'answer:' .. token end -- STRING, expiring: what a lease call answered
-- Eight groups to a hash keep it a listpack: 30 bytes for a finished attempt instead of 100.
local function history_key(id) return run .. 'history:' .. math.floor(tonumber(string.match(id, '^%d+')) / 8) end

-- Small words

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function control(field) return tonumber(redis.call('HGET', key.control, field) or 0) end

local function raise_to(field, value)
  if value > control(field) then redis.call('HSET', key.control, field, value) end
end

-- Older versions first, and within a version older tasks first; exact up to version 2^21 and task 2^32.
local function score(version, group) return version * 4294967296 + tonumber(group) end

local function room() return (eta + 1) * batch_size - redis.call('SCARD', key.active) end

local rung = false -- by this call; once is enough
local function ring() rung = true end

-- A full Redis refuses a script at its first command that needs memory, unless the script has already written. What
-- the learner and the heartbeats do must go on, or nothing would ever free memory again.
local function pass_when_full() redis.call('UNLINK', run .. 'nothing') end

local function unlink(name) if name ~= '' then redis.call('UNLINK', name) end end

local tally = {} -- of this call, added to the ledger at its end
local function count(what, source, by)
  local field = what .. '|' .. source
  tally[field] = (tally[field] or 0) + by
end

-- Attempts

local function load(id)
  local fields = redis.call('HMGET', attempt_key(id),
    'state', 'source', 'tries', 'token', 'payload', 'partial', 'oldest', 'partial_oldest')
  if not fields[1] then return nil end
  return {
    id = id, group = string.match(id, '^%d+'), state = fields[1], source = fields[2], tries = tonumber(fields[3]),
    token = fields[4] or '', payload = fields[5] or '', partial = fields[6] or '',
    oldest = tonumber(fields[7]), partial_oldest = tonumber(fields[8]),
  }
end

local function held(id, token)
  local attempt = load(id)
  if attempt and attempt.state == 'leased' and attempt.token == token then return attempt end
end

local function enter(attempt, state, rank)
  redis.call('ZADD', key[state], rank, attempt.id)
  redis.call('HSET', attempt_key(attempt.id), 'state', state)
  count(state, attempt.source, 1)
  attempt.state = state
end

-- A learner may have claimed or even trained it before a restart in which Redis forgot that it had been created.
local function create(id, source, group)
  count('created', source, 1)
  if redis.call('HEXISTS', history_key(id), id) == 1 then return count('trained', source, 1) end
  redis.call('HSET', attempt_key(id), 'source', source, 'tries', 0)
  local step = redis.call('HGET', key.unborn, id)
  redis.call('HDEL', key.unborn, id)
  enter({ id = id, source = source }, step and 'claimed' or 'queued', step or group)
end

local function leave(attempt)
  redis.call('ZREM', key[attempt.state], attempt.id)
  count(attempt.state, attempt.source, -1)
end

local function move(attempt, state, rank)
  leave(attempt)
  enter(attempt, state, rank)
end

local function requeue(attempt)
  redis.call('HDEL', attempt_key(attempt.id), 'token', 'worker', 'payload', 'oldest')
  move(attempt, 'queued', attempt.group)
  ring()
end

local function finish(attempt, outcome, story)
  leave(attempt)
  redis.call('UNLINK', attempt_key(attempt.id))
  unlink(attempt.payload)
  unlink(attempt.partial)
  redis.call('HSET', history_key(attempt.id), attempt.id, story or outcome)
  count(outcome, attempt.source, 1)
end

-- Groups

local function members(group)
  local alive = {}
  for i = 0, tonumber(redis.call('HGET', group_key(group), 'size') or 0) - 1 do
    alive[#alive + 1] = load(group .. '/' .. i)
  end
  return alive
end

local function forget_if_empty(group)
  if #members(group) > 0 then return end
  redis.call('UNLINK', group_key(group))
  redis.call('ZREM', key.complete, group)
  redis.call('SREM', key.active, group)
  ring()
end

local function drop_group(group, reason)
  for _, attempt in ipairs(members(group)) do finish(attempt, 'dropped:' .. reason) end
  forget_if_empty(group)
end

-- A member came home or was dropped: the group is complete when all that are left are home. A group that lost half of
-- its members or more has no baseline worth the name, and goes.
local function settle(group)
  local alive, home, oldest = members(group), 0, math.huge
  for _, attempt in ipairs(alive) do
    if attempt.state == 'ready' then
      home = home + 1
      oldest = math.min(oldest, attempt.oldest)
    end
  end
  if #alive * 2 <= tonumber(redis.call('HGET', group_key(group), 'size')) then
    drop_group(group, 'filtered')
  elseif home == #alive then
    redis.call('ZADD', key.complete, score(oldest, group), group)
    local claimable = redis.call('ZCOUNT', key.complete, score(control('version') - eta, 0), '+inf')
    if claimable == batch_size then ring() end
  end
end

local function drop(attempt, reason)
  finish(attempt, 'dropped:' .. reason)
  settle(attempt.group)
end

local function evict_stale()
  local newest = score(control('version') - eta, 0) - 1
  for _, group in ipairs(redis.call('ZRANGE', key.complete, '-inf', newest, 'BYSCORE', 'LIMIT', 0, 64)) do
    drop_group(group, 'stale')
  end
end

-- Leases

-- While Redis was away nobody could send a heartbeat: no reason to take the work from its workers. Once a restart, so
-- that the leases of workers that died in it do end.
local function forgive_outage(time)
  if redis.call('HGET', key.control, 'server') == server then return end
  redis.call('HSET', key.control, 'server', server)
  for _, id in ipairs(redis.call('ZRANGE', key.leased, 0, -1)) do
    redis.call('ZADD', key.leased, 'GT', time + math.floor(lease_ms / 2), id)
  end
end

local function take_back_expired(time)
  for _, id in ipairs(redis.call('ZRANGE', key.leased, '-inf', time, 'BYSCORE', 'LIMIT', 0, 64)) do
    local attempt = load(id)
    if attempt and attempt.tries >= most_tries then -- no longer there: its group went with a sibling just now
      drop(attempt, 'poisoned')
    elseif attempt then
      requeue(attempt)
    end
  end
end

-- Learner steps

local function manifests()
  local steps, flat = {}, redis.call('HGETALL', key.manifests)
  for i = 1, #flat, 2 do steps[tonumber(flat[i])] = cjson.decode(flat[i + 1]) end
  return steps
end

local function groups_of(ids)
  local groups, seen = {}, {}
  for _, id in ipairs(ids) do
    local group = string.match(id, '^%d+')
    if not seen[group] then groups[#groups + 1] = group end
    seen[group] = true
  end
  return groups
end

-- A durable checkpoint holds its gradient. If Redis forgot the attempt, create() will find here what became of it.
local function train(id, story)
  redis.call('HDEL', key.unborn, id)
  local attempt = load(id)
  if attempt then finish(attempt, 'trained', story) else redis.call('HSETNX', history_key(id), id, story) end
  return attempt
end

local function train_all(ids)
  for _, id in ipairs(ids) do train(id, 'trained') end
  for _, group in ipairs(groups_of(ids)) do forget_if_empty(group) end
end

-- The learner forgot that it claimed these.
local function unclaim(ids)
  local moved = {}
  for _, id in ipairs(ids) do
    redis.call('HDEL', key.unborn, id)
    local attempt = load(id)
    if attempt and attempt.state == 'claimed' then
      moved[#moved + 1] = id
      if attempt.payload ~= '' and redis.call('EXISTS', attempt.payload) == 1 then
        move(attempt, 'ready', now())
      else
        requeue(attempt)
      end
    end
  end
  for _, group in ipairs(groups_of(moved)) do
    redis.call('SADD', key.active, group)
    settle(group)
  end
  return #moved
end

local transitions = {}

-- Admission: -> queued

function transitions.next_index() return { control('next_index'), room() } end

-- `index` must be the next one, so that two workers cannot create the same task and none is skipped. -1: ask again.
function transitions.create(index, size, tasks)
  if tonumber(index) ~= control('next_index') then return -1 end
  tasks = cjson.decode(tasks)
  local wanted = math.min(#tasks, room())
  for i = 1, wanted do
    local group = string.format('%d', index + i - 1)
    local source, task = tasks[i][1], tasks[i][2]
    redis.call('HSET', group_key(group), 'size', size, 'task', task)
    redis.call('SADD', key.active, group)
    for member = 0, size - 1 do create(group .. '/' .. member, source, group) end
    forget_if_empty(group)
  end
  if wanted > 0 then
    redis.call('HINCRBY', key.control, 'next_index', wanted)
    ring()
  end
  return wanted
end

-- Work: queued -> leased -> ready, or back, or dropped

function transitions.lease(worker, wanted, token)
  local answered = redis.call('GET', answer_key(token))
  if answered then return answered end
  local time, leases = now(), {}
  if server ~= '' then
    forgive_outage(time)
    take_back_expired(time)
  end
  for _, id in ipairs(redis.call('ZRANGE', key.queued, 0, wanted - 1)) do
    local attempt = load(id)
    if attempt.partial_oldest and attempt.partial_oldest < control('version') - eta then
      unlink(attempt.partial) -- too old to be claimed whatever follows: start over
      redis.call('HDEL', attempt_key(id), 'partial', 'partial_oldest')
      attempt.partial = ''
    end
    redis.call('HSET', attempt_key(id), 'token', token, 'worker', worker, 'tries', attempt.tries + 1)
    move(attempt, 'leased', time + lease_ms)
    local group = redis.call('HMGET', group_key(attempt.group), 'size', 'task')
    leases[#leases + 1] = { id, attempt.group, tonumber(group[1]), group[2], attempt.tries + 1, attempt.partial }
  end
  if #leases == 0 then return '[]' end
  local answer = cjson.encode(leases)
  redis.call('SET', answer_key(token), answer, 'PX', lease_ms)
  return answer
end

function transitions.heartbeat(leases)
  pass_when_full()
  local time, kept = now(), {}
  for i, lease in ipairs(cjson.decode(leases)) do
    kept[i] = held(lease[1], lease[2]) and 1 or 0
    if kept[i] == 1 then redis.call('ZADD', key.leased, time + lease_ms, lease[1]) end
  end
  return kept
end

function transitions.checkpoint(id, token, partial, oldest)
  local attempt = held(id, token)
  if not attempt then
    local successor = load(id)
    if not (successor and successor.partial == partial) then unlink(partial) end
    return 'gone'
  end
  if attempt.partial ~= partial then unlink(attempt.partial) end
  redis.call('HSET', attempt_key(id), 'partial', partial, 'partial_oldest', oldest)
  redis.call('ZADD', key.leased, now() + lease_ms, id)
  return 'ok'
end

-- The payload is already in Redis, expiring; here it is counted, once, and stays.
function transitions.complete(id, token, payload, oldest)
  local attempt = load(id)
  if attempt and attempt.payload == payload then
    redis.call('PERSIST', payload)
    return 'duplicate'
  end
  attempt = held(id, token)
  if not attempt then
    unlink(payload)
    redis.call('HINCRBY', key.control, 'late', 1)
    return 'gone'
  end
  if redis.call('PERSIST', payload) == 0 then return 'resend' end
  unlink(attempt.partial)
  redis.call('HDEL', attempt_key(id), 'partial', 'partial_oldest')
  redis.call('HSET', attempt_key(id), 'payload', payload, 'oldest', tonumber(oldest) or control('version'))
  move(attempt, 'ready', now())
  settle(attempt.group)
  return 'ok'
end

function transitions.fail(id, token, note)
  pass_when_full()
  local attempt = held(id, token)
  if not attempt then return 'gone' end
  redis.call('LPUSH', key.failures, note)
  redis.call('LTRIM', key.failures, 0, 99)
  if attempt.tries >= most_tries then
    drop(attempt, 'env_failed')
    return 'dropped'
  end
  requeue(attempt)
  return 'requeued'
end

function transitions.release(id, token)
  pass_when_full()
  local attempt = held(id, token)
  if not attempt then return 'gone' end
  redis.call('HINCRBY', attempt_key(id), 'tries', -1)
  requeue(attempt)
  return 'requeued'
end

-- Learning: ready -> claimed -> trained, or ready again

function transitions.claim(step)
  pass_when_full()
  local made = redis.call('HGET', key.manifests, step)
  if made then return made end
  if tonumber(step) <= control('committed') then return 'committed' end
  evict_stale()
  local oldest = score(control('version') - eta, 0)
  local groups = redis.call('ZRANGE', key.complete, oldest, '+inf', 'BYSCORE', 'LIMIT', 0, batch_size)
  if #groups < batch_size then return false end
  local ids = {}
  for _, group in ipairs(groups) do
    redis.call('ZREM', key.complete, group)
    for _, attempt in ipairs(members(group)) do
      move(attempt, 'claimed', step)
      ids[#ids + 1] = attempt.id
    end
  end
  local manifest = cjson.encode(ids)
  redis.call('HSET', key.manifests, step, manifest)
  return manifest
end

-- A new policy is current: what trained it gives its places to new work, and what became too old goes.
function transitions.publish(version, trained_step)
  pass_when_full()
  raise_to('version', tonumber(version))
  for step, ids in pairs(manifests()) do
    if step <= tonumber(trained_step) then
      for _, group in ipairs(groups_of(ids)) do redis.call('SREM', key.active, group) end
    end
  end
  evict_stale()
  ring()
end

-- The checkpoint that holds every step up to `step` is durable: only now may payloads die. They are freed inline, so a
-- call takes a slice of 64 and answers 1 while there is more.
function transitions.commit(step)
  pass_when_full()
  local slice = 64
  for made, ids in pairs(manifests()) do
    if made <= tonumber(step) then
      for _, id in ipairs(ids) do
        if slice == 0 then return 1 end
        if train(id, 'trained:' .. made) then slice = slice - 1 end
      end
      for _, group in ipairs(groups_of(ids)) do forget_if_empty(group) end
      redis.call('HDEL', key.manifests, made)
    end
  end
  raise_to('committed', tonumber(step))
  return 0
end

-- A learner starts from the checkpoint that holds every step up to `step`; the caller has committed up to there.
function transitions.rewind(step, recently_trained)
  pass_when_full()
  train_all(cjson.decode(recently_trained))
  local back = 0
  for _, ids in pairs(manifests()) do back = back + unclaim(ids) end
  redis.call('UNLINK', key.manifests)
  redis.call('HSET', key.control, 'committed', step)
  return back
end

-- Redis came back and may have lost its last second: the living learner's manifests are the truth.
function transitions.reconcile(learner_manifests, recently_trained, version)
  pass_when_full()
  raise_to('version', tonumber(version))
  raise_to('issued', tonumber(version))
  train_all(cjson.decode(recently_trained))
  local truth, mine = cjson.decode(learner_manifests), {}
  for _, ids in pairs(truth) do for _, id in ipairs(ids) do mine[id] = true end end
  for _, ids in pairs(manifests()) do
    local unknown = {}
    for _, id in ipairs(ids) do if not mine[id] then unknown[#unknown + 1] = id end end
    unclaim(unknown)
  end
  redis.call('UNLINK', key.manifests)
  for step, ids in pairs(truth) do
    redis.call('HSET', key.manifests, step, cjson.encode(ids))
    for _, group in ipairs(groups_of(ids)) do redis.call('ZREM', key.complete, group) end
    for _, id in ipairs(ids) do
      local attempt = load(id)
      if attempt then
        if attempt.state ~= 'claimed' then move(attempt, 'claimed', step) end
      elseif redis.call('HEXISTS', history_key(id), id) == 0 then
        redis.call('HSET', key.unborn, id, step)
      end
    end
  end
  ring()
end

function transitions.next_version(at_least)
  pass_when_full()
  local version = math.max(control('issued'), control('version'), tonumber(at_least)) + 1
  redis.call('HSET', key.control, 'issued', version)
  return version
end

-- Questions

function transitions.version() return control('version') end

function transitions.state(id)
  return redis.call('HGET', attempt_key(id), 'state') or redis.call('HGET', history_key(id), id)
end

function transitions.payloads(ids)
  local names = {}
  for i, id in ipairs(cjson.decode(ids)) do names[i] = redis.call('HGET', attempt_key(id), 'payload') or '' end
  return names
end

function transitions.ledger()
  local live = {}
  for _, state in ipairs({ 'queued', 'leased', 'ready', 'claimed' }) do live[state] = redis.call('ZCARD', key[state]) end
  return { cjson.encode(live), redis.call('HGETALL', key.ledger) }
end

function transitions.stats()
  local versions = {}
  for i, rank in ipairs(redis.call('ZRANGE', key.complete, 0, -1, 'WITHSCORES')) do
    if i % 2 == 0 then versions[#versions + 1] = math.floor(tonumber(rank) / 4294967296) end
  end
  return cjson.encode({
    version = control('version'), room = room(), next_index = control('next_index'), committed = control('committed'),
    late_results = control('late'), active_groups = redis.call('SCARD', key.active),
    complete_versions = versions, failures = redis.call('LRANGE', key.failures, 0, -1),
    queued = redis.call('ZCARD', key.queued), leased = redis.call('ZCARD', key.leased),
    ready = redis.call('ZCARD', key.ready), claimed = redis.call('ZCARD', key.claimed),
  })
end

function transitions.bell() return key.bell end

local answer = transitions[ARGV[1]](unpack(ARGV, 7))
for field, by in pairs(tally) do
  if by ~= 0 then redis.call('HINCRBY', key.ledger, field, by) end
end
if rung then redis.call('XADD', key.bell, 'MAXLEN', 1, '*', 'look', 'again') end
return answer
