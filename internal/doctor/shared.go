package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/redis"
	"shaperd.dev/shaperd/internal/sharing"
	"shaperd.dev/shaperd/shaper/config"
)

// ledgerAnswer is what a ledger answers to doctor.
type ledgerAnswer struct {
	shot      cluster.Snapshot
	roundTrip time.Duration // of the fastest of some queries, after the first one
	about     *redis.About  // nil if it is not in Redis
	skew      time.Duration // by which the clock of Redis is ahead of that of this host
}

// Queries of doctor to a ledger.
const (
	ledgerTimeout = 3 * time.Second
	ledgerQueries = 4
)

// askLedger asks the ledger that s names.
func askLedger(ctx context.Context, s *config.Shared) (a ledgerAnswer, err error) {
	ctx, cancel := context.WithTimeout(ctx, ledgerTimeout)
	defer cancel()
	store := sharing.OpenStore(s, nil)
	defer store.Close()
	for i := range ledgerQueries {
		sent := time.Now()
		if a.shot, err = store.Snapshot(ctx, "-"); err != nil { // no bucket has this name
			return a, err
		}
		if took := time.Since(sent); i == 1 || i > 1 && took < a.roundTrip { // the first one connects
			a.roundTrip = took
		}
	}
	if r, is := store.(*redis.Store); is {
		about, err := r.About(ctx)
		if err != nil {
			return a, err
		}
		a.about, a.skew = &about, time.Until(about.Clock)
	}
	return a, nil
}

// sharedFiles checks the files that [shared] names.
func (d *doctor) sharedFiles() (found []Finding) {
	s := &d.plan.Config.Shared
	var paths []string
	for _, secret := range []string{s.PasswordFile, s.KeyFile} {
		if !strings.Contains(secret, "/") { // none, or a credential
			continue
		}
		paths = append(paths, secret)
		if info, err := fs.Stat(d.files, fsPath(secret)); err == nil && info.Mode().Perm()&0o004 != 0 {
			found = append(found, Finding{State: Warn, Text: secret + ": readable by every user, who can then lift the limits", Fix: "chmod o-r " + secret})
		}
	}
	for _, file := range []string{s.CAFile, s.CertFile} {
		if strings.Contains(file, "/") {
			paths = append(paths, file)
		}
	}
	for _, path := range paths {
		if _, err := fs.Stat(d.files, fsPath(path)); errors.Is(err, fs.ErrNotExist) {
			found = append(found, Finding{State: Fail, Text: path + ": does not exist", Fix: "create it, or change [shared]"})
		}
	}
	return append(found, d.checkReadable(paths...)...)
}

// shared checks the group of hosts that share limits: whether the ledger can be reached and is fit for its work, and
// whether hosts agree.
func (d *doctor) shared() []Finding {
	s := &d.plan.Config.Shared
	switch {
	case s.Hosts == 0:
		return oneFinding(Skip, "no limit is shared", "")
	case len(s.Store) == 0:
		return oneFinding(OK, fmt.Sprintf("no ledger: this host, one of %d, always has 1/%[1]d of each limit", s.Hosts), "")
	}
	found := d.sharedFiles()
	if len(found) > 0 && slices.ContainsFunc(found, func(f Finding) bool { return f.State == Fail }) {
		return found
	}
	if d.usesCredentials(s) {
		return append(found, Finding{State: Skip, Text: "only the unit has the credentials for the ledger: \"shaperd shared status\" shows whether it answers"})
	}
	found = append(found, d.ownProblems()...)
	var ok []string
	var unusable []Finding
	for _, url := range s.Store {
		if url == "shaperd://"+s.Serve && !d.running {
			ok = append(ok, "this host serves the ledger when the daemon runs")
			continue
		}
		one := *s
		one.Store = []string{url}
		a, err := d.askLedger(&one)
		if err != nil {
			unusable = append(unusable, Finding{
				State: Warn, Text: fmt.Sprintf("the ledger at %s cannot be used: %s", url, api.Printable(sharing.StoreErrorText(err.Error(), one.Store, false))),
				Fix: "check that it runs, that this host can reach it, and the files and names in [shared]",
			})
			continue
		}
		found = append(found, d.checkLedger(s, url, &a)...)
		ok = append(ok, a.text(url, s.Hosts))
	}
	if len(ok) == 0 {
		for i := range unusable {
			unusable[i].State = Fail
		}
	}
	return orOK(append(found, unusable...), strings.Join(ok, "; "))
}

// text describes a ledger that works.
func (a *ledgerAnswer) text(url string, hosts int) string {
	counted := 0
	for i := range a.shot.Hosts {
		if a.shot.Hosts[i].Counted {
			counted++
		}
	}
	text := fmt.Sprintf("the ledger at %s answers in %s, with %d of %d hosts", url, roughly(a.roundTrip), counted, hosts)
	if a.about == nil {
		return text
	}
	skew := roughly(a.skew.Abs()) + " ahead of"
	if a.skew < 0 {
		skew = roughly(a.skew.Abs()) + " behind"
	}
	return text + fmt.Sprintf("; %s, with a clock %s that of this host, which has no effect", api.Printable(a.about.Name), skew)
}

// usesCredentials reports whether [shared] names credentials that this process does not have.
func (d *doctor) usesCredentials(s *config.Shared) bool {
	return slices.ContainsFunc([]string{s.PasswordFile, s.CAFile, s.CertFile, s.KeyFile}, func(file string) bool {
		if file == "" || strings.Contains(file, "/") {
			return false
		}
		_, err := fs.Stat(d.files, fsPath(sharing.Path(file)))
		return err != nil
	})
}

// ownProblems returns what the running daemon says about its group.
func (d *doctor) ownProblems() (found []Finding) {
	if d.dialErr != nil {
		return nil
	}
	s, err := d.sharedOf(d.socket)
	if err != nil {
		return nil // an earlier version
	}
	for _, p := range s.Problems {
		state := Warn
		if p.Severity == "critical" {
			state = Fail
		}
		found = append(found, Finding{State: state, Text: "the daemon says: " + api.Printable(p.Title) + ": " + api.Printable(p.Text), Fix: "shaperd shared status"})
	}
	return found
}

// checkLedger checks what a ledger answered.
func (d *doctor) checkLedger(s *config.Shared, url string, a *ledgerAnswer) (found []Finding) {
	add := func(state State, fix, format string, args ...any) {
		found = append(found, Finding{State: state, Text: fmt.Sprintf(format, args...), Fix: fix})
	}
	params := sharing.Params(s)
	if timeout := params.Timeout().Duration(); a.roundTrip > timeout {
		add(Fail, "use a ledger that is nearer, or raise lease on all hosts", "%s answers in %s: with lease = %q, a host waits for %s", url, roughly(a.roundTrip), config.FormatDuration(s.Lease), config.FormatDuration(timeout))
	} else if a.roundTrip > timeout/5 {
		add(Warn, "raise lease on all hosts", "%s answers in %s: with lease = %q, a few slow answers put this host out of the group", url, roughly(a.roundTrip), config.FormatDuration(s.Lease))
	}
	if about := a.about; about != nil && about.MaxMemory > 0 && about.Eviction != "noeviction" {
		add(Warn, "redis-cli config set maxmemory-policy noeviction", "%s evicts keys when it has %d bytes (maxmemory-policy %s): hosts then claim their parts again; %d keys were evicted",
			url, about.MaxMemory, api.Printable(about.Eviction), about.Evicted)
	}
	if a.shot.Epoch == 0 {
		return found
	}
	if a.shot.Params != params {
		add(Fail, "make [shared] the same on all hosts, and reload", "%s: %s", url, sharing.ParamsDifference(a.shot.Params, params))
	}
	name, digest := sharing.HostName(s), d.plan.Config.SharedDigest()
	expiry := (2*a.shot.Params.Lease + a.shot.Params.Step).Duration()
	for i := range a.shot.Hosts {
		h := &a.shot.Hosts[i]
		switch age := h.Age.Duration(); {
		case age >= expiry: // absent
		case h.Name == name && !d.running:
			add(Warn, "set another name in [shared] of this host", "a host with the name %s called the ledger %s ago, and no daemon runs here: another host has this name", name, roughly(age))
		case h.Digest != digest && h.Name == name:
			add(Warn, "systemctl reload shaperd", "the shared limits of the daemon differ from the configuration: it was not reloaded")
		case h.Digest != digest:
			for _, difference := range sharing.Differences(h.Name, d.plan.Config.SharedLimits(), sharing.ParseInfo(h.Info)) {
				what := "the limits"
				if difference.Limit == "[shared]" {
					what = "[shared]"
				}
				add(Fail, "make "+what+" the same on all hosts, and reload", "hosts disagree %s", api.Printable(sharing.DifferenceText(difference)))
			}
		}
	}
	return found
}

// roughly formats d with the precision that its reader needs.
func roughly(d time.Duration) string {
	unit := 10 * time.Microsecond
	if d > 10*time.Millisecond {
		unit = time.Millisecond
	}
	return config.FormatDuration(d.Round(unit))
}
