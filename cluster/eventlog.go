package cluster

import "sort"

// eventLog has the last event of each bucket that is hot, and of those that became cold of late.
type eventLog struct {
	hot, cold   []Event          // by version, with some that later ones have replaced
	hotVersion  map[string]int64 // by key, of the events that are current
	coldVersion map[string]int64
}

func newEventLog() eventLog {
	return eventLog{hotVersion: map[string]int64{}, coldVersion: map[string]int64{}}
}

// addHot records that a bucket has become hot.
func (l *eventLog) addHot(key string, version int64) {
	delete(l.coldVersion, key)
	l.hotVersion[key] = version
	l.hot = append(l.hot, Event{version, key, false})
	if len(l.hot) > 2*len(l.hotVersion)+eventPage {
		current := l.hot[:0]
		for _, e := range l.hot {
			if l.current(&e) {
				current = append(current, e)
			}
		}
		l.hot = current
	}
}

// addCold records that a bucket has become cold, and forgets those that did before version known,
// which all hosts know, or that are too many: to a host that has not heard of it the bucket stays hot.
func (l *eventLog) addCold(key string, version, known int64) {
	delete(l.hotVersion, key)
	l.coldVersion[key] = version
	l.cold = append(l.cold, Event{version, key, true})
	n := 0
	for n < len(l.cold) && (l.cold[n].Version < known || len(l.cold)-n > maxBuckets) {
		if l.current(&l.cold[n]) {
			delete(l.coldVersion, l.cold[n].Key)
		}
		n++
	}
	l.cold = l.cold[n:]
}

func (l *eventLog) current(e *Event) bool {
	if e.Cold {
		return l.coldVersion[e.Key] == e.Version
	}
	return l.hotVersion[e.Key] == e.Version
}

// after returns the first events that are current after a version.
func (l *eventLog) after(version int64) (page []Event) {
	hot, cold := l.hot[firstAfter(l.hot, version):], l.cold[firstAfter(l.cold, version):]
	for len(page) < eventPage && len(hot)+len(cold) > 0 {
		from := &hot
		if len(hot) == 0 || len(cold) > 0 && cold[0].Version < hot[0].Version {
			from = &cold
		}
		if e := (*from)[0]; l.current(&e) {
			page = append(page, e)
		}
		*from = (*from)[1:]
	}
	return page
}

func firstAfter(events []Event, version int64) int {
	return sort.Search(len(events), func(i int) bool { return events[i].Version > version })
}
