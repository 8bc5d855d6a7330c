-- Groups: rollouts of one task, which become claimable together. A single rollout is a group of one.

local function load_group(group)
  local size, source, alive, over = unpack(redis.call('HMGET', group_key(group), 'size', 'source', 'alive', 'over'))
  local ids = {}
  for member in string.gmatch(alive or '', '[^,]+') do ids[#ids + 1] = group .. '/' .. member end
  return { id = group, size = tonumber(size), source = source, alive = ids, over = over }
end

local function alive(group) return load_group(group).alive end

local function room() return (rules.eta + 1) * rules.batch_size - redis.call('SCARD', key.active) end

local function withdraw_offer(group)
  local offer = redis.call('HGET', group_key(group), 'offer') -- the last; it may be gone already
  if not offer then return end
  redis.call('ZREM', key.offers, offer)
  redis.call('ZREM', key.pieces, offer)
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

-- A durable checkpoint holds a member of it; what is left is for settle().
local function over(group)
  if redis.call('EXISTS', group_key(group)) == 1 then redis.call('HSET', group_key(group), 'over', 1) end
end

-- A learner may have claimed or even trained it before a restart in which Redis forgot that it had been created.
local function create(id, group)
  local label, source = unpack(redis.call('HMGET', group_key(group), 'label', 'source'))
  local attempt = { id = id, group = group, label = label, source = source, story = '' }
  count('created', source, 1)
  local foretold = redis.call('HGET', history_key(id), id)
  if foretold then
    redis.call('HSET', history_key(id), id, label .. ' ' .. foretold)
    count('trained', source, 1)
    depart(attempt)
    return over(group)
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

-- A durable checkpoint holds it.
local function graduate(attempt, from, event)
  retire(attempt, from, 'trained', event)
  over(attempt.group)
end

-- Dropped, unless a learner step has used it (max_uses allows several): then it waits for the commit of the last such
-- step, or is trained already.
local function let_go(attempt, from, reason)
  local last = attempt.used[#attempt.used]
  if not last then
    retire(attempt, from, 'dropped:' .. reason, 'd' .. REASONS[reason])
  elseif last > control('committed') then
    withdraw_offer(attempt.group)
    move(attempt, from, 'claimed', last)
  else
    graduate(attempt, from, 't' .. last)
  end
end

local function let_group_go(group, reason)
  for _, id in ipairs(alive(group)) do
    local state = where(id)
    let_go(load(id), state, reason)
  end
end

-- The learner may take it from now on. A group that lost members is padded to its size with those it has, in turn.
local function offer(group, oldest, segments)
  local ids, home = group.alive, #group.alive
  for i = home + 1, group.size do ids[i] = ids[(i - 1) % home + 1] end
  local offer = table.concat(ids, ',') .. '|' .. group.source
  redis.call('HSET', group_key(group.id), 'offer', offer)
  redis.call('ZADD', key.offers, score(oldest, index_of(group.id)), offer)
  local segment = segment_of(group.id) or segments and 65535 -- the last
  if segment then redis.call('ZADD', key.pieces, index_of(group.id) * 65536 + segment, offer) end
  if redis.call('ZCARD', key.offers) >= rules.batch_size
      and redis.call('ZCOUNT', key.offers, score(oldest_allowed(), 0), '+inf') == rules.batch_size then ring() end
end

-- A member came home or left: the group is offered when all that are left are home. A group that lost half of its
-- members or more has no baseline worth the name, and goes; so does what Redis revived, in a power cut, of a group that
-- is trained, and what is too old. While the learner has a member, the fate of its step comes first. `home`: the one
-- that came, if the caller has it.
local function settle(id, home)
  local group, oldest, segments, waiting = load_group(id), math.huge, nil, false
  if #group.alive == 0 then return end
  for _, member in ipairs(group.alive) do
    if home and member == home.id then
      oldest, segments = math.min(oldest, home.oldest), home.segments > 0
    elseif rank_in('ready', member) then
      local found = redis.call('HMGET', attempt_key(member), 'oldest', 'segments')
      oldest, segments = math.min(oldest, tonumber(found[1])), found[2]
    elseif rank_in('claimed', member) then
      return
    else
      waiting = true
    end
  end
  if group.over or #group.alive * 2 <= group.size then
    let_group_go(id, 'filtered')
  elseif not waiting and oldest < oldest_allowed() then
    let_group_go(id, 'stale')
  elseif not waiting then
    offer(group, oldest, segments)
  end
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
  local whole = #attempt.used == 0 and not segment_of(attempt.id)
  if rules.replace and REPLACED[reason] and whole then replace(attempt) end
  let_go(attempt, from, reason)
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
