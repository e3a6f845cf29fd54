// Owner: the loop's thread, except for the methods of Proxy.

package conn

import (
	"maps"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

// QuotaStore keeps what is claimed of quotas.
type QuotaStore interface {
	// Write replaces records, by the name of their budget, and removes those that are nil: all of them or none. They are
	// safe from a crash when it returns nil. It is not called while it runs.
	Write(records map[string]*quota.Record) error
}

// quotas are the budgets of limits with a quota. They stay while a queue or a gate needs them, and else until what they count is over.
//
// Units and connections wait for claims that are not in the file yet, which another goroutine writes, many at once. Nothing else
// waits for the file.
type quotas struct {
	store   QuotaStore
	wall    func() time.Time
	boot    func() leaky.Time
	post    func(func(now leaky.Time))
	later   func(func(now leaky.Time))
	wheel   *pacer.Wheel
	sharing *sharing

	saved   map[string]*quota.Record // in the file, and not among budgets
	names   []string                 // of saved, and perhaps others
	looked  int                      // how many of names are of limits without a quota
	loading bool                     // loadSome will be called
	budgets map[string]*budget       // by name
	list    []*budget                // the same
	keys    map[string]int           // how many of budgets a limit has, by its name
	wanting []*budget                // claims that are not being written
	removed []string                 // records that are over
	full    map[string]leaky.Time    // until when no room is looked for in a limit, by its name
	retry   pacer.Event
	failing error // why the last write failed, or nil

	writing      bool
	writingSince leaky.Time

	rolling struct { // the clock of rolling periods
		at   time.Time  // at the start
		boot leaky.Time // at the start
	}
}

// budget is the budget of one key.
type budget struct {
	quota.Budget
	quotas *quotas
	name   string
	limit  string     // name of the limit
	index  int        // in quotas.list
	refs   int        // queues and gates
	valid  leaky.Time // until when the slot was looked at
	listed bool       // in quotas.wanting, or being written
	reset  bool       // since it was last written
	inFile bool       // the file has, or may have, a record of it
	queues []*queue   // in which a unit waits for a claim
	gates  []*gate    // at which a connection may
}

// othersSuffix is that of the name of the budget that later keys of a limit share.
const othersSuffix = "|others"

func newQuotas(l *loop) *quotas {
	qs := &quotas{
		wall: time.Now, boot: l.clock.Boot, post: l.post, later: l.runLater, wheel: &l.pacer.Wheel, sharing: l.sharing,
		budgets: map[string]*budget{}, keys: map[string]int{}, full: map[string]leaky.Time{},
	}
	qs.retry.Fire = func(leaky.Time) { qs.write() }
	qs.rolling.at, qs.rolling.boot = qs.wall(), qs.boot()
	return qs
}

// UseQuotas gives p the file of quotas, and what was in it, by the name of the budget. It is called once, before an Apply of a policy that
// has a quota.
func (p *Proxy) UseQuotas(store QuotaStore, saved map[string]*quota.Record) {
	p.home.loop.call(func(leaky.Time) {
		qs := p.home.loop.quotas
		qs.store, qs.saved, qs.names = store, saved, slices.Collect(maps.Keys(saved))
		for _, r := range saved {
			if r.Period.Calendar == quota.NoCalendar && r.Start.After(qs.now(&r.Period)) { // the clock was set back, or is wrong after a boot
				qs.rolling.at, qs.rolling.boot = r.Start, qs.boot()
			}
		}
	})
}

// load adds the saved budgets of the limits of the policy, some in each round. Those that are needed before are added then.
func (qs *quotas) load() {
	qs.looked = 0
	if len(qs.names) > 0 && !qs.loading {
		qs.loading = true
		qs.later(qs.loadSome)
	}
}

// loadBatch is how many saved budgets are looked at in a round: 0.3 ms.
const loadBatch = 256

func (qs *quotas) loadSome(leaky.Time) {
	p := qs.sharing.shaper.Policy()
	for range loadBatch {
		if qs.looked == len(qs.names) {
			break
		}
		name := qs.names[qs.looked]
		if qs.saved[name] != nil {
			i := p.Find(limitOfBudget(name))
			if i < 0 || p.Limit(i).Quota.Amount == 0 {
				qs.looked++
				continue
			}
			qs.add(name, p.Limit(i))
		}
		last := len(qs.names) - 1
		qs.names[qs.looked] = qs.names[last]
		qs.names = qs.names[:last]
	}
	if qs.loading = qs.looked < len(qs.names); qs.loading {
		qs.later(qs.loadSome)
	}
}

func limitOfBudget(name string) string {
	limit, _, _ := strings.Cut(name, "|")
	return limit
}

// now is the time by the clock of p. That of rolling periods goes on while the wall clock is set.
func (qs *quotas) now(p *quota.Period) time.Time {
	if p.Calendar == quota.NoCalendar {
		return qs.rolling.at.Add(qs.boot().Sub(qs.rolling.boot).Duration())
	}
	return qs.wall()
}

// find returns the budget of a key of limit i, or nil if nothing was used there.
func (qs *quotas) find(p *shaper.Policy, i int, key shaper.Key, now leaky.Time) *budget {
	l := p.Limit(i)
	name := qs.nameFor(p, l, key)
	b := qs.budgets[name]
	if b == nil && qs.saved[name] != nil {
		b = qs.add(name, l)
	}
	if b != nil {
		qs.follow(b, l, now)
	}
	return b
}

// open returns the budget of a key of limit i, for a queue or a gate, which closes it.
func (qs *quotas) open(p *shaper.Policy, i int, key shaper.Key, now leaky.Time) *budget {
	l := p.Limit(i)
	name := qs.nameFor(p, l, key)
	b := qs.budgets[name]
	if b == nil {
		b = qs.add(name, l)
	}
	qs.follow(b, l, now)
	b.refs++
	return b
}

// nameFor returns the name of the budget of a key of l.
func (qs *quotas) nameFor(p *shaper.Policy, l *shaper.Limit, key shaper.Key) string {
	name := p.ShareName(key)
	if name == "" { // its listener was removed
		return l.Name + othersSuffix
	}
	if l.Key != 0 && qs.budgets[name] == nil && qs.saved[name] == nil && qs.keys[l.Name] >= shaper.MaxQuotaKeys && !qs.makeRoom(l.Name) {
		return l.Name + othersSuffix
	}
	return name
}

// add adds the budget with a name, of limit l.
func (qs *quotas) add(name string, l *shaper.Limit) *budget {
	var r quota.Record
	if saved := qs.saved[name]; saved != nil {
		r = *saved
	}
	b := &budget{
		Budget: *quota.New(l.Quota, r, qs.now(&l.Quota.Period)), quotas: qs, name: name, limit: l.Name, index: len(qs.list),
	}
	b.inFile = qs.saved[name] != nil
	delete(qs.saved, name)
	qs.keys[l.Name]++
	qs.budgets[name] = b
	qs.list = append(qs.list, b)
	return b
}

// roomTries is how many budgets are looked at for one that is over.
const roomTries = 64

// roomPause is for how long none is looked for after that found none: a flood of sources must not cost more than others do.
const roomPause = leaky.Second / 50

// makeRoom drops a budget of a limit that is over, and reports whether it found one.
func (qs *quotas) makeRoom(limit string) bool {
	now := qs.sharing.clock()
	if now < qs.full[limit] {
		return false
	}
	tries := roomTries
	for _, b := range qs.budgets { // in random order
		if b.limit == limit && b.refs == 0 && !b.listed && qs.isOver(b) {
			qs.drop(b)
			return true
		}
		if tries--; tries == 0 {
			break
		}
	}
	qs.full[limit] = now + roomPause
	return false
}

// isOver reports whether b equals a new budget.
func (qs *quotas) isOver(b *budget) bool {
	r := b.Record()
	return b.Empty() || r.Over(qs.now(&r.Period))
}

// drop removes b, which is over, and its record.
func (qs *quotas) drop(b *budget) {
	delete(qs.budgets, b.name)
	last := len(qs.list) - 1
	qs.list[b.index] = qs.list[last]
	qs.list[b.index].index = b.index
	qs.list[last] = nil
	qs.list = qs.list[:last]
	qs.keys[b.limit]--
	if b.inFile {
		qs.removed = append(qs.removed, b.name)
		qs.write()
	}
}

// close ends the use of b by a queue or a gate.
func (qs *quotas) close(b *budget) {
	if b.refs--; b.refs == 0 && b.Empty() && !b.listed {
		qs.drop(b)
	}
}

// follow updates b to the limit, and to the time, at least once a second: the wall clock may be set.
func (qs *quotas) follow(b *budget, l *shaper.Limit, now leaky.Time) {
	if l.Quota.Amount > 0 && l.Quota != b.Quota() {
		b.Change(l.Quota, qs.now(&l.Quota.Period))
		b.valid = 0
	}
	if now < b.valid {
		return
	}
	period := b.Quota().Period
	wall := qs.now(&period)
	b.Follow(wall)
	b.valid = now.Add(leaky.FromDuration(min(max(b.End().Sub(wall), time.Millisecond), time.Second)))
}

// observe counts what an observing limit lets pass.
func (qs *quotas) observe(p *shaper.Policy, i int, key shaper.Key, bytes, packets uint64, now leaky.Time) {
	if !p.Limit(i).HasUnitQuota() {
		return // gates count connections
	}
	b := qs.open(p, i, key, now)
	if b.Quota().Unit == quota.Packets {
		b.Use(packets)
	} else {
		b.Use(bytes)
	}
	qs.want(b)
	qs.close(b)
}

// want claims more for b if what it has claimed will be used up soon.
func (qs *quotas) want(b *budget) {
	if b.WantsClaim() {
		qs.enlist(b)
	}
}

// enlist makes the next write claim for b.
func (qs *quotas) enlist(b *budget) {
	if b.listed {
		return
	}
	b.listed = true
	qs.wanting = append(qs.wanting, b)
	if !qs.retry.Scheduled() {
		qs.write()
	}
}

// writeRetry is the time between attempts to write the file.
const writeRetry = leaky.Second

// maxClaims is how many records are written at once.
const maxClaims = 4096

// write writes what is wanted to the file, unless a write is in progress, after which it is called again.
func (qs *quotas) write() {
	if qs.writing || len(qs.wanting)+len(qs.removed) == 0 {
		return
	}
	qs.writing, qs.writingSince = true, qs.sharing.clock()
	claims := qs.wanting[:min(len(qs.wanting), maxClaims)]
	removed := qs.removed[:min(len(qs.removed), maxClaims)]
	qs.wanting, qs.removed = slices.Clone(qs.wanting[len(claims):]), slices.Clone(qs.removed[len(removed):])
	records := map[string]*quota.Record{}
	for _, name := range removed {
		if b := qs.budgets[name]; b != nil { // it is in use again
			b.inFile = true
		} else {
			records[name] = nil
		}
	}
	for _, b := range claims {
		r := b.Claim()
		b.reset, b.inFile = false, true
		records[b.name] = &r
	}
	go func() {
		err := qs.store.Write(records)
		qs.post(func(now leaky.Time) { qs.written(claims, removed, records, err, now) })
	}()
}

// written is called when records are in the file, or could not be written.
func (qs *quotas) written(claims []*budget, removed []string, records map[string]*quota.Record, err error, now leaky.Time) {
	qs.writing, qs.failing = false, err
	var gates []*gate
	for _, b := range claims {
		b.listed = false
		b.Claimed(*records[b.name], err == nil)
		if err != nil {
			b.listed = true
			qs.wanting = append(qs.wanting, b)
			continue
		}
		for _, q := range b.queues {
			qs.sharing.scheduler.markRunnable(q)
		}
		gates = append(gates, b.gates...)
		b.queues, b.gates = nil, nil
		if b.reset { // during the write
			qs.enlist(b)
		} else if b.refs == 0 && b.Empty() {
			qs.drop(b)
		}
	}
	if err != nil {
		qs.removed = append(qs.removed, removed...)
		qs.wheel.Schedule(&qs.retry, now.Add(writeRetry))
		return
	}
	qs.sharing.scheduler.run(now)
	qs.sharing.admission.dispatch(gates, now)
	qs.sharing.admission.run(now)
	qs.write()
}

// finish returns what is to be written last: of all budgets what was used, without claims. ok is false while a write is in progress.
func (qs *quotas) finish() (records map[string]*quota.Record, ok bool) {
	if qs.writing {
		return nil, false
	}
	qs.writing = true // nothing is claimed any more
	records = map[string]*quota.Record{}
	for _, name := range qs.removed {
		records[name] = nil
	}
	for _, b := range qs.list {
		records[b.name] = nil
		if r := b.Record(); !b.Empty() {
			records[b.name] = &r
		}
	}
	return records, true
}

// closeQuotas writes what was used to the file, when nothing passes any more.
func (p *Proxy) closeQuotas() {
	for range finishTries {
		var records map[string]*quota.Record
		ok := true // if the loop has ended
		p.home.loop.call(func(leaky.Time) { records, ok = p.home.loop.quotas.finish() })
		if ok {
			if len(records) > 0 {
				if err := p.home.loop.quotas.store.Write(records); err != nil {
					p.log.Error("writing quotas failed: what was claimed counts as used", "err", err)
				}
			}
			return
		}
		time.Sleep(finishWait)
	}
	p.log.Error("the file of quotas is still being written: what was claimed counts as used")
}

// How long closeQuotas waits for a write in progress.
const (
	finishTries = 100
	finishWait  = 20 * time.Millisecond
)
