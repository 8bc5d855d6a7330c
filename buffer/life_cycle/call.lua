-- The call: the transition that was asked for, then what it changed in the tallies.

local answer = transitions[ARGV[1]](unpack(ARGV, 4))
for hash, fields in pairs(tallies) do
  for field, by in pairs(fields) do
    if by ~= 0 then redis.call('HINCRBY', hash, field, by) end
  end
end
if rung then redis.call('XADD', key.bell, 'MAXLEN', 1, '*', 'look', 'again') end
return answer
