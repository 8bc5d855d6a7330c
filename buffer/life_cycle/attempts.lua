-- The life of an attempt.
--
--     queued -> leased -> ready -> claimed -> trained
--                 |         |  \-> ready again (rewind: the learner crashed before its checkpoint; or max_uses allows it)
--                 |         \-> dropped: stale | filtered | poisoned | rejected | lost
--                 \-> queued again (lease expired, failed, released) | dropped: env_failed | poisoned | cancelled
--
-- An attempt is in exactly one state: in one of the keys queued, leased, ready, claimed, or in the history. Redis runs
-- a transition atomically, and every transition may be repeated. A script is attempts (this file), groups and
-- manifests where they are needed, then the transitions of one subject, and last their call: see SCRIPTS in replay.py.
--
-- Attempt "17/2" is member 2 of group "17", the 17th task; "17/2.1" is the first to replace it. A segment of an
-- unfinished episode is a group of its own, "17:3", with the one attempt "17:3/0".
--
-- Redis makes a script's functions and tables anew at each call, so the caller has written into the text what never
-- changes: the run's name for {run}, and ahead of this file a table with its settings, `rules`.
--
-- KEYS[1] = "{run}:"    ARGV = transition, Redis' run id ('' if the caller does not know it yet), the caller's number if it
-- is a learner (else ''), then the transition's own arguments

local server, learner = ARGV[2], ARGV[3]

-- Key names: here and nowhere else. The names of payloads and partials come from the caller and are kept in the attempt.

local key = {
  control = '{run}:control',          -- HASH    version, issued, lineage, next_index, trained, committed, late,
                                      --         archived, born, server
  ledger = '{run}:ledger',            -- HASH    <state or outcome>|<source> -> count
  staleness = '{run}:staleness',      -- HASH    <which>|<bucket> -> trained attempts, see measure()
  queued = '{run}:queued',            -- ZSET    attempt -> index of its group
  leased = '{run}:leased',            -- ZSET    attempt -> deadline in ms
  ready = '{run}:ready',              -- HASH    attempt -> ms when it came home
  claimed = '{run}:claimed',          -- HASH    attempt -> the last learner step that claimed it
  offers = '{run}:offers',            -- ZSET    attempt,attempt,...|source of a group whose every member is home ->
                                      --         score(oldest sampled version, index)
  pieces = '{run}:pieces',            -- ZSET    such an offer that belongs to an episode in segments -> their order
  active = '{run}:active',            -- SET     groups that hold a place under the staleness bound
  manifests = '{run}:manifests',      -- HASH    learner step -> JSON: step, ids, version, at (ms)
  unborn = '{run}:unborn',            -- HASH    attempt a learner claimed before Redis forgot its creation -> step
  names = '{run}:names',              -- HASH    worker or task source -> its number in stories
  trials = '{run}:trials',            -- HASH    worker -> the attempt on its last chance that it was last leased
  failures = '{run}:failures',        -- LIST    the last infrastructure failures, newest first
  aside = '{run}:aside',              -- LIST    <attempt>|<payload> of what was poisoned or rejected, newest first
  outbox = '{run}:outbox',            -- LIST    <attempt>|<outcome>|<payload> of what is to be archived, oldest first
  bell = '{run}:bell',                -- STREAM  one entry; a new one says: look again
}
local STATES = { 'queued', 'leased', 'ready', 'claimed' }
local IN_ORDER = { queued = true, leased = true } -- sorted sets; the others are hashes, which are quicker
local function attempt_key(id) return '{run}:attempt:' .. id end     -- HASH while live: see load()
local function group_key(group) return '{run}:group:' .. group end   -- HASH while live: size, task, label, source, alive, offer
local function answer_key(token) return '{run}:answer:' .. token end -- STRING, expiring: what a lease call answered

local function index_of(id) return tonumber(string.match(id, '^%d+')) end
local function group_of(id) return string.match(id, '^[^/]+') end
local function segment_of(id) return tonumber(string.match(id, ':(%d+)')) end -- nil for a whole episode

-- Few attempts to a hash keep it a listpack: about 50 bytes for a finished attempt instead of 150.
local function history_key(id)
  local number = segment_of(id) or tonumber(string.match(id, '/(%d+)'))
  return '{run}:history:' .. math.floor(index_of(id) / 8) .. ':' .. math.floor(number / 8)
end

-- Small words

local clock
local function now() -- of this call
  if not clock then
    local time = redis.call('TIME')
    clock = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return clock
end

local known, repeats -- of the control hash, by this call; what nearly all of them need comes together
local function control(field)
  if not known then
    local version, born, made = unpack(redis.call('HMGET', key.control, 'version', 'born', 'lineage'))
    known = { version = tonumber(version or 0), born = tonumber(born or 0) }
    repeats = cjson.decode(made or '[]')
  end
  known[field] = known[field] or tonumber(redis.call('HGET', key.control, field) or 0)
  return known[field]
end

local function set_control(field, value)
  redis.call('HSET', key.control, field, value)
  if known then known[field] = tonumber(value) end
end

local function raise_to(field, value)
  if value > control(field) then set_control(field, value) end
end

-- Older versions first, and within a version older tasks first; exact up to version 2^21 and task 2^32.
local function score(version, index) return version * 4294967296 + index end

local function lineage() -- [[version, the older one whose weights it holds], ...], newest first
  control('version')
  return repeats
end

-- Versions from one policy to another: see lineage.py, which says the same.
local function age(sampled, now)
  local sum = 0
  for _, pair in ipairs(lineage()) do
    local version, older = unpack(pair)
    if sampled < version and version <= now then sum, now = sum + now - version, older end
  end
  return sum + math.max(0, now - sampled)
end

-- The smallest version whose age is within the bound.
local function oldest_allowed()
  local now, left = control('version'), rules.eta
  for _, pair in ipairs(lineage()) do
    local version, older = unpack(pair)
    if version <= now then
      if now - left > version then break end
      now, left = older, left - (now - version)
    end
  end
  return now - left
end

local function set_lineage(made)
  control('version')
  redis.call('HSET', key.control, 'lineage', made)
  repeats = cjson.decode(made)
end

local rung = false -- by this call; once is enough
local function ring() rung = true end

-- A full Redis refuses a script at its first command that needs memory, unless the script has already written. What
-- the learner and the heartbeats do must go on, or nothing would ever free memory again.
local function pass_when_full() redis.call('UNLINK', '{run}:nothing') end

local function unlink(name) if name then redis.call('UNLINK', name) end end

local tallies = { [key.ledger] = {}, [key.staleness] = {} } -- of this call, added to the hashes at its end
local function tally(hash, field, by) tallies[hash][field] = (tallies[hash][field] or 0) + by end
local function count(what, source, by) tally(key.ledger, what .. '|' .. source, by) end

-- Redis limits how many arguments a call may have.
local function in_slices(command, name, items)
  for first = 1, #items, 4000 do
    redis.call(command, name, unpack(items, first, math.min(first + 3999, #items)))
  end
end

-- Stories: what happened to an attempt, in a few dozen bytes. An event is a letter, what it needs, and +seconds since
-- the event before if that is not 0.
--
--     q<seconds since the run's birth> created    l<worker> leased    x expired, its worker is gone    f failed
--     r released    s started over    g<n> segment n came home    h<oldest version>-<newest> came home
--     c<step>.<version> claimed    b put back    m its payload was missing    t trained    d<letter> dropped, see REASONS

local REASONS = {
  stale = 's', filtered = 'f', env_failed = 'e', poisoned = 'p', rejected = 'r', cancelled = 'c', lost = 'l',
}

local function number_of(name)
  local number = redis.call('HGET', key.names, name)
  if number then return number end
  number = redis.call('HLEN', key.names)
  redis.call('HSET', key.names, name, number)
  return number
end

local function seconds(time) -- since the run's birth
  if control('born') == 0 then set_control('born', time) end
  return math.max(0, math.floor((time - control('born')) / 1000))
end

local function tell(attempt, event, time)
  local second, before = seconds(time or now()), tonumber(attempt.told or 0)
  local pause = attempt.told and second - before or 0
  attempt.told = math.max(second, before)
  attempt.story = (attempt.story or '') .. event .. (pause > 0 and '+' .. pause or '')
  return attempt.story
end

-- Tells an event of a live attempt and sets fields of it.
local function note(attempt, event, ...)
  tell(attempt, event)
  redis.call('HSET', attempt_key(attempt.id), 'story', attempt.story, 'told', attempt.told, ...)
end

-- How far trained attempts lay behind, in versions (flight: from its oldest token to its coming home, queue: from there
-- to its claim) and in seconds (from its first lease, as powers of two).
local function measure(attempt, manifest)
  if not (attempt.oldest and manifest.version) then return end
  local oldest, home = tonumber(attempt.oldest), tonumber(attempt.home)
  local total, flight = age(oldest, manifest.version), age(oldest, home)
  tally(key.staleness, 'flight|' .. flight, 1)
  tally(key.staleness, 'queue|' .. math.max(0, total - flight), 1)
  tally(key.staleness, 'total|' .. total, 1)
  for which, ms in pairs({
    flight = tonumber(attempt.home_at) - tonumber(attempt.began or attempt.home_at),
    queue = manifest.at - tonumber(attempt.home_at),
  }) do
    local _, exponent = math.frexp(math.max(ms, 1) / 1000)
    tally(key.staleness, which .. '_seconds|' .. exponent, 1)
  end
end

-- Attempts: loaded, moved between states, finished

local function steps_in(list)
  local steps = {}
  for step in string.gmatch(list or '', '%d+') do steps[#steps + 1] = tonumber(step) end
  return steps
end

-- source, label (of the task, in stories), token, worker, payload, partial, oldest, newest, reward, tokens, home, home_at,
-- began, sampled (the partial's oldest version), segments, failures, crashes, used, story, told
local function load(id)
  local flat = redis.call('HGETALL', attempt_key(id))
  if #flat == 0 then return nil end
  local attempt = { id = id, group = group_of(id) }
  for i = 1, #flat, 2 do attempt[flat[i]] = flat[i + 1] end
  attempt.failures, attempt.crashes = tonumber(attempt.failures or 0), tonumber(attempt.crashes or 0)
  attempt.segments = tonumber(attempt.segments or 0)
  attempt.used = steps_in(attempt.used)
  return attempt
end

-- Notes that a learner step used it, or that it did not. Where each is used only once, its state says so.
local function mark(attempt, step, used)
  if rules.max_uses == 1 then return end
  local steps = {}
  for _, other in ipairs(attempt.used) do
    if other ~= step then steps[#steps + 1] = other end
  end
  if used then steps[#steps + 1] = step end
  table.sort(steps)
  attempt.used = steps
  redis.call('HSET', attempt_key(attempt.id), 'used', table.concat(steps, ','))
end

local function rank_in(state, id) return redis.call(IN_ORDER[state] and 'ZSCORE' or 'HGET', key[state], id) end

local function where(id)
  for _, state in ipairs(STATES) do
    local rank = rank_in(state, id)
    if rank then return state, tonumber(rank) end
  end
end

local function population(state) return redis.call(IN_ORDER[state] and 'ZCARD' or 'HLEN', key[state]) end

-- The token is there exactly while the attempt is leased.
local function held(id, token)
  local attempt = load(id)
  if attempt and attempt.token == token then return attempt end
end

local function enter(attempt, state, rank)
  if IN_ORDER[state] then
    redis.call('ZADD', key[state], rank, attempt.id)
  else
    redis.call('HSET', key[state], attempt.id, rank)
  end
  count(state, attempt.source, 1)
end

local function leave(attempt, state)
  redis.call(IN_ORDER[state] and 'ZREM' or 'HDEL', key[state], attempt.id)
  count(state, attempt.source, -1)
end

local function move(attempt, from, to, rank)
  leave(attempt, from)
  enter(attempt, to, rank)
end

local function requeue(attempt, from, event, ...)
  redis.call('HDEL', attempt_key(attempt.id), 'token', 'worker', 'payload', 'oldest', 'newest')
  note(attempt, event, ...)
  move(attempt, from, 'queued', index_of(attempt.id))
  ring()
end

-- Keeps what a finished attempt leaves, under another name: what its worker sends again, late, is deleted. Answers that
-- name, or nil if there is nothing.
local function keep(blob)
  if not blob or redis.call('EXISTS', blob) == 0 then return nil end
  local kept = '{run}:kept:' .. string.sub(blob, #'{run}:' + 1)
  redis.call('RENAME', blob, kept)
  return kept
end

local ASIDE, ASIDE_MS = 100, 7 * 24 * 3600 * 1000
local function keep_aside(attempt)
  local kept = keep(attempt.payload) or keep(attempt.partial)
  if not kept then return end
  redis.call('PEXPIRE', kept, ASIDE_MS)
  redis.call('LPUSH', key.aside, attempt.id .. '|' .. kept)
  if redis.call('LLEN', key.aside) > ASIDE then unlink(string.match(redis.call('RPOP', key.aside), '|(.*)$')) end
end

local function record(attempt, event)
  redis.call('HSET', history_key(attempt.id), attempt.id, attempt.label .. ' ' .. tell(attempt, event))
end

-- To the history. What is left of its group, and whether that can still be trained on, is for settle().
local function finish(attempt, from, outcome, event)
  leave(attempt, from)
  record(attempt, event)
  count(outcome, attempt.source, 1)
  if outcome == 'dropped:poisoned' or outcome == 'dropped:rejected' then keep_aside(attempt) end
  local kept = rules.archive and keep(attempt.payload)
  if kept then redis.call('RPUSH', key.outbox, attempt.id .. '|' .. outcome .. '|' .. kept) end
  unlink(attempt.payload)
  unlink(attempt.partial)
  redis.call('UNLINK', attempt_key(attempt.id))
end

local transitions = {} -- by name; the files of the subjects add to it
