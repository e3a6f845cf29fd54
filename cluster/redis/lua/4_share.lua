-- Shares of a bucket.

local alive, present = {}, {}
for _, o in pairs(members) do
  present[o[OF]] = o
  if not expired(o) then alive[o[OF]] = o end
end

-- Removes what is void, and returns where what the caller has begins, if it has something.
local function purge(key, b, slots)
  local to, mine = FIRST, nil
  for i = FIRST, #b, SIZE do
    if alive[b[i]] or slots and present[b[i]] then
      if not alive[b[i]] and b[i + 2] > b[i + 1] then
        b[i + 2], dirty[key] = b[i + 1], true -- it cannot take more
      end
      if b[i] == m[OF] then mine = to end
      for k = 0, SIZE - 1 do b[to + k] = b[i + k] end
      to = to + SIZE
    end
  end
  for i = #b, to, -1 do b[i], dirty[key] = nil, true end
  return mine
end

local function others(b, mine)
  local parts = 0
  for i = FIRST, #b, SIZE do
    if i ~= mine then parts = parts + b[i + 1] end
  end
  return parts
end

local function slotsFloor() return math.ceil(WHOLE / s[HOSTS]) end

local function othersSlots(b)
  local has, parts = {}, 0
  for i = FIRST, #b, SIZE do has[b[i]] = b[i + 1] end
  for _, o in pairs(members) do
    if o ~= m then
      local most = has[o[OF]] or 0
      if o[SEEN] < b[1] then most = max(most, slotsFloor()) end
      parts = parts + most
    end
  end
  return parts
end

-- Returns the water level as a numerator and a denominator, or nothing if it is not limited. Who wants less than
-- the level gets that and raises the level for the others, until there is nobody who wants less.
local function level(b)
  local list, n, left, weights = {}, 0, WHOLE, 0
  for i = FIRST, #b, SIZE do
    if b[i + 2] > 0 then
      n = n + 1
      list[n] = i
      weights = weights + b[i + 3]
    end
  end
  local last
  repeat
    last = n
    local num, den = left, weights
    n = 0
    for k = 1, last do
      local i = list[k]
      if b[i + 2] * den < num * b[i + 3] then
        left, weights = left - b[i + 2], weights - b[i + 3]
      else
        n = n + 1
        list[n] = i
      end
    end
  until n == last
  if n > 0 then return left, weights end
end

local function target(b, i, num, den)
  if not num then return b[i + 2] end
  return min(b[i + 2], floor(num * b[i + 3] / den))
end

local function markShort(key, b, mine)
  local num, den = level(b)
  for i = FIRST, #b, SIZE do
    if i ~= mine and b[i + 1] < target(b, i, num, den) then mark(b[i], key) end
  end
end
