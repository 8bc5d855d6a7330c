-- Claiming: ready -> claimed. What is offered is never too old: see settle(), publish() and reconcile().

-- The offers the learner takes next: by age, by youth, or those of the groups that the caller chose.
local function choose(order, chosen)
  local oldest = score(oldest_allowed(), 0)
  if order == 'oldest' then
    return redis.call('ZRANGE', key.offers, oldest, '+inf', 'BYSCORE', 'LIMIT', 0, rules.batch_size)
  elseif order == 'freshest' then
    return redis.call('ZRANGE', key.offers, '+inf', oldest, 'BYSCORE', 'REV', 'LIMIT', 0, rules.batch_size)
  end
  local offers = {}
  for _, group in ipairs(cjson.decode(chosen)) do
    local offer = redis.call('HGET', group_key(group), 'offer')
    if offer and tonumber(redis.call('ZSCORE', key.offers, offer) or -1) >= oldest then offers[#offers + 1] = offer end
  end
  return offers
end

-- Of an episode that comes home in segments the earlier ones are taken first, whatever the order.
local function in_order(offers)
  local taken = {}
  for i, offer in ipairs(offers) do
    if redis.call('ZSCORE', key.pieces, offer) then
      local index = index_of(offer)
      local first = index * 65536
      offers[i] = redis.call('ZRANGE', key.pieces, first, first + 65535, 'BYSCORE', 'LIMIT', taken[index] or 0, 1)[1]
      taken[index] = (taken[index] or 0) + 1
    end
  end
  return offers
end

local function take(offers, adjacent)
  if not adjacent then return in_slices('ZREM', key.offers, offers) end
  local first = math.min(redis.call('ZRANK', key.offers, offers[1]), redis.call('ZRANK', key.offers, offers[#offers]))
  redis.call('ZREMRANGEBYRANK', key.offers, first, first + #offers - 1)
end

-- Made once, and the same for every rank and retry. A call per group would cost a batch of 64 a millisecond.
function transitions.claim(step, order, chosen)
  pass_when_full()
  local made = redis.call('HGET', key.manifests, step)
  if made then return made end
  if tonumber(step) <= control('committed') then return 'committed' end
  if replaced() then return 'replaced' end
  local offers = choose(order, chosen)
  if #offers < rules.batch_size then return false end
  local in_pieces = redis.call('ZCARD', key.pieces) > 0
  if in_pieces then offers = in_order(offers) end
  local ids, ranked, seen, taken = {}, {}, {}, {}
  for _, offer in ipairs(offers) do
    local members, source = string.match(offer, '^([^|]*)|(.*)$')
    for id in string.gmatch(members, '[^,]+') do
      ids[#ids + 1] = id
      if not seen[id] then
        seen[id] = true
        ranked[#ranked + 1] = id
        ranked[#ranked + 1] = step
        taken[source] = (taken[source] or 0) + 1
        if rules.max_uses > 1 then mark(load(id), tonumber(step), true) end
      end
    end
  end
  for source, n in pairs(taken) do
    count('ready', source, -n)
    count('claimed', source, n)
  end
  take(offers, order ~= 'chosen' and not in_pieces)
  if in_pieces then in_slices('ZREM', key.pieces, offers) end
  in_slices('HDEL', key.ready, ids)
  in_slices('HSET', key.claimed, ranked)
  return keep_manifest({ step = tonumber(step), ids = ids, version = control('version'), at = now() })
end
