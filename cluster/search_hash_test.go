package cluster

import (
	"hash/maphash"
	"reflect"
	"slices"
	"sync"
)

// hashOf returns the hash of what matters of n: how long ago things were and not when, and the order of epochs and
// calls and not their numbers. Two nodes with one hash have the same future.
func hashOf(n *node) uint64 {
	h := &hasher{n: n}
	h.hash.SetSeed(searchSeed)
	h.rankEpochs()
	h.walk()
	return h.hash.Sum64()
}

var searchSeed = maphash.MakeSeed()

type hasher struct {
	hash   maphash.Hash
	n      *node
	epochs []int64 // in order
	now    Time    // by the clock of what is hashed
	calls  int64   // of the host that is hashed
	run    string  // of the ledger that is hashed
}

func (h *hasher) rankEpochs() {
	for _, host := range h.n.hosts {
		h.epochs = append(h.epochs, host.epoch)
		if host.request != nil {
			h.epochs = append(h.epochs, host.request.Epoch)
		}
		if host.reply != nil {
			h.epochs = append(h.epochs, host.reply.Epoch)
		}
	}
	for _, l := range []*Ledger{h.n.ledger, h.n.saved} {
		if l.state != nil {
			h.epochs = append(h.epochs, l.state.epoch)
		}
	}
	slices.Sort(h.epochs)
	h.epochs = slices.Compact(h.epochs)
}

func (h *hasher) number(n int64) { maphash.WriteComparable(&h.hash, n) }

func (h *hasher) walk() {
	n := h.n
	h.number(int64(n.drain))
	h.number(int64(n.faults))
	for _, host := range n.hosts {
		h.now, h.calls = host.time(n.now), host.n
		h.value("", reflect.ValueOf(host.Host).Elem())
		h.number(host.rest)
		h.since(host.until)
		h.now = n.ledgerTime()
		h.value("", reflect.ValueOf(host.request))
		h.value("", reflect.ValueOf(host.reply))
	}
	for _, l := range []*Ledger{n.ledger, n.saved} {
		h.run, h.now = l.Run, n.ledgerTime()
		h.value("", reflect.ValueOf(l).Elem())
	}
}

// since hashes an instant as the time since then.
func (h *hasher) since(t Time) {
	if t != 0 {
		t -= h.now
	}
	h.number(int64(t))
}

func (h *hasher) value(name string, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			h.value(name, v.Elem())
		}
		h.number(int64(v.Kind()))
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[Params]() {
			h.number(v.FieldByName("Lease").Int()) // of some replies it is not set; otherwise it is the same everywhere
			return
		}
		for i, name := range fieldNames(v.Type()) {
			h.value(name, v.Field(i))
		}
	case reflect.Map:
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int {
			if a.String() < b.String() {
				return -1
			}
			return 1
		})
		for _, key := range keys {
			h.value("", key)
			if host := h.hostOf(key.String()); host != nil {
				h.calls = host.n
			}
			h.value("", v.MapIndex(key))
		}
		h.number(int64(v.Len()))
	case reflect.Slice:
		for i := range v.Len() {
			h.value(name, v.Index(i))
		}
		h.number(int64(v.Len()))
	case reflect.String:
		if text := v.String(); name == "run" || name == "Run" {
			h.number(int64(len(text)) * truth(text == h.run))
		} else {
			h.hash.WriteString(text)
		}
	case reflect.Bool:
		h.number(truth(v.Bool()))
	case reflect.Int64, reflect.Int:
		h.integer(name, v)
	case reflect.Uint64, reflect.Uint8:
		h.number(int64(v.Uint()))
	case reflect.Func:
	default:
		panic(v.Kind().String() + " " + name)
	}
}

var namesOfFields sync.Map // by type

func fieldNames(t reflect.Type) []string {
	if names, ok := namesOfFields.Load(t); ok {
		return names.([]string)
	}
	var names []string
	for i := range t.NumField() {
		names = append(names, t.Field(i).Name)
	}
	namesOfFields.Store(t, names)
	return names
}

func (h *hasher) integer(name string, v reflect.Value) {
	n := v.Int()
	switch {
	case name == "epoch" || name == "Epoch":
		h.number(int64(slices.Index(h.epochs, n)))
	case name == "GotAge" || name == "lag" || name == "gotLag":
		h.number(n)
	case v.Type() == reflect.TypeFor[Time]():
		h.since(Time(n))
	case n != 0 && (name == "n" || name == "N" || name == "got" || name == "Got" || name == "gotN" || name == "toldIn"):
		h.number(n - h.calls)
	default:
		h.number(n)
	}
}

func (h *hasher) hostOf(name string) *nodeHost {
	for _, host := range h.n.hosts {
		if host.Name == name {
			return host
		}
	}
	return nil
}

func truth(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
