package config

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// Shared describes the group of hosts that share limits, and how they do it.
//
// Files are absolute or relative paths with at least one slash, or the names of systemd
// credentials, in the directory $CREDENTIALS_DIRECTORY; "" is none.
type Shared struct {
	Hosts int    // hosts that may exist, 1 to 1000; 0 without [shared]: no limit is shared
	Name  string // of this host, unique in the group; "" is the host name of the system
	Group string

	// Store has URLs of the ledger: none, with 1/Hosts for each host; one of Redis; or those
	// of hosts that serve it, each "shaperd://host:port". Those of Redis are one of
	//
	//	redis://host:port
	//	redis+sentinel://host:port,host:port/master
	//	redis+cluster://host:port,host:port
	//	unix:///path
	//
	// or begin with "rediss", for TLS. IPv6 addresses are in brackets.
	Store        []string
	Username     string // at Redis; "" is the default user
	PasswordFile string // file with the password at Redis
	CAFile       string // certificates that sign those of others; "" are those of the system
	CertFile     string // certificate of this host; together with KeyFile
	KeyFile      string
	Prefix       string // of the keys in Redis

	Lease    time.Duration // how long a host may use its parts without an answer, 300ms to 30s
	Interval time.Duration // between calls, 20ms to a third of Lease
	Alone    Alone
	Failover Failover

	Serve string // host:port at which this daemon serves the ledger to other hosts; "" is none
}

// Alone is what a host uses of shared limits while no ledger answers.
type Alone uint8

// What a host may use alone.
const (
	AloneShare  Alone = iota // 1/Hosts
	AloneClosed              // nothing
	AloneOpen                // the whole: all hosts together may exceed the limit
)

func (a Alone) String() string { return [...]string{"share", "closed", "open"}[a] }

// Failover is what hosts assume of a ledger that has taken the place of another one.
type Failover uint8

// Assumptions about the ledger that was replaced.
const (
	FailoverFast   Failover = iota // it answers no one any more
	FailoverStrict                 // it may go on for some time
)

func (f Failover) String() string { return [...]string{"fast", "strict"}[f] }

// uses reports whether a URL of the store begins with prefix.
func (s *Shared) uses(prefix string) bool {
	return slices.ContainsFunc(s.Store, func(url string) bool { return strings.HasPrefix(url, prefix) })
}

// embedded reports whether hosts serve the ledger that s uses.
func (s *Shared) embedded() bool { return s.uses("shaperd:") }

func (l *loader) shared(t table) {
	l.checkDuplicateKeys(t)
	t.decode(l.c)
	for _, key := range []string{"password_file", "ca_file", "cert_file", "key_file"} {
		f := sharedKeys.find(key).field
		name := f.get(l.c).(string)
		if !t.has(key) || !strings.Contains(name, "/") { // the name of a credential
			continue
		}
		path := t.path(name)
		if !strings.Contains(path, "/") {
			path = "./" + path
		}
		f.set(l.c, path)
	}
	l.shareds = append(l.shareds, t)
}

// maxJoint is the maximum number of adaptive limits that hosts share: what is measured of each goes with calls to the
// ledger, where all hosts read it.
const maxJoint = 4

// checkShared reports mistakes between [shared] and limits, and between keys of [shared], which
// may be in several files.
func (l *loader) checkShared() {
	var limits []int // that are shared
	for i := range l.c.Limits {
		if l.c.Limits[i].Shared {
			limits = append(limits, i)
		}
	}
	for _, t := range l.shareds {
		if t.requireForEffect(len(limits) > 0, "a limit with shared = true", t.keys.names()...); len(limits) > 0 {
			t.checkNeeds(l.c)
		}
	}
	if len(limits) == 0 {
		return
	}
	s := &l.c.Shared
	if s.Hosts == 0 {
		if len(l.shareds) > 0 {
			l.add(l.shareds[0].at, "[shared] has no hosts: set the maximum number of hosts, such as hosts = 4")
			return
		}
		for _, i := range limits {
			l.limits[i].errorf("shared", "missing [shared] with hosts, the number of hosts that share the limit")
		}
		return
	}
	joint := 0
	for _, i := range limits {
		switch l.c.Limits[i].Adapt {
		case shaper.AdaptObserve:
			l.limits[i].errorf("adapt", "\"observe\" is unsupported with shared = true: add a limit with adapt = \"observe\" that is not shared")
		case shaper.AdaptOn:
			if joint++; len(s.Store) == 0 {
				l.limits[i].errorf("adapt", "needs a store in [shared], through which hosts exchange their measurements")
			} else if joint > maxJoint {
				l.limits[i].errorf("adapt", "hosts share more than %d adaptive limits", maxJoint)
			}
		}
		most, where := l.c.Limits[i].MaxConnections, "at attachments"
		if !l.c.Limits[i].InPacketPlane() {
			where = "without a store"
		}
		if (l.c.Limits[i].InPacketPlane() || len(s.Store) == 0) && most > 0 && most < s.Hosts {
			l.limits[i].errorf("max_connections", "must be at least hosts = %d, not %d: %s each host has an equal part", s.Hosts, most, where)
		}
		if c := &l.c.Limits[i]; len(s.Store) > 0 && c.MaxQueue == 0 && c.NeedsTickets(s.Hosts, s.Lease) {
			l.limits[i].errorf("max_queue", "must be at least 1: at this rate hosts take turns, and a connection waits for the turn of its host; to refuse at once, set queue_timeout = \"0s\"")
		}
	}
	bad := func(key, format string, args ...any) {
		l.add(l.set["[shared]"+key], key+": "+fmt.Sprintf(format, args...))
	}
	if s.Interval > s.Lease/3 {
		bad("interval", "%s is more than a third of lease, %s", FormatDuration(s.Interval), FormatDuration(s.Lease))
	}
	switch {
	case s.embedded() && slices.ContainsFunc(s.Store, func(url string) bool { return !strings.HasPrefix(url, "shaperd:") }):
		bad("store", "hosts with serve and Redis are two ledgers: use one")
	case !s.embedded() && len(s.Store) > 1:
		bad("store", "several Redis are several ledgers: use one, or list its nodes in one URL, \"redis+sentinel://\" or \"redis+cluster://\"")
	}
	for key, needed := range map[string]bool{"store": s.embedded(), "serve": s.Serve != ""} {
		if needed && (s.CAFile == "" || s.CertFile == "" || s.KeyFile == "") {
			bad(key, "needs ca_file, cert_file and key_file, with which hosts authenticate each other")
		}
	}
	for _, own := range l.c.OwnPorts() {
		if own.At == s.Serve && own.Key != "[shared] serve" && own.Addr.Port() != 0 {
			bad("serve", "%s is also the address of %s: must be different", quote(own.At), own.Key)
		}
	}
}
