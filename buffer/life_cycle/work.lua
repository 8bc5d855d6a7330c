-- Work: queued -> leased -> ready, or back, or dropped

-- While Redis was away nobody could send a heartbeat: no reason to take the work from its workers. Once a restart, so
-- that the leases of workers that died in it do end.
local function forgive_outage(time)
  if redis.call('HGET', key.control, 'server') == server then return end
  redis.call('HSET', key.control, 'server', server)
  for _, id in ipairs(redis.call('ZRANGE', key.leased, 0, -1)) do
    redis.call('ZADD', key.leased, 'GT', time + math.floor(rules.lease_ms / 2), id)
  end
end

local function take_back_expired(time)
  for _, id in ipairs(redis.call('ZRANGE', key.leased, '-inf', time, 'BYSCORE', 'LIMIT', 0, 64)) do
    local attempt = load(id)
    if attempt then crash(attempt, 'leased', 'x') end -- else its group went with a sibling just now
  end
end

local function forget_partial(attempt)
  unlink(attempt.partial)
  redis.call('HDEL', attempt_key(attempt.id), 'partial', 'sampled')
  attempt.partial = nil
end

local function keep_partial(attempt, partial, sampled)
  if attempt.partial ~= partial then unlink(attempt.partial) end
  redis.call('HSET', attempt_key(attempt.id), 'partial', partial, 'sampled', sampled)
  redis.call('ZADD', key.leased, now() + rules.lease_ms, attempt.id)
end

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
    if attempt.partial and tonumber(attempt.sampled) < oldest_allowed() then
      forget_partial(attempt) -- too old to be claimed whatever follows: start over
      tell(attempt, 's')
    end
    note(attempt, 'l' .. number_of(worker), 'token', token, 'worker', worker, 'began', attempt.began or time)
    move(attempt, 'queued', 'leased', time + rules.lease_ms)
    local size, task = unpack(redis.call('HMGET', group_key(attempt.group), 'size', 'task'))
    leases[#leases + 1] = { id, attempt.group, tonumber(size), task, attempt.failures + attempt.crashes + 1,
      attempt.segments, attempt.partial or '' }
  end
  if #leases == 0 then return '[]' end
  local answer = cjson.encode(leases)
  redis.call('SET', answer_key(token), answer, 'PX', rules.lease_ms)
  return answer
end

-- Rows of attempt, token and, if known, the oldest version sampled so far. 0: stop working on it.
function transitions.heartbeat(leases)
  pass_when_full()
  local time, kept = now(), {}
  for i, lease in ipairs(cjson.decode(leases)) do
    local id, token, sampled = unpack(lease)
    local attempt = held(id, token)
    if attempt and rules.cancel and sampled and sampled < oldest_allowed() then
      drop(attempt, 'leased', 'cancelled')
      attempt = nil
    end
    kept[i] = attempt and 1 or 0
    if attempt then redis.call('ZADD', key.leased, time + rules.lease_ms, id) end
  end
  return kept
end

-- A lease that was lost leaves no partial, unless its successor goes on from that very one.
local function forget_unless_used(id, partial)
  if redis.call('HGET', attempt_key(id), 'partial') ~= partial then unlink(partial) end
end

function transitions.checkpoint(id, token, partial, sampled)
  local attempt = held(id, token)
  if not attempt then
    forget_unless_used(id, partial)
    return 'gone'
  end
  keep_partial(attempt, partial, sampled)
  return 'ok'
end

local function report_failure(report)
  redis.call('LPUSH', key.failures, report)
  redis.call('LTRIM', key.failures, 0, 99)
end

-- The partial cannot be continued.
function transitions.start_over(id, token, report)
  pass_when_full()
  local attempt = held(id, token)
  if not attempt then return 'gone' end
  report_failure(report)
  forget_partial(attempt)
  note(attempt, 's')
  return 'ok'
end

-- The payload is already in Redis, expiring; here it is counted, once, and stays. `facts`: oldest and newest version
-- that sampled it ('' if nothing was sampled), its reward, tokens and bytes.
local function come_home(attempt, payload, facts)
  local oldest, newest, reward, tokens, bytes = unpack(facts)
  local version = control('version')
  oldest, newest = tonumber(oldest) or version, tonumber(newest) or version
  note(attempt, 'h' .. oldest .. '-' .. newest, 'payload', payload, 'oldest', oldest, 'newest', newest,
    'reward', reward, 'tokens', tokens, 'bytes', bytes, 'home', version, 'home_at', now())
end

function transitions.complete(id, token, payload, ...)
  local attempt = load(id)
  if attempt and attempt.payload == payload then
    redis.call('PERSIST', payload)
    return 'duplicate'
  end
  if not (attempt and attempt.token == token) then
    unlink(payload)
    redis.call('HINCRBY', key.control, 'late', 1)
    return 'gone'
  end
  if redis.call('PERSIST', payload) == 0 then return 'resend' end
  unlink(attempt.partial)
  redis.call('HDEL', attempt_key(id), 'token', 'partial', 'sampled')
  come_home(attempt, payload, { ... })
  move(attempt, 'leased', 'ready', now())
  settle(attempt.group)
  return 'ok'
end

-- A segment becomes claimable while its episode goes on from `partial`, in one step: no token comes home twice.
function transitions.segment(id, token, number, payload, partial, sampled, ...)
  local attempt, group = held(id, token), group_of(id) .. ':' .. number
  if not attempt then
    unlink(payload)
    forget_unless_used(id, partial)
    redis.call('HINCRBY', key.control, 'late', 1)
    return 'gone'
  end
  if tonumber(number) <= attempt.segments then
    local piece = load(group .. '/0')
    if not (piece and piece.payload == payload) then unlink(payload) end
    return 'duplicate'
  end
  if redis.call('PERSIST', payload) == 0 then return 'resend' end
  note(attempt, 'g' .. number, 'segments', number)
  keep_partial(attempt, partial, sampled)
  redis.call('HSET', group_key(group), 'size', 1, 'label', attempt.label, 'source', attempt.source, 'alive', '0')
  create(group .. '/0', group)
  local piece = load(group .. '/0')
  if piece then
    come_home(piece, payload, { ... })
    redis.call('HSET', attempt_key(piece.id), 'began', attempt.began)
    if where(piece.id) == 'queued' then
      move(piece, 'queued', 'ready', now())
      settle(group)
    end -- else the learner had claimed it before a restart in which Redis forgot it
  else
    unlink(payload) -- it had even trained on it
  end
  return 'ok'
end

function transitions.fail(id, token, report)
  pass_when_full()
  local attempt = held(id, token)
  if not attempt then return 'gone' end
  report_failure(report)
  local failures = attempt.failures + 1
  if failures < rules.max_tries then
    requeue(attempt, 'leased', 'f', 'failures', failures)
    return 'requeued'
  end
  tell(attempt, 'f')
  drop(attempt, 'leased', 'env_failed')
  return 'dropped'
end

function transitions.release(id, token)
  pass_when_full()
  local attempt = held(id, token)
  if not attempt then return 'gone' end
  requeue(attempt, 'leased', 'r')
  return 'requeued'
end

-- A worker starts under this name: what its predecessor held need not wait for its leases to expire.
function transitions.abandon(worker)
  pass_when_full()
  local taken = 0
  for _, id in ipairs(redis.call('ZRANGE', key.leased, 0, -1)) do
    local attempt = load(id)
    if attempt and attempt.worker == worker then
      crash(attempt, 'leased', 'x')
      taken = taken + 1
    end
  end
  return taken
end
