// Package config loads the configuration of the daemon from TOML files.
//
// A mistake is an [Error] with file, line and column; all mistakes of all files
// are reported together. A configuration that loads also compiles, and none of
// its keys is silently without effect.
//
// The functions may be called concurrently. They read the files that they are given
// and nothing else: no clock, no network, no file that a configuration names.
package config

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// MaxLimits is the maximum number of limits of a configuration: those of a policy without
// the two that are reserved for blocks by operators.
const MaxLimits = shaper.MaxLimits - 2

// Names of the limits that implement blocks by operators, at listeners and at attachments.
// They are reserved: no configured limit may have one of them.
const (
	BlockedName        = "blocked-by-operator"
	BlockedPacketsName = BlockedName + "-packets"
)

// Config is a checked configuration.
type Config struct {
	Daemon      Daemon
	Transparent Transparent
	Shared      Shared
	ASN         ASN
	Listen      []shaper.Listener
	Attach      []shaper.Attachment
	Groups      []Group
	Classes     []shaper.TrafficClass // the first one that matches traffic has it
	Limits      []shaper.Limit
	Penalties   []Penalty // those of Limits

	files   []parsedFile // the main one first
	groupAt []*node      // position of each of Groups
	classAt []*node      // position of each of Classes
	limitAt []*node      // position of each of Limits
	asnAt   []*node      // position of each of ASN.Files

	scheduled []Scheduled
	active    uint64 // those that are in effect, as bits

	overridden map[string]map[string]string // position of each override in a file, by limit and key
}

// Daemon has the settings of the whole daemon.
type Daemon struct {
	Observe    bool   // dry run: count what limits would do, and enforce none
	Metrics    string // host:port of the Prometheus endpoint; "" is off
	Dashboard  string // host:port of the dashboard; "" is off
	MaxBuckets int    // capacity of the bucket table, 1024 to 67108864
	Loops      int    // maximum of threads that move bytes, 1 to 256; 0 is as many as the process may use processors
	PinPath    string // absolute path of a directory on a bpffs, for pinned programs and maps
}

// Transparent configures how packets reach the sockets of transparent listeners.
type Transparent struct {
	Rules Rules
	Mark  int // firewall mark of such packets, and number of their routing table: 1 to 2147483647, except 253 to 255
}

// Rules is the owner of the rules that divert packets to transparent listeners.
type Rules uint8

// Owners of the rules.
const (
	RulesInstall Rules = iota // the daemon installs them
	RulesManual
)

func (r Rules) String() string { return [...]string{"install", "manual"}[r] }

// Group is a group of sources, which may have more of them in a file.
type Group struct {
	shaper.Group
	File string // path, which this package does not open; may be ""
}

// ASN names the data that maps addresses to AS numbers.
type ASN struct {
	Files []string // paths, which this package does not open: files need not exist yet
}

// Error returns an error about c.Limits[limit] with the position of a key, such as
// "rate" or "match.listen", or of the limit's header when it has no such key. The
// position of an overridden key is that of the override.
func (c *Config) Error(limit int, key, msg string) *Error { return errorAt(c.limitAt[limit], key, msg) }

// ClassError is [Config.Error] about c.Classes[class].
func (c *Config) ClassError(class int, key, msg string) *Error {
	return errorAt(c.classAt[class], key, msg)
}

func errorAt(n *node, key, msg string) *Error {
	for _, part := range strings.Split(key, ".") {
		n = n.child(part)
	}
	return n.error(msg)
}

// Overridden returns the positions at which files override a limit, by key: "shaperd.toml:3".
// The map must not be modified.
func (c *Config) Overridden(limit string) map[string]string { return c.overridden[limit] }

// NeedsCountries reports whether a limit matches countries, or has one in its key.
func (c *Config) NeedsCountries() bool {
	return slices.ContainsFunc(c.Limits, func(l shaper.Limit) bool { return len(l.Match.Country) > 0 || l.Key&shaper.KeyCountry != 0 })
}

// ASNError returns err, of loading c.ASN.Files, as an error at the position of the
// file that its message begins with.
func (c *Config) ASNError(err error) *Error {
	at := c.asnAt[0]
	for i, path := range c.ASN.Files {
		if strings.HasPrefix(err.Error(), path+":") {
			at = c.asnAt[i]
		}
	}
	return at.error("files: " + err.Error())
}

// SourceFileError returns err, of opening the file of a group or with values, as an error at the position at which c names it.
func (c *Config) SourceFileError(path string, err error) *Error {
	for i, g := range c.Groups {
		if g.File == path {
			return c.groupAt[i].child("file").error("file: " + err.Error())
		}
	}
	for i := range c.Limits {
		if c.Limits[i].ValuesFile == path {
			return c.limitAt[i].child("values").error("values: " + err.Error())
		}
	}
	return &Error{File: path, Line: 1, Column: 1, Msg: err.Error()}
}

// Error is a mistake at a position in a configuration file.
type Error struct {
	File         string
	Line, Column int // from 1; columns count bytes
	Msg          string
}

func (e *Error) Error() string {
	return e.File + ":" + strconv.Itoa(e.Line) + ":" + strconv.Itoa(e.Column) + ": " + e.Msg
}

// Errors has the mistakes of a configuration, in the order of its files, lines
// and columns. It is never empty.
type Errors []*Error

// Error returns the mistakes, one per line.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap returns the mistakes, so that errors.As finds the first *Error.
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, err := range e {
		errs[i] = err
	}
	return errs
}

// report collects mistakes in any order.
type report struct{ mistakes []mistake }

// maxMistakes bounds the time and the output that a hopeless file takes.
const maxMistakes = 50

type mistake struct {
	at  *node
	msg string
}

func (r *report) add(at *node, msg string) {
	if !r.full() && !at.migrated {
		r.mistakes = append(r.mistakes, mistake{at, msg})
	}
}

// full reports whether the maximum number of mistakes is reached.
func (r *report) full() bool { return len(r.mistakes) >= maxMistakes }

// errors returns the mistakes in order as [Errors], or nil.
func (r *report) errors() error {
	if len(r.mistakes) == 0 {
		return nil
	}
	slices.SortStableFunc(r.mistakes, func(a, b mistake) int {
		return cmp.Or(cmp.Compare(a.at.file.order, b.at.file.order), cmp.Compare(a.at.offset, b.at.offset))
	})
	errs := make(Errors, len(r.mistakes))
	for i, m := range r.mistakes {
		errs[i] = m.at.error(m.msg)
	}
	if r.full() {
		last := *errs[len(errs)-1]
		last.Msg = "too many errors: there may be more"
		errs = append(errs, &last)
	}
	return errs
}
