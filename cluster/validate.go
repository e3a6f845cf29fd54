package cluster

import (
	"fmt"
	"strings"
	"time"
)

// MaxName is the maximum length of a host's name in bytes, and MaxKey that of a bucket's key.
const (
	MaxName = 64
	MaxKey  = 256
)

// maxNumber is the maximum of numbers without a range of their own: scripts compute in floating point.
const maxNumber = 1 << 52

// Validate returns an error if q is no call that a [Host] makes: it came from another program, and must
// not reach a ledger. It bounds what a ledger remembers of a host.
func (q *Request) Validate() error {
	if err := q.Params.validate(); err != nil {
		return err
	}
	switch {
	case !validName(q.Host):
		return fmt.Errorf("host %.80q: %s", q.Host, nameRule)
	case len(q.Items) > MaxItems:
		return fmt.Errorf("%d items: must be at most %d", len(q.Items), MaxItems)
	case len(q.Info) > MaxInfo:
		return fmt.Errorf("%d bytes of information about the host: must be at most %d", len(q.Info), MaxInfo)
	case len(q.Gone) > q.Params.Hosts:
		return fmt.Errorf("%d hosts are gone: must be at most %d", len(q.Gone), q.Params.Hosts)
	}
	for _, field := range []struct {
		name  string
		value int64
	}{
		{"start", q.Start},
		{"call", q.N},
		{"call that was taken", q.Got},
		{"age", int64(q.GotAge)},
		{"epoch", q.Epoch},
		{"version", q.Known},
	} {
		if err := checkRange(field.name, field.value, maxNumber); err != nil {
			return err
		}
	}
	for i := range q.Items {
		if err := q.Items[i].validate(); err != nil {
			return err
		}
	}
	for _, g := range q.Gone {
		if !validName(g.Host) {
			return fmt.Errorf("gone host %.80q: %s", g.Host, nameRule)
		}
		if err := checkRange("start of a gone host", g.Start, maxNumber); err != nil {
			return err
		}
		if err := checkRange("call of a gone host", g.N, maxNumber); err != nil {
			return err
		}
	}
	return nil
}

func (p *Params) validate() error {
	switch {
	case p.Hosts < 1 || p.Hosts > MaxHosts:
		return fmt.Errorf("%d hosts: must be 1 to %d", p.Hosts, MaxHosts)
	case p.Lease < 100*Millisecond || p.Lease > FromDuration(time.Hour):
		return fmt.Errorf("lease of %d us: must be 100ms to 1h", p.Lease)
	case p.Step < 10*Millisecond || p.Step > FromDuration(time.Hour):
		return fmt.Errorf("step of %d us: must be 10ms to 1h", p.Step)
	}
	return nil
}

func (it *Item) validate() error {
	if !validKey(it.Key) {
		return fmt.Errorf("bucket %.80q: must be 1 to %d printable characters of ASCII, and no space", it.Key, MaxKey)
	}
	if IsTickets(it.Key) && it.Want > 0 && it.Every == 0 {
		return fmt.Errorf("bucket %q: tickets without a time between units", it.Key)
	}
	for _, err := range []error{
		checkRange("parts in use", it.Has, Whole), checkRange("parts wanted", it.Want, Whole), checkRange("weight", it.Weight, MaxWeight),
		checkRange("time between units", int64(it.Every), int64(MaxEvery)), checkRange("burst", int64(it.Burst), int64(MaxEvery)),
	} {
		if err != nil {
			return fmt.Errorf("bucket %q: %w", it.Key, err)
		}
	}
	return nil
}

func checkRange(name string, n, most int64) error {
	if n < 0 || n > most {
		return fmt.Errorf("%s %d: must be 0 to %d", name, n, most)
	}
	return nil
}

const nameRule = "must be 1 to 64 letters, digits, dots, dashes and underscores"

func validName(name string) bool {
	return name != "" && len(name) <= MaxName && !strings.ContainsFunc(name, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '.' || r == '-' || r == '_')
	})
}

func validKey(key string) bool {
	return key != "" && len(key) <= MaxKey && !strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' })
}
