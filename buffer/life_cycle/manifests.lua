-- Manifests: what a learner step claimed

local function manifest_of(step)
  local made = redis.call('HGET', key.manifests, step)
  return made and cjson.decode(made)
end

local function keep_manifest(manifest)
  local made = cjson.encode(manifest)
  redis.call('HSET', key.manifests, manifest.step, made)
  return made
end

-- The steps that have a manifest, in order, from `first` on.
local function steps_from(first)
  local steps = {}
  for _, step in ipairs(redis.call('HKEYS', key.manifests)) do
    if tonumber(step) >= first then steps[#steps + 1] = tonumber(step) end
  end
  table.sort(steps)
  return steps
end

-- A learner that was started after this one has put back what this one trains on.
local function replaced() return learner ~= '' and tonumber(learner) < control('learner') end
