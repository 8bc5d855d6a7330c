-- Groups: rollouts of one task, which become claimable together. A single rollout is a group of one.

local function alive(group)
  local ids = {}
  for member in string.gmatch(redis.call('HGET', group_key(group), 'alive') or '', '[^,]+') do
    ids[#ids + 1] = group .. '/' .. member
  end
  return ids
end

local function room() return (rules.eta + 1) * rules.batch_size - redis.call('SCARD', key.active) end

local function withdraw_offer(group)
  redis.call('ZREM', key.complete, group)
  redis.call('HDEL', key.offers, group)
  redis.call('ZREM', key.pieces, group)
end

-- A finished attempt leaves its group; the last one takes the group with it.
local function depart(attempt)
  local rest = {}
  for _, id in ipairs(alive(attempt.group)) do
    if id ~= attempt.id then rest[#rest + 1] = string.match(id, '/(.*)$') end
  end
  withdraw_offer(attempt.group)
  if #rest > 0 then
    redis.call('HSET', group_key(attempt.group), 'alive', table.concat(rest, ','))
  else
    redis.call('UNLINK', group_key(attempt.group))
    redis.call('SREM', key.active, attempt.group)
    ring()
  end
end

-- A learner may have claimed or even trained it before a restart in which Redis forgot that it had been created.
local function create(id, group)
  local label, source = unpack(redis.call('HMGET', group_key(group), 'label', 'source'))
  local attempt = { id = id, group = group, label = label, source = source, story = '' }
  count('created', source, 1)
  if redis.call('HEXISTS', history_key(id), id) == 1 then
    count('trained', source, 1)
    return depart(attempt)
  end
  note(attempt, 'q' .. seconds(now()), 'source', source, 'label', label)
  local step = redis.call('HGET', key.unborn, id)
  redis.call('HDEL', key.unborn, id)
  enter(attempt, step and 'claimed' or 'queued', step or index_of(id))
end

local function retire(attempt, from, outcome, event)
  finish(attempt, from, outcome, event)
  depart(attempt)
end

local function drop_group(group, reason)
  for _, id in ipairs(alive(group)) do
    local state = where(id)
    retire(load(id), state, 'dropped:' .. reason, 'd' .. REASONS[reason])
  end
end

-- The learner may take it from now on. A group that lost members is padded to its size with those it has, in turn.
local function offer(group, ids, size, oldest)
  local home = #ids
  for i = home + 1, size do ids[i] = ids[(i - 1) % home + 1] end
  local source = redis.call('HGET', group_key(group), 'source')
  redis.call('HSET', key.offers, group, source .. '|' .. table.concat(ids, ','))
  redis.call('ZADD', key.complete, score(oldest, index_of(group)), group)
  local segment = segment_of(group)
  if not segment and redis.call('HEXISTS', attempt_key(ids[1]), 'segments') == 1 then segment = 65535 end -- the last
  if segment then redis.call('ZADD', key.pieces, index_of(group) * 65536 + segment, group) end
  if redis.call('ZCOUNT', key.complete, score(oldest_allowed(), 0), '+inf') == rules.batch_size then ring() end
end

-- A member came home or was dropped: the group is offered when all that are left are home. A group that lost half of
-- its members or more has no baseline worth the name, and goes.
local function settle(group)
  local ids = alive(group)
  if #ids == 0 then return end
  local size = tonumber(redis.call('HGET', group_key(group), 'size'))
  if #ids * 2 <= size then return drop_group(group, 'filtered') end
  local oldest = math.huge
  for _, id in ipairs(ids) do
    if not redis.call('ZSCORE', key.ready, id) then return end
    oldest = math.min(oldest, tonumber(redis.call('HGET', attempt_key(id), 'oldest')))
  end
  offer(group, ids, size, oldest)
end

-- Another attempt takes its place, unless as many were replaced as the group has members: then it is the task.
local function replace(attempt)
  local replaced = redis.call('HINCRBY', group_key(attempt.group), 'replaced', 1)
  if replaced > tonumber(redis.call('HGET', group_key(attempt.group), 'size')) then return end
  local member, time = string.match(attempt.id, '/(%d+)%.?(%d*)$')
  local id = attempt.group .. '/' .. member .. '.' .. (tonumber(time) or 0) + 1
  local before = redis.call('HGET', group_key(attempt.group), 'alive')
  redis.call('HSET', group_key(attempt.group), 'alive', before .. ',' .. string.match(id, '/(.*)$'))
  create(id, attempt.group)
  ring()
end

local REPLACED = { env_failed = true, poisoned = true, rejected = true } -- the attempt's own fate, not the group's

local function lose(attempt, from, reason)
  if rules.replace and REPLACED[reason] and not segment_of(attempt.id) then replace(attempt) end
  retire(attempt, from, 'dropped:' .. reason, 'd' .. REASONS[reason])
end

local function drop(attempt, from, reason)
  lose(attempt, from, reason)
  settle(attempt.group)
end

-- Its worker vanished, or the learner died over it. Whoever does so again and again is kept aside.
local function crash(attempt, from, event)
  local crashes = attempt.crashes + 1
  if crashes < rules.max_tries then return requeue(attempt, from, event, 'crashes', crashes) end
  tell(attempt, event)
  drop(attempt, from, 'poisoned')
end

-- Too old to be claimed. Where max_uses allows several, an attempt that was trained on before is not dropped for it: it
-- waits for the commit of its last step, or is trained already.
local function evict_stale()
  local newest = score(oldest_allowed(), 0) - 1
  for _, group in ipairs(redis.call('ZRANGE', key.complete, '-inf', newest, 'BYSCORE', 'LIMIT', 0, 1024)) do
    withdraw_offer(group)
    for _, id in ipairs(alive(group)) do
      local attempt = load(id)
      if attempt.uses == 0 then
        retire(attempt, 'ready', 'dropped:stale', 'ds')
      elseif tonumber(attempt.step) > control('committed') then
        move(attempt, 'ready', 'claimed', attempt.step)
      else
        retire(attempt, 'ready', 'trained', 't')
      end
    end
  end
end
