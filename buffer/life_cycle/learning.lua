-- Learning: claimed -> trained, or ready again

local function distinct(items, name)
  local found, seen = {}, {}
  for _, item in ipairs(items) do
    if name then item = name(item) end
    if not seen[item] then found[#found + 1] = item end
    seen[item] = true
  end
  return found
end

local function set(items)
  local found = {}
  for _, item in ipairs(items) do found[item] = true end
  return found
end

-- The version has grown: what is offered and became too old goes.
local function evict_stale()
  local newest = score(oldest_allowed(), 0) - 1
  for _, offer in ipairs(redis.call('ZRANGE', key.offers, '-inf', newest, 'BYSCORE')) do
    local group = group_of(offer)
    withdraw_offer(group)
    let_group_go(group, 'stale')
  end
end

-- A new policy is current: what trained it gives its places to new work, or is offered again, and what became too old
-- goes.
local function offer_again(manifest)
  for _, id in ipairs(distinct(manifest.ids)) do
    local attempt = load(id)
    local state, step = where(id)
    if state == 'claimed' and step == manifest.step and #attempt.used < rules.max_uses and attempt.payload then
      move(attempt, 'claimed', 'ready', attempt.home_at)
    end
  end
  for _, group in ipairs(distinct(manifest.ids, group_of)) do settle(group) end
end

function transitions.publish(version, trained_step, lineage)
  pass_when_full()
  if replaced() then return 'replaced' end
  raise_to('version', tonumber(version))
  set_lineage(lineage)
  for _, step in ipairs(steps_from(control('trained') + 1)) do
    if step <= tonumber(trained_step) then
      local manifest = manifest_of(step)
      in_slices('SREM', key.active, distinct(manifest.ids, group_of))
      if rules.max_uses > 1 then offer_again(manifest) end
    end
  end
  raise_to('trained', tonumber(trained_step))
  evict_stale()
  ring()
end

local function key_of(value, items)
  for name, other in pairs(items) do
    if other == value then return name end
  end
end

-- Trained, and Redis does not know it: it forgot the attempt, and create() will find here what became of it; or it forgot
-- the arrival and the claim, and has dropped what it took for unfinished.
local function revise(id, event)
  local told = redis.call('HGET', history_key(id), id)
  if not told then return redis.call('HSET', history_key(id), id, event) end
  local code = string.match(told, 'd(%l)[+%d]*$')
  if not code then return end
  local names = redis.call('HGETALL', key.names)
  local source
  for i = 2, #names, 2 do
    if names[i] == string.match(told, '^%d+') then source = names[i - 1] end
  end
  redis.call('HSET', history_key(id), id, told .. event)
  count('dropped:' .. key_of(code, REASONS), source, -1)
  count('trained', source, 1)
end

-- A durable checkpoint holds its gradient. If Redis forgot the claim, there is no manifest. Answers whether a payload
-- went with it: one that is to be used again, or is in use, stays.
local function train(id, step, manifest)
  redis.call('HDEL', key.unborn, id)
  local attempt, event = load(id), 't' .. step
  if not attempt then
    revise(id, event)
    over(group_of(id))
    return false
  end
  local state, rank = where(id)
  if manifest then
    tell(attempt, 'c' .. step .. '.' .. manifest.version, manifest.at)
    measure(attempt, manifest)
    event = 't'
  end
  if set(attempt.used)[step] and not (state == 'claimed' and rank == step) then
    note(attempt, '')
    return false
  end
  graduate(attempt, state, event)
  return true
end

-- The checkpoint that holds every step up to `step` is durable: only now may payloads die. They are freed inline, so a
-- call takes a slice of 64 and answers 1 while there is more.
function transitions.commit(step)
  pass_when_full()
  if replaced() then return 'replaced' end
  raise_to('committed', tonumber(step))
  local slice = 64
  for _, made in ipairs(steps_from(0)) do
    if made <= tonumber(step) then
      local manifest = manifest_of(made)
      local ids = distinct(manifest.ids)
      for i, id in ipairs(ids) do
        if slice == 0 then
          manifest.ids = {}
          for rest = i, #ids do manifest.ids[#manifest.ids + 1] = ids[rest] end
          keep_manifest(manifest)
          return 1
        end
        if train(id, made, manifest) then slice = slice - 1 end
        settle(group_of(id))
      end
      redis.call('HDEL', key.manifests, made)
    end
  end
  return 0
end

-- Of a step that is undone. `crashed`: the learner died over it.
local function put_back(attempt, manifest, crashed)
  tell(attempt, 'c' .. manifest.step .. '.' .. manifest.version, manifest.at)
  attempt.crashes = attempt.crashes + (crashed and 1 or 0)
  if attempt.crashes >= rules.max_tries then
    lose(attempt, 'claimed', 'poisoned')
  elseif attempt.payload and redis.call('EXISTS', attempt.payload) == 1 then
    note(attempt, 'b', 'crashes', attempt.crashes)
    move(attempt, 'claimed', 'ready', attempt.home_at)
  elseif segment_of(attempt.id) or #attempt.used > 0 then
    let_go(attempt, 'claimed', 'lost') -- a power cut took it, and only its episode could make it, or it has served
  else
    requeue(attempt, 'claimed', 'm', 'crashes', attempt.crashes)
  end
end

-- The learner did not train on these, or forgot that it did. A group that no step has used is in flight again.
local function unclaim(manifest, crashed)
  local back = 0
  for _, id in ipairs(distinct(manifest.ids)) do
    redis.call('HDEL', key.unborn, id)
    local attempt = load(id)
    if attempt then
      mark(attempt, manifest.step, false)
      if #attempt.used == 0 and not segment_of(id) then redis.call('SADD', key.active, attempt.group) end
      local state, step = where(id)
      if state == 'claimed' and step == manifest.step then
        put_back(attempt, manifest, crashed)
        back = back + 1
      end
    end
  end
  redis.call('HDEL', key.manifests, manifest.step)
  for _, group in ipairs(distinct(manifest.ids, group_of)) do settle(group) end
  return back
end

-- A payload of this step cannot be read: it is kept aside, what is missing is run again, and the step is claimed anew.
function transitions.withdraw(step, unreadable)
  pass_when_full()
  if replaced() then return 'replaced' end
  local manifest = manifest_of(step)
  if not manifest then return end
  unclaim(manifest)
  for _, id in ipairs(cjson.decode(unreadable)) do
    local attempt = load(id)
    if attempt and where(id) == 'ready' then drop(attempt, 'ready', 'rejected') end
  end
end

-- Undoes what Redis claimed for a step and the learner did not; answers Redis' manifest as it was.
local function undo_all_but(ids, step)
  local manifest, undone, theirs = manifest_of(step), {}, set(ids)
  for _, id in ipairs(manifest.ids) do
    if not theirs[id] then undone[#undone + 1] = id end
  end
  unclaim({ step = step, ids = undone, version = manifest.version, at = manifest.at })
  return manifest
end

local function in_numbers(manifests)
  local steps = {}
  for step in pairs(manifests) do steps[#steps + 1] = tonumber(step) end
  table.sort(steps)
  return steps
end

-- The manifests of the learner's newest checkpoints, ahead of the commit of Redis' own: Redis may have forgotten them in
-- a power cut, or remember instead what a restart of the learner had undone. The last use of an attempt first, which it
-- is named after.
function transitions.believe(recently_trained, lineage)
  pass_when_full()
  if replaced() then return 'replaced' end
  set_lineage(lineage) -- first: what comes back to the groups is not as old as its version says
  local trained = cjson.decode(recently_trained)
  local steps = in_numbers(trained)
  for i = #steps, 1, -1 do
    local step, left = steps[i], {}
    local ids = distinct(trained[tostring(step)])
    local manifest = manifest_of(step) and undo_all_but(ids, step)
    local known = set(manifest and manifest.ids or {})
    for _, id in ipairs(ids) do
      if known[id] then left[#left + 1] = id else train(id, step) end
    end
    if #left > 0 then
      manifest.ids = left
      keep_manifest(manifest)
    end
    for _, group in ipairs(distinct(ids, group_of)) do settle(group) end
  end
end

-- A learner starts from the checkpoint that holds every step up to `step`; the caller has committed up to there. The
-- step that its predecessor died in, if it did, is the first that was not published as trained. Answers how many
-- attempts are back, and the learner's number.
function transitions.rewind(step)
  pass_when_full()
  set_control('committed', step)
  local back, steps, trained, asked = 0, steps_from(0), control('trained'), control('leaving') == 1
  for i = #steps, 1, -1 do back = back + unclaim(manifest_of(steps[i]), steps[i] > trained and not asked) end
  set_control('trained', step)
  set_control('leaving', 0)
  set_control('learner', control('learner') + 1)
  return { back, control('learner') }
end

-- The learner was asked to stop. Should it be killed before its step is done, nobody's attempt is to blame.
function transitions.leave()
  pass_when_full()
  set_control('leaving', 1)
end

-- Redis came back and may have lost its last second: the living learner's manifests are the truth. What Redis claimed
-- and the learner did not is undone, what it forgot is claimed again; the rest stays as it is. `committed` follows: what
-- later steps use again must be known by then.
function transitions.reconcile(committed, learner_manifests, version)
  pass_when_full()
  raise_to('version', tonumber(version))
  raise_to('issued', tonumber(version))
  if learner ~= '' then raise_to('learner', tonumber(learner)) end
  if replaced() then return 'replaced' end
  local truth, known, steps = cjson.decode(learner_manifests), {}, steps_from(tonumber(committed) + 1)
  for i = #steps, 1, -1 do
    known[steps[i]] = undo_all_but(truth[tostring(steps[i])] or {}, steps[i])
  end
  for _, step in ipairs(in_numbers(truth)) do
    local ids = truth[tostring(step)]
    local before = known[step] or { ids = {}, version = control('version'), at = now() }
    local claimed = set(before.ids)
    keep_manifest({ step = step, ids = ids, version = before.version, at = before.at })
    for _, id in ipairs(distinct(ids)) do
      local attempt = load(id)
      if attempt and not claimed[id] then
        withdraw_offer(attempt.group)
        mark(attempt, step, true)
        redis.call('HDEL', attempt_key(id), 'token')
        move(attempt, where(id), 'claimed', step)
      elseif not attempt and redis.call('HEXISTS', history_key(id), id) == 0 then
        redis.call('HSET', key.unborn, id, step)
      end
    end
  end
  evict_stale()
  ring()
end

function transitions.next_version(at_least)
  pass_when_full()
  local version = math.max(control('issued'), control('version'), tonumber(at_least)) + 1
  set_control('issued', version)
  return version
end

-- Archived: the next in the outbox is number `first` + the number of payloads. Unless, in a power cut, Redis forgot some
-- of them and put others in their place.
function transitions.archived(first, payloads)
  pass_when_full()
  if tonumber(first) ~= control('archived') then return 0 end
  payloads = cjson.decode(payloads)
  local rows = redis.call('LRANGE', key.outbox, 0, #payloads - 1)
  for i, payload in ipairs(payloads) do
    if string.match(rows[i] or '', '[^|]*$') ~= payload then return 0 end
  end
  redis.call('LTRIM', key.outbox, #payloads, -1)
  in_slices('UNLINK', '{run}:nothing', payloads)
  set_control('archived', first + #payloads)
  return #payloads
end
