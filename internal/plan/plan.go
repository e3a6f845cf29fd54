// Package plan loads a configuration with what it refers to, and compiles it: files become listeners,
// attachments and a policy. It knows no traffic and no daemon, so that a configuration is checked as it
// would run. Several goroutines may read a [Plan].
package plan

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"time"

	"shaperd.dev/shaperd/bpf"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/asn"
	"shaperd.dev/shaperd/shaper/config"
)

// Plan is a configuration with everything that it refers to.
type Plan struct {
	Config *config.Config

	files   *config.Files
	old     []string       // paths of saved overrides with keys of an earlier version
	asns    *asn.Table     // nil when the configuration names no files
	data    *Data          // that the configuration names
	blocks  []shaper.Limit // limits that implement the blocks of operators
	observe bool           // all limits of config only observe

	bySource [][]shaper.SourceValues // by limit of the configuration
	revision string
}

// Files returns the paths and texts of the files of the configuration, the main one first.
func (p *Plan) Files() iter.Seq2[string, string] { return p.files.All() }

// Revision is a hash of the configuration in its canonical form, without overrides of operators and without the contents of files that it
// names. Spelling, comments, defaults and the order of keys do not matter.
func (p *Plan) Revision() string { return p.revision }

// revisionOf returns the revision of c, as it was loaded.
func revisionOf(c *config.Config) string {
	text, err := json.Marshal(c.Canonical())
	if err != nil { // no value of a configuration is beyond JSON
		panic(err)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:6])
}

func newPlan(files *config.Files, c *config.Config) *Plan {
	return &Plan{files: files, Config: c, observe: c.Daemon.Observe}
}

// With returns p with some of its overrides with a schedule, which are bits as in [config.Config.ActiveAt], with overrides, the limits of blocks, and, with bypass, with
// limits that only observe. It does not read files again.
func (p *Plan) With(active uint64, overrides []config.Override, blocks []shaper.Limit, bypass bool) (*Plan, error) {
	c, err := p.Config.With(active, overrides...)
	if err != nil {
		return nil, err
	}
	changed := newPlan(p.files, c)
	changed.old, changed.revision = p.old, p.revision
	changed.asns, changed.data, changed.blocks = p.asns, p.data, blocks
	changed.observe = changed.observe || bypass
	return changed, changed.fill()
}

// CheckReload reports what next changes that a running daemon cannot.
func (p *Plan) CheckReload(next *Plan) error {
	was, is := p.Config.Daemon, next.Config.Daemon
	if was.MaxBuckets != is.MaxBuckets {
		return fmt.Errorf("[daemon] max_buckets: changed from %d to %d, which requires a restart", was.MaxBuckets, is.MaxBuckets)
	}
	if was.Loops != is.Loops {
		return fmt.Errorf("[daemon] loops: changed from %s to %s, which requires a restart", loopsText(was.Loops), loopsText(is.Loops))
	}
	for _, key := range []struct{ name, was, is string }{{"metrics", was.Metrics, is.Metrics}, {"dashboard", was.Dashboard, is.Dashboard}, {"pin_path", was.PinPath, is.PinPath}} {
		if key.was != key.is {
			return fmt.Errorf("[daemon] %s: changed from %q to %q, which requires a restart", key.name, key.was, key.is)
		}
	}
	return nil
}

func loopsText(n int) string {
	if n == 0 {
		return "the default"
	}
	return strconv.Itoa(n)
}

// At returns p without overrides of operators, with those of its overrides with a schedule that hold at an instant.
func (p *Plan) At(at time.Time) (*Plan, error) { return p.With(p.Config.ActiveAt(at), nil, nil, false) }

// Compile builds the policy of p for s.
func (p *Plan) Compile(s *shaper.Shaper) (*shaper.Policy, error) {
	policy, err := s.CompileRules(shaper.Rules{
		Limits: p.limits(), Listeners: p.Config.Listen, Attachments: p.Config.Attach, ASNs: p.asns, Observe: p.observe,
		Groups: p.groups(), Classes: p.Config.Classes,
	})
	var at *shaper.LimitError
	if errors.As(err, &at) {
		return nil, p.Config.Error(at.Limit, at.Key, at.Key+": "+at.Msg)
	}
	var atClass *shaper.ClassError
	if errors.As(err, &atClass) {
		return nil, p.Config.ClassError(atClass.Class, atClass.Key, atClass.Key+": "+atClass.Msg)
	}
	if err != nil {
		return nil, err
	}
	return policy, p.checkQueues(policy)
}

// checkSchedules reports mistakes that p has only while some of the overrides with a schedule hold, and that the configuration alone, which
// was checked, does not show: they are about files with sources, or queues.
func (p *Plan) checkSchedules() error {
	return p.Config.EachSchedule(func(limit string, active uint64) error {
		i := slices.IndexFunc(p.Config.Limits, func(l shaper.Limit) bool { return l.Name == limit })
		if l := &p.Config.Limits[i]; l.ValuesFile == "" && len(l.For) == 0 && len(l.Match.Attach) == 0 {
			return nil
		}
		c, err := p.Config.With(active)
		if err != nil {
			return err
		}
		then := newPlan(p.files, c)
		then.data = p.data
		if _, err = then.values(&c.Limits[i]); err != nil {
			return err
		}
		policy, err := shaper.New(1).CompileRules(shaper.Rules{
			Limits: c.Limits[i : i+1], Listeners: c.Listen, Attachments: c.Attach, ASNs: p.asns, Groups: then.groups(), Classes: c.Classes,
		})
		var at *shaper.LimitError
		if errors.As(err, &at) {
			return c.Error(i, at.Key, at.Key+": "+at.Msg)
		}
		if err != nil {
			return err
		}
		return then.checkQueues(policy)
	})
}

// Shapes reports whether any attachment shapes.
func (p *Plan) Shapes() bool {
	return slices.ContainsFunc(p.Config.Attach, func(a shaper.Attachment) bool { return a.Shapes() })
}

// checkQueues returns an error when the queue of an attachment is too small for a limit of policy.
func (p *Plan) checkQueues(policy *shaper.Policy) error {
	for i := range policy.Len() {
		limit := policy.Limit(i)
		if limit.Block {
			continue
		}
		for j := range p.Config.Attach {
			a := &p.Config.Attach[j]
			if !slices.Contains(limit.Match.Attach, a.Name) {
				continue
			}
			if err := bpf.CheckQueue(a, policy.Shape(i)); err != nil {
				at := slices.IndexFunc(p.Config.Limits, func(o shaper.Limit) bool { return o.Name == limit.Name })
				return p.Config.Error(at, "max_delay", "max_delay: "+err.Error())
			}
		}
	}
	return nil
}
