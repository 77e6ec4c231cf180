"""What Redis does by itself, with nothing between: programs in Lua.

Each is of one partition. Lua passes some 8,000 values to a command at most, so they pass 2,000.
"""

SCAN_FIELDS = b"""
local page = redis.call('HSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local fields = {}
for i = 1, #page[2], 2 do fields[#fields + 1] = page[2][i] end
return {page[1], fields}
"""
"""A page of the fields of a hash, without their values.

Keys: the hash. Arguments: the cursor and the size of the page. Gives the next cursor and fields.
"""

DELETE = b"""
for first = 1, #ARGV, 2000 do
  local last = math.min(first + 1999, #ARGV)
  redis.call('HDEL', KEYS[1], unpack(ARGV, first, last))
  redis.call('HDEL', KEYS[2], unpack(ARGV, first, last))
end
"""
"""Delete rows. Keys: values and accesses. Arguments: fields. A transaction would do the same, but
for servers that are full, which take none."""

COUNT_FROM_ZERO = b"""
for i = 1, #ARGV do redis.call('HSETNX', KEYS[1], ARGV[i], '0') end
"""
"""Give fields of a hash the value 0 where they have none. Keys: the hash. Arguments: fields."""

ADD_COUNTS = b"""
for i = 1, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    redis.call('HINCRBY', KEYS[1], ARGV[i], tonumber(ARGV[i + 1]))
  end
end
"""
"""Raise counts of fields that are there still. Keys: the hash. Arguments: fields and numbers."""

ADVANCE_TIMES = b"""
for i = 1, #ARGV, 2 do
  local time = redis.call('HGET', KEYS[1], ARGV[i])
  if time and tonumber(time) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
"""
"""Set times of fields that are there still, unless they have later ones. Keys: the hash.
Arguments: fields and times."""

_RESOLVE = b"""
local generation, num_left = ARGV[1], tonumber(ARGV[2])
if (redis.call('GET', KEYS[3]) or '0') ~= generation then return {0, 0} end
local num_evicted = 0
local function excess() return redis.call('HLEN', KEYS[1]) - num_left end
local function evict(fields)
  for first = 1, #fields, 2000 do
    local last = math.min(first + 1999, #fields)
    num_evicted = num_evicted + redis.call('HDEL', KEYS[1], unpack(fields, first, last))
    redis.call('HDEL', KEYS[2], unpack(fields, first, last))
  end
end
%b
local rest = excess()
if rest <= 0 then
  redis.call('INCR', KEYS[3])
  return {0, num_evicted}
end
return {rest, num_evicted}
"""
# The generation of a partition is how many of its overflows were resolved. Who saw an overflow
# evicts only as long as it is the same, so that no overflow is resolved twice.

EVICT_RANDOM = (
    _RESOLVE
    % b"""
local num_rows = math.min(excess(), tonumber(ARGV[3]))
if num_rows > 0 then evict(redis.call('HRANDFIELD', KEYS[1], num_rows)) end
"""
)
"""Evict some rows. Keys: values, accesses and generation. Arguments: the generation of the
overflow, the rows that it leaves, and most to evict now. Gives how many there are too many
still, 0 once it is resolved, by whomever; and how many were evicted."""

EVICT_CHOSEN = (
    _RESOLVE
    % b"""
local num_rows, fields = excess(), {}
for i = 3, #ARGV, 2 do
  if #fields >= num_rows then break end
  local access = redis.call('HGET', KEYS[2], ARGV[i])
  access = access and tonumber(access) or -1
  if access == tonumber(ARGV[i + 1]) - 1 and redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    fields[#fields + 1] = ARGV[i]
  end
end
evict(fields)
"""
)
"""Evict rows that nobody has used since they were chosen. Keys: values, accesses and generation.
Arguments: the generation of the overflow, the rows that it leaves, and fields in the order in which
they go, each with one more than its access, 0 for none. Gives what ``EVICT_RANDOM`` does."""
