package cluster

import (
	"cmp"
	"errors"
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
	case len(q.Gone) > 2*q.Params.Hosts:
		return fmt.Errorf("%d hosts are gone or replaced: must be at most %d", len(q.Gone), 2*q.Params.Hosts)
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
	return validateGone(q.Gone)
}

// maxReplied is the maximum of numbers in replies that a host counts on from: what it says then is far from
// maxNumber, also after a ledger that was wrong.
const maxReplied = maxNumber - 1<<47

// Validate returns an error if r is no reply that a ledger gives to q, a valid call: a host that took it would
// use what nobody gave it, or make calls that no ledger takes.
func (r *Reply) Validate(q *Request) error {
	switch {
	case r.N != q.N || r.Start != q.Start:
		return fmt.Errorf("it is to call %d of start %d, not to call %d of start %d", r.N, r.Start, q.N, q.Start)
	case r.Epoch == 0:
		return errors.New("it has no epoch")
	case r.Refused > RefusedUnsettled:
		return fmt.Errorf("refusal %d: must be at most %d", r.Refused, RefusedUnsettled)
	case len(r.Events) > eventPage:
		return fmt.Errorf("%d events: must be at most %d", len(r.Events), eventPage)
	case len(r.Gone) > 2*q.Params.Hosts:
		return fmt.Errorf("%d hosts are gone or replaced: must be at most %d", len(r.Gone), 2*q.Params.Hosts)
	case r.Refused == RefusedParams:
		if err := r.Params.validate(); err != nil {
			return err
		}
	}
	if err := cmp.Or(
		checkRange("epoch", r.Epoch, maxReplied), checkRange("latest start", r.Latest, maxReplied), checkRange("version", r.Version, maxReplied),
		checkRange("live hosts", int64(r.Live), MaxHosts), checkRange("hosts that differ", int64(r.Differ), MaxHosts),
	); err != nil {
		return err
	}
	return cmp.Or(r.validateBuckets(), validateGone(r.Gone))
}

// validateBuckets returns an error if r says of a bucket what no ledger says.
func (r *Reply) validateBuckets() error {
	for _, e := range r.Events {
		if err := cmp.Or(checkKey(e.Key), checkRange("version of an event", e.Version, r.Version)); err != nil {
			return err
		}
	}
	for _, g := range r.Grants {
		if err := cmp.Or(checkKey(g.Key), checkRange("parts given", g.Parts, Whole)); err != nil {
			return err
		}
	}
	for _, sale := range r.Sales {
		// One host of an island of one has 1/Hosts of the rate.
		err := cmp.Or(checkKey(sale.Key), checkRange("tickets", sale.N, MaxTickets), checkRange("time between tickets", int64(sale.Every), int64(MaxEvery*MaxHosts)))
		if err != nil {
			return err
		}
		if last := sale.At + Time(max(sale.N, 1)-1)*sale.Every; sale.At < -MaxEvery || sale.At > MaxEvery || last > MaxEvery {
			return fmt.Errorf("tickets of %q from %d to %d us after the call: must be %d to %d", sale.Key, sale.At, last, -MaxEvery, MaxEvery)
		}
	}
	return nil
}

func validateGone(gone []Gone) error {
	for _, g := range gone {
		if !validName(g.Host) {
			return fmt.Errorf("gone host %.80q: %s", g.Host, nameRule)
		}
		if err := cmp.Or(checkRange("start of a gone host", g.lastStart(), maxNumber), checkRange("call of a gone host", g.N, maxNumber)); err != nil {
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
	if err := checkKey(it.Key); err != nil {
		return err
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

func checkKey(key string) error {
	if !validKey(key) {
		return fmt.Errorf("bucket %.80q: must be 1 to %d printable characters of ASCII, and no space", key, MaxKey)
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
