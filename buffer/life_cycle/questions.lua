-- Questions: nothing changes

function transitions.version() return control('version') end

-- What is known of an attempt: its state or '' if it is finished, its rank there, then its fields or its history.
function transitions.story(id)
  if not string.match(id, '^%d+:?%d*/%d+%.?%d*$') then return false end
  local state, rank = where(id)
  local fields = state and redis.call('HGETALL', attempt_key(id)) or redis.call('HGET', history_key(id), id)
  if not fields then return false end
  local names = redis.call('HGETALL', key.names)
  return { state or '', tostring(rank or ''), fields, names, control('born') }
end

-- For each attempt its payload's name, bytes and tokens.
function transitions.payloads(ids)
  local found = {}
  for i, id in ipairs(cjson.decode(ids)) do
    local payload, bytes, tokens = unpack(redis.call('HMGET', attempt_key(id), 'payload', 'bytes', 'tokens'))
    found[i] = { payload or '', tonumber(bytes) or 0, tonumber(tokens) or 0 }
  end
  return found
end

-- What can be claimed now, oldest first: a row of group, source, oldest version, mean reward, tokens, uses and the
-- seconds for which it has been waiting.
function transitions.candidates()
  local rows, time = {}, now()
  for _, offer in ipairs(redis.call('ZRANGE', key.offers, score(oldest_allowed(), 0), '+inf', 'BYSCORE')) do
    local found = load_group(group_of(offer))
    local ids, oldest, reward, tokens, uses, since = found.alive, math.huge, 0, 0, 0, 0
    for _, id in ipairs(ids) do
      local attempt = load(id)
      oldest, since = math.min(oldest, tonumber(attempt.oldest)), math.max(since, tonumber(attempt.home_at))
      reward, tokens = reward + tonumber(attempt.reward) / #ids, tokens + tonumber(attempt.tokens)
      uses = math.max(uses, #attempt.used)
    end
    rows[#rows + 1] = { found.id, found.source, oldest, reward, tokens, uses, (time - since) / 1000 }
  end
  return cjson.encode(rows)
end

function transitions.ledger()
  local live = {}
  for _, state in ipairs(STATES) do live[state] = population(state) end
  return { cjson.encode(live), redis.call('HGETALL', key.ledger) }
end

function transitions.stats()
  local versions = {}
  for i, rank in ipairs(redis.call('ZRANGE', key.offers, 0, -1, 'WITHSCORES')) do
    if i % 2 == 0 then versions[#versions + 1] = math.floor(tonumber(rank) / 4294967296) end
  end
  return cjson.encode({
    version = control('version'), lineage = lineage(), room = room(), next_index = control('next_index'),
    committed = control('committed'),
    late_results = control('late'), active_groups = redis.call('SCARD', key.active),
    complete_versions = versions, failures = redis.call('LRANGE', key.failures, 0, -1),
    staleness = redis.call('HGETALL', key.staleness),
    queued = population('queued'), leased = population('leased'), ready = population('ready'),
    claimed = population('claimed'),
    aside = redis.call('LRANGE', key.aside, 0, -1), to_archive = redis.call('LLEN', key.outbox),
  })
end

function transitions.outbox(most)
  return { control('archived'), redis.call('LRANGE', key.outbox, 0, most - 1) }
end

function transitions.bell() return key.bell end
