-- Work: queued -> leased, or back, or dropped

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

-- An attempt on its last chance is leased only to a worker without another such: should the worker die again, it takes
-- no others with it.
local function may_try(attempt, worker)
  if attempt.crashes == 0 or attempt.crashes < rules.max_tries - 1 then return true end
  local other = redis.call('HGET', key.trials, worker)
  local running = other and redis.call('HMGET', attempt_key(other), 'worker', 'token')
  if running and running[1] == worker and running[2] then return false end
  redis.call('HSET', key.trials, worker, attempt.id)
  return true
end

function transitions.lease(worker, wanted, token)
  local answered = redis.call('GET', answer_key(token))
  if answered then return answered end
  local time, leases = now(), {}
  if server ~= '' then
    forgive_outage(time)
    take_back_expired(time)
  end
  for _, id in ipairs(redis.call('ZRANGE', key.queued, 0, -1)) do
    if #leases == tonumber(wanted) then break end
    local attempt = load(id)
    if may_try(attempt, worker) then
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
