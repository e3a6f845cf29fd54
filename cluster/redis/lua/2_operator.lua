-- What operators ask. Only the state of this process counts, as for a call.

if operation == 'forget' then
  local name = text()
  if not usable() or incomplete() then return 0 end
  local m = members[name]
  if now < s[SETTLE_AT] or m and (not expired(m) or now < m[KNOWN]) then return 0 end
  if m then
    remove(name)
    addGone(name, m[START], m[N])
  elseif not gone(name) then
    if places() >= s[HOSTS] then return 0 end
    addGone(name, 0, 0)
  end
  save(name)
  return 1
end

if operation == 'snapshot' then
  if not s or s[FORMAT] ~= 1 or s[RUN] ~= run then return {} end
  local names, away, hosts, list, keys = {}, {}, {}, {}, {}
  for name, m in pairs(members) do
    names[m[OF]], away[m[OF]] = name, expired(m)
    hosts[#hosts + 1] = { name, now - m[AT], bit(live(m)), live(m) and m[GOOD] + s[LEASE] - now or 0, m[DIGEST], m[INFO] }
  end
  for i = 1, number() do keys[i] = text() end
  if #keys == 0 then keys = call('ZRANGE', KEYS[3], 0, MAX_SNAPSHOT - 1) end
  for _, key in ipairs(keys) do
    local b = bucket(key)
    if b then
      local holders = {}
      for i = FIRST, #b, SIZE do
        if names[b[i]] and (isSlots(key) or not away[b[i]]) then holders[#holders + 1] = { names[b[i]], b[i + 1], b[i + 2], b[i + 3] } end
      end
      list[#list + 1] = { key, holders }
    end
  end
  return { s[HOSTS], s[LEASE], s[STEP], bit(s[STRICT]), s[EPOCH], now - s[BEGAN], bit(now >= s[SETTLE_AT]), s[BUCKETS], hosts, s[GONE], list }
end
