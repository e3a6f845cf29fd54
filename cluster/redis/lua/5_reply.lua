-- A call that is processed: what the host says, and the reply.

-- read

local function demote(key, b, share)
  if now < s[SETTLE_AT] or now < b[2] + 30 * s[LEASE] or isSlots(key) and not allTold() then return end
  for i = FIRST, #b, SIZE do
    if b[i + 1] > share or b[i + 2] > share then return end
  end
  call('HDEL', KEYS[2], key)
  buckets[key], dirty[key] = false, nil
  s[VERSION], s[BUCKETS], s[COLD] = s[VERSION] + 1, s[BUCKETS] - 1, s[COLD] + 1
  call('ZREM', KEYS[3], key)
  call('ZADD', KEYS[4], s[VERSION], key)
  s[COLD] = s[COLD] - call('ZREMRANGEBYSCORE', KEYS[4], '-inf', '(' .. heardByAll())
  if s[COLD] > MAX_BUCKETS then s[COLD] = s[COLD] - call('ZREM', KEYS[4], call('ZRANGE', KEYS[4], 0, 0)[1]) end
end

local cut, untold, marked, list, asked = false, false, {}, {}, {}
local share = floor(WHOLE / s[HOSTS])

local function told(key)
  if not marked[key] then
    marked[key] = true
    list[#list + 1] = key
  end
end

local function item(key, has, want, weight, every, burst)
  local b, slots, tickets = bucket(key), isSlots(key), isTickets(key)
  if not b then
    if want == 0 and (has == 0 or not claims and not slots) then return end
    if s[BUCKETS] >= MAX_BUCKETS then
      untold = untold or slots and has > 0
      return
    end
    s[VERSION], s[BUCKETS] = s[VERSION] + 1, s[BUCKETS] + 1
    s[COLD] = s[COLD] - call('ZREM', KEYS[4], key)
    call('ZADD', KEYS[3], s[VERSION], key)
    b = { s[VERSION], now, 0, 0, 0 }
    buckets[key] = b
  end
  local mine = purge(key, b, slots)
  if not mine then
    mine = #b + 1
    b[mine] = m[OF]
    for k = 1, SIZE - 1 do b[mine + k] = 0 end
  end
  local parts, nothing = b[mine + 1], has == 0 and want == 0
  if tickets then
    has = 0
  elseif claims and not slots then
    has = max(0, min(has, WHOLE - others(b, mine)))
  elseif not same or m[RESYNC] and not slots then
    has = 0
  elseif has > parts and not slots then
    local may = parts
    if (wasLive or now < m[KNOWN]) and knewBefore < b[1] and b[1] <= known then may = share end
    if has > may then has, cut = may, true end
  end
  want, weight = max(0, min(want, WHOLE)), max(1, min(weight, MAX_WEIGHT))
  local free = has < parts or want < b[mine + 2] or weight < b[mine + 3]
  b[mine + 1], b[mine + 2], b[mine + 3] = has, want, weight
  if want > 0 and tickets or has > share or want > share then b[2] = now end
  dirty[key] = true
  if not tickets then
    if free then markShort(key, b, mine) end
    if nothing then -- like a host that has said nothing
      for i = mine, #b do b[i] = b[i + SIZE] end
    else
      told(key)
    end
  else
    b[mine + 5], b[mine + 4] = now, max(b[mine + 4], b[5])
    asked[#asked + 1] = { key, every, burst }
  end
  demote(key, b, share)
end

for _ = 1, number() do item(text(), number(), number(), number(), number(), number()) end

-- count

if not same or not leased or m[RESYNC] then
  m[COUNTED] = false
elseif not wasLive then
  if cut or late or m[RETURNING] then
    m[COUNTED] = false
  elseif m[CLAIMED] and not m[CLAIMING] and quarantined then
    m[COUNTED] = true
  else
    m[COUNTED] = settled and known >= knownByOthers
  end
end
if same then
  m[OVER] = over
  m[TOLD] = not m[RESYNC] and (m[TOLD] or toldSlots and not untold)
end
if quarantined then
  local spoken = countGone()
  for _, o in pairs(members) do
    if o[CLAIMED] and not o[CLAIMING] and live(o) or o[OVER] then spoken = spoken + 1 end
  end
  if spoken >= s[HOSTS] then s[SETTLE_AT] = now end
end
if live(m) then m[KNOWN] = m[GOOD] + 2 * s[LEASE] + KNOWLEDGE_LAG end

-- reply

local function events()
  local page = {}
  if m[SEEN] >= s[VERSION] then return page end
  local hot = call('ZRANGEBYSCORE', KEYS[3], '(' .. m[SEEN], '+inf', 'WITHSCORES', 'LIMIT', 0, EVENT_PAGE)
  local cold = call('ZRANGEBYSCORE', KEYS[4], '(' .. m[SEEN], '+inf', 'WITHSCORES', 'LIMIT', 0, EVENT_PAGE)
  local h, c = 1, 1
  while #page < 3 * EVENT_PAGE and (h < #hot or c < #cold) do
    local n = #page
    if h < #hot and (c > #cold or tonumber(hot[h + 1]) < tonumber(cold[c + 1])) then
      page[n + 1], page[n + 2], page[n + 3] = hot[h], tonumber(hot[h + 1]), 0
      h = h + 2
    else
      page[n + 1], page[n + 2], page[n + 3] = cold[c], tonumber(cold[c + 1]), 1
      c = c + 2
    end
  end
  return page
end

-- Returns the parts that the caller is given, and whether that is short and tight.
local function grant(key, b, mine, lend)
  local num, den = level(b)
  local tight, parts, due = num ~= nil, b[mine + 1], target(b, mine, num, den)
  if due <= parts then return due, false, tight end
  local given, short = parts, true
  if lend then
    local free
    if isSlots(key) then
      free = WHOLE - othersSlots(b)
    else
      free = WHOLE - others(b, mine)
    end
    if not isSlots(key) and parts > floor(share / 4) then free = free - floor(SPARE * max(0, s[HOSTS] - (#b - FIRST + 1) / SIZE) / s[HOSTS]) end
    given = min(due, max(parts, free))
    short = given < due - WHOLE / 256
  end
  if given ~= parts then
    b[mine + 1], dirty[key] = given, true
  end
  if short then
    for i = FIRST, #b, SIZE do
      if i ~= mine and b[i + 1] > target(b, i, num, den) then mark(b[i], key) end
    end
  end
  return given, short, tight
end

if s[MARKS] > 0 then
  local found = call('ZRANGEBYSCORE', KEYS[5], m[OF], m[OF])
  if #found > 0 then
    for _, entry in ipairs(found) do told(entry:sub(entry:find(' ', 1, true) + 1)) end
    unmark(m[OF])
  end
end
local knownNow, allHaveTold, grants = knownByAll(''), allTold(), {}
for _, key in ipairs(list) do
  local b, slots = bucket(key), isSlots(key)
  local mine = b and purge(key, b, slots)
  if mine then
    local lend = settled and b[1] <= knownNow
    if slots then lend = allHaveTold and b[1] <= m[SEEN] end
    local parts, short, tight = grant(key, b, mine, lend)
    local n = #grants
    grants[n + 1], grants[n + 2], grants[n + 3] = key, parts, bit(short) + 2 * bit(tight)
  end
end
local function sell(b, mine, each, burst)
  local most, due, count = min(b[mine + 2], MAX_TICKETS), now + floor(s[LEASE] / 4), countLive(now)
  local every = math.ceil(each * s[HOSTS] / count)
  b[mine + 6] = every
  if b[3] == 0 then b[3], b[4] = now, every end
  for i = FIRST, #b, SIZE do
    if i ~= mine and b[i + 2] > 0 and now < b[i + 5] + floor(s[LEASE] / 2) and b[3] + b[i + 6] <= due then
      if b[i + 4] < b[mine + 4] then return 0 end
      most = min(most, 1)
    end
  end
  local at = max(b[3] + every, now - burst)
  if every ~= b[4] then at = max(at, now) end
  local offset, n = at - now, 0
  while n < most and at <= due do
    b[3], n, at = at, n + 1, at + every
  end
  if n > 0 then
    b[4], b[5], b[mine + 2] = every, max(b[5], b[mine + 4]), b[mine + 2] - n
    b[mine + 4] = b[mine + 4] + n * floor(WHOLE / min(b[mine + 3], MOST_TURNS))
  end
  return n, offset, every
end

local sales = {}
for _, a in ipairs(asked) do
  local key, b = a[1], bucket(a[1])
  if b and settled and b[1] <= knownNow and live(m) then
    local n, offset, every = sell(b, purge(key, b), a[2], a[3])
    if n > 0 then
      local k = #sales
      sales[k + 1], sales[k + 2], sales[k + 3], sales[k + 4] = key, n, offset, every
    end
  end
end
local differ = 0
for _, o in pairs(members) do
  if o[DIGEST] ~= digest then differ = differ + 1 end
end
local answer = reply { n = n, start = start, live = countLive(now), counted = live(m), settled = settled, allTold = allHaveTold, resync = m[RESYNC],
  renew = m[RENEWED], version = s[VERSION], differ = differ, askInfo = m[INFO] == '', events = events(), grants = grants, sales = sales, gone = s[GONE] }
save(host)
return answer
