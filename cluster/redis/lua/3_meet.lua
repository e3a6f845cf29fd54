-- A call: who it is from, and whether it is processed.

local p = { 1, 0, number(), number(), number(), flag() }
local host, start, n, got, gotAge, epoch = text(), number(), number(), number(), number(), number()
local leased, claim, more, over, left, leave = flag(), flag(), flag(), flag(), flag(), flag()
local known, toldSlots, digest, info = number(), flag(), text(), text()

local lag = 0

local function stoodStill()
  local m = members[host]
  if not m or m[START] ~= start or n <= m[N] or epoch ~= s[EPOCH] or got == 0 then return false end
  local time, before = m[AT], m[LAG]
  if got ~= m[N] then
    if got ~= m[GOT_N] then return false end
    time, before = m[GOT_AT], m[GOT_LAG]
  end
  lag = max(0, max(0, before - floor(gotAge / 12)) + floor(gotAge * 98 / 100) - (now - time))
  return lag > min(floor(s[LEASE] / 4), 1000000) + SLOW_REPLY
end

if s and s[FORMAT] ~= 1 then
  if now < s[LAST] + expiry(p) then return redis.error_reply('SHAPERD the state is that of another version of shaperd') end
  s = nil
end
if not s then
  begin(p, 0)
elseif not usable() or incomplete() or stoodStill() then
  begin(s, s[EPOCH])
  lag = 0
end
local other = p[HOSTS] ~= s[HOSTS] or p[LEASE] ~= s[LEASE] or p[STEP] ~= s[STEP] or p[STRICT] ~= s[STRICT]
if other and now >= s[BEGAN] + expiry(s) and not hasMembers() then
  begin(p, s[EPOCH])
  other, lag = false, 0
end
s[RUN], s[LAST] = run, max(s[LAST], now)

local m, wasGone = members[host], gone(host)
local wasReplaced = wasGone and replaced(wasGone)
local same = epoch == s[EPOCH]
local lastStart, lastN = 0, 0
if m then
  lastStart, lastN = m[START], m[N]
elseif wasGone then
  lastStart, lastN = s[GONE][wasGone + 1], s[GONE][wasGone + 2]
  if wasReplaced then lastStart = -1 - lastStart end
end
local refused, latest
if other then
  refused = 3
elseif start < lastStart or start == lastStart and n <= lastN then
  refused, latest = 1, lastStart
elseif m and not same and not expired(m) and (m[JOINED] and start == m[START] or epoch ~= 0 and start ~= m[START]) then
  refused = 2
elseif leave and not same then
  refused = 2
elseif m or wasGone and not wasReplaced or left and leave then
  refused = nil
elseif left and now < s[SETTLE_AT] then
  refused = 5
elseif places() >= s[HOSTS] and (leave or countGone() == 0) then
  refused = 4
end
if refused then
  save()
  return reply { n = n, start = start, refused = refused, latest = latest }
end
if leave then
  remove(host)
  if m or not left and not wasReplaced then addGone(host, start, n) end
  save(host)
  return reply { n = n, start = start, live = countLive(s[LAST]) }
end

-- meet

local function takeBack()
  if m then return m[RETURNING] end
  if wasGone then
    removeGone(wasGone)
    if not wasReplaced then return true end
  end
  if countGone() == 0 or not left and places() < s[HOSTS] then return false end
  local first, n = firstGone(true)
  if n >= s[HOSTS] then removeGone(first) end
  first = firstGone(false)
  s[GONE][first + 1] = -1 - s[GONE][first + 1]
  return true
end

local function heardSince()
  for name, o in pairs(members) do
    if name ~= host and o[AT] < m[BORN] and live(o) then return false end
  end
  return true
end

local function countedBy()
  for name, o in pairs(members) do
    if name ~= host and now < o[KNOWN] and o[GOT_AT] < m[BORN] then return true end
  end
  return false
end

if not m or m[START] ~= start or not same then
  s[GENERATION] = s[GENERATION] + 1
  local fresh = { start, 0, 0, now, 0, 0, 0, 0, s[GENERATION], 0, 0, 0, false, false, false, takeBack(), false, false, false, false, same, false, '', '' }
  if m then
    fresh[DIGEST], fresh[INFO] = m[DIGEST], m[INFO]
    unmark(m[OF])
  else
    s[MEMBERS] = s[MEMBERS] + 1
  end
  m = fresh
  members[host] = m
elseif expired(m) then
  unmark(m[OF])
  s[GENERATION] = s[GENERATION] + 1
  m[OF], m[RESYNC] = s[GENERATION], true
elseif m[RESYNC] and got == m[N] then
  m[RESYNC] = false
end
local wasLive = live(m)
if same and got > 0 and got == m[N] then
  m[GOT_N], m[GOT_AT], m[GOT_LAG] = m[N], m[AT], m[LAG]
  if m[RENEWED] then m[GOOD] = m[AT] end
end
m[JOINED] = m[JOINED] or same
if same and not m[HEARD] then m[HEARD] = heardSince() end
if same and m[RETURNING] then m[RETURNING] = countedBy() end

local quarantined = now < s[SETTLE_AT]
local late = s[STRICT] and now < m[BORN] + expiry(s)
local settled = not quarantined
if same and (not m[HEARD] and not m[CLAIMED] or m[RETURNING] or late) then settled = false end
local claims = same and claim and quarantined and (not m[CLAIMED] or m[CLAIMING]) and not s[STRICT]
m[N], m[AT], m[LAG] = n, now, lag
local goneBefore = number()
for _ = 1, goneBefore do
  local name, lastStart, lastN = text(), number(), number()
  if claims and not members[name] then
    if lastStart < 0 then
      if not gone(name) and #s[GONE] / 3 < 2 * s[HOSTS] then addGone(name, lastStart, lastN) end
    elseif places() < s[HOSTS] then
      addGone(name, lastStart, lastN)
    end
  end
end
if claims then m[CLAIMED], m[CLAIMING] = true, more end
m[RENEWED] = same and not m[RESYNC] and (not claim or m[CLAIMED] and not m[CLAIMING])
local knownByOthers, knewBefore = knownByAll(host), m[SEEN]
if same then m[SEEN] = known end
m[DIGEST] = digest
if info ~= '' then m[INFO] = info end
