package daemon

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/member"
	"shaperd.dev/shaperd/internal/sharing"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// States of this host in its group, see [api.Shared].
const (
	sharedNone    = "none"
	sharedStatic  = "static"
	sharedJoining = "joining"
	sharedJoined  = "joined"
	sharedAlone   = "alone"
	sharedLeaving = "leaving"
)

// Severities of problems.
const (
	critical = "critical"
	warning  = "warning"
)

// newShared returns the part of the state that the configuration has.
func newShared(c *config.Shared) api.Shared {
	s := api.Shared{
		State: sharedNone, Stores: []string{}, Problems: []api.Problem{}, Differences: []api.SharedDifference{}, Limits: []api.SharedLimit{},
	}
	if c.Hosts == 0 {
		return s
	}
	s.State, s.Group, s.Name, s.Hosts = sharedStatic, c.Group, sharing.HostName(c), c.Hosts
	if len(c.Store) > 0 {
		s.State, s.Alone, s.Failover = sharedJoining, c.Alone.String(), sharing.Failover(sharing.Params(c)).String()
		s.Stores = append(s.Stores, c.Store...)
	}
	return s
}

// describeMember adds what m is, and the problem if this host is not in the group.
func describeMember(s *api.Shared, c *config.Shared, m *member.Status) {
	s.For, s.Counted, s.Live, s.Gone, s.Differing = m.For.Duration().Seconds(), m.Counted, m.Live, len(m.Gone), m.Differ
	s.LeaseAge, s.LeaseLeft, s.Epoch, s.HotBuckets = m.Age.Duration().Seconds(), m.Left.Duration().Seconds(), m.Epoch, m.Hot
	s.StoreError = sharing.StoreErrorText(m.LastError, c.Store, m.Counters.Answered+m.Counters.Refused > 0)
	s.Server = m.Server
	// Two hosts with one name are in the group in turns, for some leases each.
	if m.Rival != 0 && m.Rival.Duration() < 10*c.Lease+absentAfter {
		s.Problems = append(s.Problems, api.Problem{Severity: critical, Title: "Name used twice", Text: fmt.Sprintf(
			"another host was in the group as %q %s, and the two displace each other. Give each its own name in [shared].", sharing.HostName(c), ago(m.Rival.Duration()))})
	}
	switch {
	case m.Leaving:
		s.State = sharedLeaving
		return
	case m.Joined && m.Left > 0:
		s.State = sharedJoined
		return
	}
	s.State = sharedAlone
	s.Why = whyAlone(s, c, m)
	problem := api.Problem{Severity: critical, Title: "Alone", Text: fmt.Sprintf("%s. This host %s, and lets %s of each shared limit pass.",
		s.Why, aloneText(m.For.Duration()), passText(m.Cold))}
	switch {
	case m.Cold == shaper.Whole && c.Hosts > 1:
		s.Withdrawn = true
		problem.Title = "Not limited together"
		problem.Text = fmt.Sprintf("%s. This host %s, and with alone = \"open\" lets the whole of each shared limit pass: all hosts together may exceed it.",
			s.Why, aloneText(m.For.Duration()))
	case m.LastError == "" && passing(m.Refused):
		s.State, problem.Severity, problem.Title = sharedJoining, warning, "Joining"
	}
	s.Problems = append(s.Problems, problem)
}

// passing reports whether a refusal ends by itself.
func passing(r cluster.Refusal) bool {
	return r == cluster.NotRefused || r == cluster.RefusedMoved || r == cluster.RefusedUnsettled
}

// whyAlone returns why this host is not in its group.
func whyAlone(s *api.Shared, c *config.Shared, m *member.Status) string {
	switch {
	case s.StoreError != "":
		return "no ledger answers: " + s.StoreError
	case m.Refused == cluster.RefusedParams:
		return sharing.ParamsDifference(m.Ledger, sharing.Params(c))
	case m.Refused == cluster.RefusedTooMany:
		return fmt.Sprintf("hosts = %d, and there are as many without this one: raise it on all hosts, or \"shaperd shared forget HOST\" for one that is gone", c.Hosts)
	case m.Refused == cluster.RefusedOld:
		return fmt.Sprintf("the ledger knows a later start of %q", sharing.HostName(c))
	case m.Refused == cluster.RefusedMoved:
		return "its lease at another ledger has not ended"
	case m.Refused == cluster.RefusedUnsettled:
		return "it had left, and the ledger does not know yet whose place it may take"
	}
	return "the ledger does not know yet what the others use"
}

// passText formats what this host lets pass of each bucket.
func passText(parts int64) string {
	switch {
	case parts <= 0:
		return "nothing"
	case parts >= shaper.Whole:
		return "the whole"
	}
	return partText(int(math.Round(float64(shaper.Whole) / float64(parts))))
}

// partText formats what is kept for each of some hosts.
func partText(hosts int) string { return fmt.Sprintf("1/%d", hosts) }

// A time shorter than justNow is shown as "just now".
const justNow = 50 * time.Millisecond

// aloneText says for how long a host has been alone.
func aloneText(d time.Duration) string {
	if d < justNow {
		return "is alone just now"
	}
	return "has been alone for " + roughly(d)
}

// ago says when something was: "3s ago".
func ago(d time.Duration) string {
	if d < justNow {
		return "just now"
	}
	return roughly(d) + " ago"
}

// roughly formats d with the precision that its reader needs.
func roughly(d time.Duration) string {
	unit := 100 * time.Millisecond
	switch {
	case d >= time.Hour:
		unit = time.Minute
	case d >= 10*time.Second:
		unit = time.Second
	}
	return config.FormatDuration(d.Round(unit))
}

// absentAfter is how long a host does not call before operators are told, if that is longer than the ledger
// gives it.
const absentAfter = 10 * time.Second

// describeLedger adds what the ledger knows, and which hosts are absent or have other limits than those here.
func describeLedger(s *api.Shared, shot *cluster.Snapshot, here map[string]string, digest uint64) {
	if shot.Epoch == 0 {
		s.LedgerError = "it has no state: no host has called since it started"
		return
	}
	expiry := (2*shot.Params.Lease + shot.Params.Step).Duration()
	warnAfter := max(expiry, absentAfter)
	l := &api.Ledger{Epoch: shot.Epoch, Age: shot.Age.Duration().Seconds(), Settled: shot.Settled, Hosts: []api.SharedHost{}}
	kept := fmt.Sprintf("%s of each shared limit is kept for", partText(shot.Params.Hosts))
	strict := ""
	if shot.Params.Strict {
		strict = ": another host may take its place then. With failover = \"strict\" its part is kept until one does, or hosts is lowered on all hosts."
	}
	for i := range shot.Hosts {
		h := &shot.Hosts[i]
		info := sharing.ParseInfo(h.Info)
		age := h.Age.Duration()
		host := api.SharedHost{
			Name: h.Name, State: "joining", Age: age.Seconds(), LeaseLeft: h.Lease.Duration().Seconds(), Differs: h.Digest != digest && h.Name != s.Name, Version: info.Version,
		}
		switch {
		case h.Counted:
			host.State = "counted"
		case age >= expiry:
			host.State = "absent"
		}
		if host.State == "absent" && age >= warnAfter {
			s.Problems = append(s.Problems, api.Problem{Severity: warning, Title: "Host away", Text: fmt.Sprintf(
				"%s has not called for %s, and %s it. If it is gone for good: \"shaperd shared forget %[1]s\"%[4]s", h.Name, roughly(age), kept, strict)})
		}
		if host.Differs && host.State != "absent" {
			s.Differences = append(s.Differences, sharing.Differences(h.Name, here, info)...)
		}
		l.Hosts = append(l.Hosts, host)
	}
	for _, g := range shot.Gone {
		l.Hosts = append(l.Hosts, api.SharedHost{Name: g.Host, State: "gone"})
	}
	slices.SortStableFunc(l.Hosts, func(a, b api.SharedHost) int { return cmp.Compare(a.Name, b.Name) })
	if l.Unknown = max(0, shot.Params.Hosts-len(l.Hosts)); l.Unknown > 0 && shot.Age.Duration() >= warnAfter {
		have, each, which := "have", "each", "For one that"
		if l.Unknown == 1 {
			have, each, which = "has", "it", "If it"
		}
		s.Problems = append(s.Problems, api.Problem{Severity: warning, Title: "Hosts away", Text: fmt.Sprintf(
			"%d of %d hosts %s not called since the ledger began %s ago, and %s %s. %s is gone for good, or was never there: \"shaperd shared forget HOST\"%s",
			l.Unknown, shot.Params.Hosts, have, roughly(shot.Age.Duration()), kept, each, which, strict)})
	}
	s.Ledger = l
}
