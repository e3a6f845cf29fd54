package world

import "shaperd.dev/shaperd/cluster"

// machine is where a host runs.
type machine struct {
	*world
	name   string
	params cluster.Params
	alone  cluster.Alone
	clock  clock
	time   cluster.Time // that it shows now
	server *server      // that it calls

	host     *cluster.Host
	plane    plane
	up       bool
	process  int          // number of times that it has started
	begun    int64        // by the wall clock: the last start
	away     cluster.Time // the longest Away of processes since it has joined
	left     bool         // in its state directory: it uses nothing until it has joined
	leaving  bool
	told     bool  // its last call says so
	off      bool  // it stays off
	replaced bool  // for ever
	joined   bool  // as far as it was seen
	counted  bool  // as the last reply says that it took
	epoch    int64 // of that reply
	leasedIn int64 // epoch of the last one that renewed its lease
	gone     bool  // a ledger knows that it has left, or was forgotten, and it has not joined since
	wants    []int64
	aloneAt  cluster.Time // when what it may use rises

	cutTo, cutFrom cluster.Time // until then it is cut off
	pausedUntil    cluster.Time
	pending        []func() // what arrived meanwhile

	before     []int64 // of apply
	busyBefore []bool
}

// start starts a process.
func (m *machine) start() {
	if m.up || m.off {
		return
	}
	now := m.time
	m.away = max(m.away, m.params.Away())
	m.process++
	m.begun++
	if m.begun > 1 && m.chance(0.1) {
		m.begun -= m.random.Int64N(3) // it was set back
	}
	m.left = m.left || m.chance(0.05) // it has another disk
	m.up, m.leaving, m.told, m.joined, m.gone, m.counted, m.epoch, m.leasedIn = true, false, false, false, false, false, 0, 0
	m.host = cluster.NewHost(cluster.HostOptions{
		Params: m.params, Name: m.name, Start: m.begun<<20 + m.random.Int64N(cluster.MaxSalt), Salt: m.random.Int64N(cluster.MaxSalt),
		Alone: m.alone, Left: m.left, Away: m.away,
		Digest: m.random.Uint64N(2), Info: m.name,
		InUse: func(key string) bool { return m.inUse(m.index[key]) },
	}, now)
	clear(m.wants)
	m.before, m.busyBefore = m.before[:0], make([]bool, len(m.keys))
	m.logf("%s starts, start %d, left %v", m.name, m.begun, m.left)
	m.apply()
	process := m.process
	m.after(m.upTo(m.interval), func() { m.tick(process) })
}

// inUse reports whether something of bucket i may be on its way.
func (m *machine) inUse(i int) bool {
	return m.wants[i] > 0 || m.plane.slots[i] > 0 || m.plane.unsettled(i, m.time)
}

func (m *machine) anyUnsettled() bool {
	now := m.time
	for i := range m.keys {
		if m.plane.slots[i] > 0 || m.plane.unsettled(i, now) {
			return true
		}
	}
	return false
}

// stop ends the process. Nothing leaves any more.
func (m *machine) stop() {
	m.up = false
	m.host = nil
	m.plane = plane{drain: m.plane.drain, keys: m.plane.keys, parts: m.plane.parts, hot: m.plane.hot, rests: m.plane.rests, slots: m.plane.slots, tickets: m.plane.tickets}
	clear(m.plane.slots)
	clear(m.plane.tickets)
	clear(m.plane.rests)
	clear(m.plane.hot)
}

// tick is what a host does every interval or so.
func (m *machine) tick(process int) {
	if m.process != process || !m.up {
		return
	}
	m.after(m.interval/2+m.upTo(m.interval), func() { m.tick(process) })
	m.churn()
	if m.now < m.pausedUntil {
		return
	}
	switch {
	case m.leaving:
	case m.calm:
		m.demandCalmly()
	default:
		m.changeDemand()
	}
	m.send()
}

// changeDemand changes what the machine wants of some buckets.
func (m *machine) changeDemand() {
	for i, key := range m.keys {
		if !m.chance(m.changes) {
			continue
		}
		if m.rates[i] != nil {
			m.wants[i] = 0
			if m.busy[i] {
				m.wants[i] = m.random.Int64N(6)
			}
			continue
		}
		want := int64(0)
		if kind := m.random.IntN(4); m.busy[i] && kind > 0 {
			want = []int64{cluster.Whole / 4, cluster.Whole, cluster.Whole}[kind-1]
			if kind < 3 {
				want = m.random.Int64N(want)
			}
		} else if kind == 1 {
			want = m.random.Int64N(cluster.Whole / int64(m.params.Hosts))
		}
		if want == m.wants[i] && want == 0 {
			continue
		}
		m.wants[i] = want
		m.host.Want(key, want, 1+m.random.Int64N(4))
		if m.chance(0.5) {
			m.host.Lower(key, want)
		}
	}
	m.wantTickets(0.3)
	m.apply()
}

// send sends the next call if no reply is awaited.
func (m *machine) send() {
	now := m.time
	if m.host.Awaits(now) {
		return
	}
	var q *cluster.Request
	m.told = m.leaving
	m.churn()
	if m.leaving {
		q = m.host.Leave(now)
	} else {
		q = m.host.Request(now, func(key string) int64 { return m.plane.inUse(m.index[key], now) })
	}
	m.apply()
	if m.leaving {
		if m.anyUnsettled() {
			return // only when nothing leaves any more
		}
		m.left = true // before the ledger hears of it; a call that was answered meanwhile has made it join
	}
	if m.Log != nil {
		m.logf("%s calls %+v", m.name, *q)
	}
	copies := 1
	if !m.calm && m.chance(m.copies) {
		copies = 2
	}
	server := m.server
	for range copies {
		if m.cutTo <= m.now && !m.lost() {
			m.after(m.latency(), func() { server.arrive(m, q) })
		}
	}
}

// deliver gives the host a reply, which may be one to a process before.
func (m *machine) deliver(r *cluster.Reply) {
	if !m.up {
		return
	}
	if m.now < m.pausedUntil {
		m.pending = append(m.pending, func() { m.deliver(r) })
		return
	}
	now := m.time
	answered := m.host.Awaits(now)
	again := m.host.Reply(now, r)
	answered = answered && !m.host.Awaits(now)
	if answered && r.Refused == cluster.NotRefused {
		m.counted, m.epoch = r.Counted, r.Epoch
		if r.Renew {
			m.leasedIn = r.Epoch
		}
	}
	m.apply()
	if m.host.Joined() && !m.joined {
		m.left, m.gone, m.away = false, false, m.params.Away()
		m.Joins++
	}
	m.joined = m.host.Joined()
	if m.Log != nil {
		m.logf("%s takes %d: again %v, %+v", m.name, r.N, again, m.host.Status(now))
	}
	switch {
	case m.told && answered && r.Refused == cluster.NotRefused && !again:
		m.logf("%s has left", m.name)
		m.gone = true
		m.Leaves++
		m.stop()
		m.after(m.howLong()/2, m.start)
	case again && m.chance(0.8):
		m.send()
	}
}

// leave makes the machine leave the group.
func (m *machine) leave() {
	if !m.up || m.leaving || m.now < m.pausedUntil {
		return
	}
	m.logf("%s leaves", m.name)
	m.leaving = true
	process := m.process
	m.after(m.upTo(10*cluster.Second), func() { // it does not wait for ever
		if m.up && m.process == process {
			m.stop()
			m.after(m.upTo(10*cluster.Second), m.start)
		}
	})
	m.send()
}

// pause makes the control plane stand still. The plane goes on.
func (m *machine) pause(d cluster.Time) {
	m.pausedUntil = max(m.pausedUntil, m.now+d)
	m.after(d, m.resume)
}

func (m *machine) resume() {
	if m.now < m.pausedUntil {
		return
	}
	pending := m.pending
	m.pending = nil
	for _, f := range pending {
		f()
	}
}

// latency returns how long a message takes.
func (w *world) latency() cluster.Time {
	switch x := w.random.Float64(); {
	case w.calm || x < 0.9:
		return cluster.Millisecond/10 + w.upTo(5*cluster.Millisecond)
	case x < 0.985:
		return cluster.Millisecond + w.upTo(200*cluster.Millisecond)
	}
	return w.upTo(4 * cluster.Second)
}

func (w *world) lost() bool { return !w.calm && w.chance(w.loss) }
