-- Admission: -> queued

function transitions.next_index() return { control('next_index'), room() } end

-- `index` must be the next one, so that two workers cannot create the same task and none is skipped. -1: ask again.
function transitions.create(index, size, tasks)
  if tonumber(index) ~= control('next_index') then return -1 end
  tasks = cjson.decode(tasks)
  local members = {}
  for member = 0, size - 1 do members[#members + 1] = member end
  local wanted = math.min(#tasks, room())
  for i = 1, wanted do
    local group = string.format('%d', index + i - 1)
    local source, seed, task = unpack(tasks[i])
    redis.call('HSET', group_key(group), 'size', size, 'task', task, 'label', number_of(source) .. ':' .. seed,
      'source', source, 'alive', table.concat(members, ','))
    redis.call('SADD', key.active, group)
    for _, member in ipairs(members) do create(group .. '/' .. member, group) end
    if redis.call('HEXISTS', group_key(group), 'over') == 1 then settle(group) end -- the learner knows it already
  end
  if wanted > 0 then
    set_control('next_index', index + wanted)
    ring()
  end
  return wanted
end
