-- Arrival: what workers send of an attempt, on the way or at its end: leased -> ready

-- A blob is sent expiring, ahead of the transition that counts it; from then on it stays.
local function arrived(blob) return redis.call('PERSIST', blob) == 1 or redis.call('EXISTS', blob) == 1 end

local function too_late(payload) -- counted once, however often it is sent
  if redis.call('UNLINK', payload) == 1 then redis.call('HINCRBY', key.control, 'late', 1) end
end

local function keep_partial(attempt, partial, sampled)
  if attempt.partial ~= partial then unlink(attempt.partial) end
  redis.call('HSET', attempt_key(attempt.id), 'partial', partial, 'sampled', sampled)
  redis.call('ZADD', key.leased, now() + rules.lease_ms, attempt.id)
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
  if not arrived(partial) then return 'resend' end
  keep_partial(attempt, partial, sampled)
  return 'ok'
end

-- The payload is already in Redis, expiring; here it is counted, once, and stays. `facts`: oldest and newest version
-- that sampled it ('' if nothing was sampled), its reward, tokens and bytes.
local function come_home(attempt, payload, facts)
  local oldest, newest, reward, tokens, bytes = unpack(facts)
  local version = control('version')
  if oldest == '' then oldest, newest = version, version end
  attempt.oldest = oldest
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
    too_late(payload)
    return 'gone'
  end
  if not arrived(payload) then return 'resend' end
  unlink(attempt.partial)
  redis.call('HDEL', attempt_key(id), 'token', 'partial', 'sampled')
  come_home(attempt, payload, { ... })
  move(attempt, 'leased', 'ready', now())
  settle(attempt.group, attempt)
  return 'ok'
end

-- A segment becomes claimable while its episode goes on from `partial`, in one step: no token comes home twice.
function transitions.segment(id, token, number, payload, partial, sampled, ...)
  local attempt, group = held(id, token), group_of(id) .. ':' .. number
  if redis.call('HGET', attempt_key(group .. '/0'), 'payload') == payload then
    redis.call('PERSIST', payload)
    forget_unless_used(id, partial)
    return 'duplicate'
  end
  if not attempt or tonumber(number) <= attempt.segments then
    too_late(payload)
    forget_unless_used(id, partial)
    return attempt and 'duplicate' or 'gone'
  end
  if redis.call('EXISTS', partial) == 0 or not arrived(payload) then return 'resend' end
  redis.call('PERSIST', partial)
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
