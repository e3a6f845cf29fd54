-- The ledger of package cluster as one atomic call: the rules of cluster.Ledger, statement for statement,
-- with the same names. The reasons are there. Numbers are integers below 2^53, so that arithmetic in
-- floating point is exact. Nothing is ordered by comparing texts, which depends on the server's locale.
--
-- KEYS, all in one slot of a cluster:
--   1 hash    '' -> state, name -> member
--   2 hash    key -> bucket
--   3 zset    keys of hot buckets by the version of their event
--   4 zset    keys of buckets that became cold, by the version of their event
--   5 zset    'generation key' by generation: marked buckets of members
-- ARGV: run_id, operation, now or '' for the server's time, and what the operation takes.

local WHOLE, MAX_WEIGHT = 1048576, 65536
local BACK_STEP, SLOW_REPLY, KNOWLEDGE_LAG = 20000, 50000, 100000
-- Times and numbers of epochs stay below what hosts take of them. The clock is not that far before the year 2103.
local MAX_NOW, MAX_NUMBER = 2 ^ 52 - 2 ^ 48, 2 ^ 52 - 2 ^ 47
local SPARE, EVENT_PAGE, MAX_BUCKETS, MAX_SNAPSHOT, MAX_TICKETS, MOST_TURNS = WHOLE / 32, 256, 100000, 1000, 64, 16

-- A bucket has its version, wanted, last, every and turn, and SIZE fields of each holder: generation, parts, want, weight,
-- turn, at, every.
local FIRST, SIZE = 6, 7
-- Fields of the state. Of later formats, the first two stay what they are.
local FORMAT, LAST, HOSTS, LEASE, STEP, STRICT, RUN, EPOCH, BEGAN, SETTLE_AT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
local VERSION, GENERATION, MEMBERS, BUCKETS, COLD, MARKS, GONE = 11, 12, 13, 14, 15, 16, 17
-- Fields of a member.
local START, N, AT, BORN, GOT_AT, GOT_N, GOOD, KNOWN, OF, SEEN = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
local LAG, GOT_LAG = 11, 12
local COUNTED, JOINED, HEARD, RETURNING, CLAIMED, CLAIMING, OVER = 13, 14, 15, 16, 17, 18, 19
local RENEWED, RESYNC, TOLD, DIGEST, INFO = 20, 21, 22, 23, 24

local at = 0
local function text() at = at + 1 return ARGV[at] end
local function number() return tonumber(text()) end
local function flag() return text() == '1' end
local function bit(yes) return yes and 1 or 0 end

local call, floor, min, max = redis.call, math.floor, math.min, math.max
local run, operation, now = text(), text(), number()
if not now then
  local t = call('TIME')
  now = t[1] * 1000000 + t[2]
end
if now >= MAX_NOW then return redis.error_reply('SHAPERD the clock of the server is set beyond the year 2103') end

-- A process that was a replica for some time may have an old state: its name changes when it becomes a master.
local replication = call('INFO', 'replication')
if not replication:find('role:master', 1, true) then return redis.error_reply('READONLY the server is a replica') end
run = run .. ' ' .. (replication:match('master_replid:(%x+)') or '')

-- What the server has. What something else has written there is no state.

-- Returns a list that was packed, or nil if it is none.
local function unpacked(packed)
  local ok, list = pcall(cmsgpack.unpack, packed)
  if ok and type(list) == 'table' then return list end
end

local function isNumber(x) return type(x) == 'number' and x > -MAX_NUMBER and x < MAX_NUMBER end

local function isState(t)
  if not isNumber(t[FORMAT]) or not isNumber(t[LAST]) then return false end
  if t[FORMAT] ~= 1 then return true end
  for i = HOSTS, MARKS do
    if i ~= STRICT and i ~= RUN and not isNumber(t[i]) then return false end
  end
  return type(t[STRICT]) == 'boolean' and type(t[RUN]) == 'string' and type(t[GONE]) == 'table' and #t[GONE] % 3 == 0
end

local s, members, junk = nil, {}, false
local all = call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local t = unpacked(all[i + 1])
  if all[i] == '' then
    s = t and isState(t) and t
  elseif t and #t == INFO then
    members[all[i]] = t
  else
    junk = true
  end
end

local buckets, dirty = {}, {}

-- Returns the bucket with a key, or false. Of one that is junk nothing is known, as if it were cold: until the next call,
-- which begins an epoch, nothing of it is given, as nobody knows that it is hot.
local function bucket(key)
  local b = buckets[key]
  if b == nil then
    local packed = call('HGET', KEYS[2], key)
    b = packed and unpacked(packed)
    if packed and not (b and #b >= FIRST - 1 and (#b - FIRST + 1) % SIZE == 0) then b, s[RUN] = false, '' end
    buckets[key] = b
  end
  return b
end

local function save(name)
  local m = members[name]
  if m then
    call('HSET', KEYS[1], '', cmsgpack.pack(s), name, cmsgpack.pack(m))
  else
    call('HSET', KEYS[1], '', cmsgpack.pack(s))
  end
  for key in pairs(dirty) do call('HSET', KEYS[2], key, cmsgpack.pack(buckets[key])) end
end

local function unmark(generation)
  if s[MARKS] > 0 then s[MARKS] = s[MARKS] - call('ZREMRANGEBYSCORE', KEYS[5], generation, generation) end
end

local function mark(generation, key)
  s[MARKS] = s[MARKS] + call('ZADD', KEYS[5], generation, string.format('%.0f ', generation) .. key)
end

local function remove(name)
  local m = members[name]
  if m then
    unmark(m[OF])
    members[name] = nil
    s[MEMBERS] = s[MEMBERS] - call('HDEL', KEYS[1], name)
  end
end

-- Whether something was removed, added or replaced that the script did not.
local function incomplete()
  return junk or #all / 2 - 1 ~= s[MEMBERS] or call('HLEN', KEYS[2]) ~= s[BUCKETS] or call('ZCARD', KEYS[3]) ~= s[BUCKETS]
    or call('ZCARD', KEYS[4]) ~= s[COLD] or call('ZCARD', KEYS[5]) ~= s[MARKS]
end

-- Hosts that are gone: a list of names, starts and numbers of calls.

local function gone(name)
  for i = 1, #s[GONE], 3 do
    if s[GONE][i] == name then return i end
  end
end

local function addGone(name, start, n)
  local i = gone(name) or #s[GONE] + 1
  s[GONE][i], s[GONE][i + 1], s[GONE][i + 2] = name, start, n
end

local function removeGone(i)
  for _ = 1, 3 do table.remove(s[GONE], i) end
end

local function before(a, b)
  for i = 1, min(#a, #b) do
    local x, y = a:byte(i), b:byte(i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local function replaced(i) return s[GONE][i + 1] < 0 end

-- Returns the first of those that are gone, or of those that are replaced, and how many there are.
local function firstGone(is)
  local first, n = nil, 0
  for i = 1, #s[GONE], 3 do
    if replaced(i) == is then
      n = n + 1
      if not first or before(s[GONE][i], s[GONE][first]) then first = i end
    end
  end
  return first, n
end

local function countGone()
  local _, n = firstGone(false)
  return n
end

-- Members.

local function expiry(p) return 2 * p[LEASE] + p[STEP] end
local function expired(m) return now >= m[AT] + expiry(s) end
local function live(m) return m[COUNTED] and m[GOOD] ~= 0 and now < m[GOOD] + s[LEASE] end

local function places()
  for name, m in pairs(members) do
    if not m[JOINED] and expired(m) then remove(name) end
  end
  return s[MEMBERS] + countGone()
end

local function knownByAll(but)
  local version = s[VERSION]
  for name, m in pairs(members) do
    if name ~= but and now < m[KNOWN] then version = min(version, m[SEEN]) end
  end
  return version
end

local function heardByAll()
  local version = s[VERSION]
  for _, m in pairs(members) do
    if not expired(m) then version = min(version, m[SEEN]) end
  end
  return version
end

local function countLive(time)
  local n = s[STRICT] and 0 or countGone()
  for _, m in pairs(members) do
    if m[COUNTED] and m[GOOD] ~= 0 and time < m[GOOD] + s[LEASE] then n = n + 1 end
  end
  return min(n, s[HOSTS])
end

local function hasMembers()
  for _, m in pairs(members) do
    if not expired(m) then return true end
  end
  return false
end

local function allTold()
  local n = s[STRICT] and 0 or countGone()
  for _, m in pairs(members) do
    if m[TOLD] and not m[RETURNING] and (not s[STRICT] or live(m) and now >= m[BORN] + expiry(s)) then n = n + 1 end
  end
  return n >= s[HOSTS]
end

local function isSlots(key) return key:byte(1) == 35 end -- '#'
local function isTickets(key) return key:byte(1) == 64 end -- '@'

local function reply(t)
  return { t.n, t.start, t.latest or 0, s[EPOCH], t.refused or 0, s[HOSTS], s[LEASE], s[STEP], bit(s[STRICT]),
    t.live or 0, bit(t.counted), bit(t.settled), bit(t.allTold), bit(t.resync), bit(t.renew), t.version or 0, t.differ or 0, bit(t.askInfo),
    t.events or {}, t.grants or {}, t.sales or {}, t.gone or {} }
end

local function runSalt()
  local salt = 0
  for i = 1, #run do salt = (salt * 31 + run:byte(i)) % 1048576 end
  return salt
end

local function begin(p, last)
  s = { 1, now, p[HOSTS], p[LEASE], p[STEP], p[STRICT], run, max(now, last + 1 + runSalt()), now, now + p[LEASE] + 2 * p[STEP], 0, 0, 0, 0, 0, 0, {} }
  members = {}
  call('UNLINK', unpack(KEYS))
end

local function usable()
  return s and s[FORMAT] == 1 and s[RUN] == run and now >= s[LAST] - BACK_STEP and now <= s[LAST] + s[STEP]
end
