// Owner: the loop's thread.

package conn

import (
	"slices"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// waitQuota bounds the waiting connections of one limit, over all its keys. A class for which slots are reserved has that
// part of the places, too: what waits in them makes room for none.
type waitQuota struct {
	waiting int
	sources map[memberKey]*quotaSource
	classes []quotaClass // that wait
}

// quotaClass is the waiting connections of one class.
type quotaClass struct {
	precedence precedence
	waiting    int
	largest    fairq.Heap[quotaSource, byWaiters]
}

// quotaSource is one source in a quota, at all gates of the limit.
type quotaSource struct {
	class     *shaper.ClassState
	sources   fairq.Heap[gateSource, byWaitersAtGate]
	waiting   int // connections
	heapIndex int // in quotaClass.largest
}

func (wq *waitQuota) class(class *shaper.ClassState) *quotaClass {
	for i := range wq.classes {
		if wq.classes[i].precedence.class == class {
			return &wq.classes[i]
		}
	}
	return nil
}

// ownPlaces returns how many places are for the waiters of a class.
func ownPlaces(l *shaper.Limit, class *shaper.ClassState) int {
	return l.MaxQueue * l.ReservedFor(class.Name) / 100
}

// largest returns the source with the most waiters of the class that makes room: of those that have more than their own places the
// one of the lowest priority. It is nil if no class has more.
func (wq *waitQuota) largest(l *shaper.Limit) (first *quotaSource, priority int) {
	for i := range wq.classes {
		c := &wq.classes[i]
		if c.waiting <= ownPlaces(l, c.precedence.class) {
			continue
		}
		if t := c.largest[0]; first == nil || c.precedence.priority < priority || c.precedence.priority == priority && t.waiting > first.waiting {
			first, priority = t, c.precedence.priority
		}
	}
	return first, priority
}

// displaces reports whether the next waiter of a source under l takes the place of another source's: of one of lower priority, or
// of the same that has more, or of any if its class has not all of its own places.
func (wq *waitQuota) displaces(l *shaper.Limit, key memberKey, st precedence) bool {
	first, priority := wq.largest(l)
	if first == nil {
		return false
	}
	own := 0
	if c := wq.class(st.class); c != nil {
		own = c.waiting
	}
	return own < ownPlaces(l, st.class) || priority < st.priority || priority == st.priority && first.waiting > wq.waitingOf(key)+1
}

// evictNewest refuses the newest waiter under l of the source that makes room.
func (a *admission) evictNewest(wq *waitQuota, l *shaper.Limit, now leaky.Time) {
	first, _ := wq.largest(l)
	src := first.sources[0]
	a.refuse(src.newest().waiters.Last(), shaper.WaitingFull, now)
}

// insert counts the waiting connections of src in wq.
func (wq *waitQuota) insert(src *gateSource) {
	t := wq.sources[src.key]
	if t == nil {
		st := src.next().precedence
		t = &quotaSource{class: st.class}
		if wq.sources == nil {
			wq.sources = map[memberKey]*quotaSource{}
		}
		wq.sources[src.key] = t
		c := wq.class(st.class)
		if c == nil {
			wq.classes = append(wq.classes, quotaClass{precedence: st})
			c = &wq.classes[len(wq.classes)-1]
		}
		c.largest.Push(t)
	}
	src.quotaSource = t
	t.sources.Push(src)
}

// remove undoes insert, when none of src waits.
func (wq *waitQuota) remove(src *gateSource) {
	t := src.quotaSource
	src.quotaSource = nil
	t.sources.Remove(src)
	if len(t.sources) > 0 {
		return
	}
	delete(wq.sources, src.key)
	c := wq.class(t.class)
	if c.largest.Remove(t); len(c.largest) == 0 {
		wq.classes = slices.DeleteFunc(wq.classes, func(c quotaClass) bool { return c.precedence.class == t.class })
	}
}

// add adds n to the waiting connections of src.
func (wq *waitQuota) add(src *gateSource, n int) {
	t := src.quotaSource
	c := wq.class(t.class)
	t.waiting += n
	c.waiting += n
	wq.waiting += n
	t.sources.Fix(src)
	c.largest.Fix(t)
}

// waitingOf is how many connections of a source wait in wq.
func (wq *waitQuota) waitingOf(key memberKey) int {
	if t := wq.sources[key]; t != nil {
		return t.waiting
	}
	return 0
}

// byWaiters puts the source with the most waiters first.
type byWaiters struct{}

func (byWaiters) Less(a, b *quotaSource) bool { return a.waiting > b.waiting }
func (byWaiters) Index(t *quotaSource) *int   { return &t.heapIndex }

// byWaitersAtGate puts the gate with the most waiters of a source first.
type byWaitersAtGate struct{}

func (byWaitersAtGate) Less(a, b *gateSource) bool { return a.waiting > b.waiting }
func (byWaitersAtGate) Index(src *gateSource) *int { return &src.quotaIndex }
