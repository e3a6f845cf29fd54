// Package sharing has what follows from [shared] in a configuration: the parameters of the protocol, the store of
// the ledger, and what hosts tell each other. It starts no goroutine.
package sharing

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/member"
	"shaperd.dev/shaperd/cluster/peer"
	"shaperd.dev/shaperd/cluster/redis"
	"shaperd.dev/shaperd/shaper/config"
)

// Params returns the parameters of the protocol. Steps of the ledger's clock, and times without
// a call, of up to Step are ignored: half a lease, and more where hosts call rarely. Where several hosts
// serve the ledger, more than one may be alive.
func Params(s *config.Shared) cluster.Params {
	return cluster.Params{
		Hosts: s.Hosts, Lease: cluster.FromDuration(s.Lease), Step: cluster.FromDuration(max(s.Lease/2, 5*s.Interval)),
		Strict: s.Failover == config.FailoverStrict || peer.NeedsStrict(s.Store),
	}
}

// ParamsDifference says how the parameters of the group differ from those of this host.
func ParamsDifference(group, here cluster.Params) string {
	there, own := paramsText(group), paramsText(here)
	if there == own { // a longer interval, of which the group knows what follows from it
		there, own = intervalText(group), intervalText(here)
	}
	there, own = valuesWithout(there, own), valuesWithout(own, there)
	return fmt.Sprintf("the group has %s, and this host %s", strings.ReplaceAll(there, "; ", ", "), strings.ReplaceAll(own, "; ", ", "))
}

// paramsText formats what all hosts of a group must agree on, as in the configuration.
func paramsText(p cluster.Params) string {
	return fmt.Sprintf("hosts = %d; lease = %q; failover = %q", p.Hosts, config.FormatDuration(p.Lease.Duration()), Failover(p))
}

// intervalText formats the interval that p follows from.
func intervalText(p cluster.Params) string {
	interval := p.Step.Duration() / 5
	if p.Step <= p.Lease/2 {
		return fmt.Sprintf("an interval of up to %s", config.FormatDuration(interval))
	}
	return fmt.Sprintf("interval = %q", config.FormatDuration(interval))
}

// Failover returns what hosts with p assume of a ledger that has taken the place of another one.
func Failover(p cluster.Params) config.Failover {
	if p.Strict {
		return config.FailoverStrict
	}
	return config.FailoverFast
}

// StoreErrorText says in words of the operator why a store did not answer. Without TLS, one that has never
// answered may be no Redis, or one with TLS: these are silent.
func StoreErrorText(err string, store []string, answered bool) string {
	text := strings.ReplaceAll(err, context.DeadlineExceeded.Error(), "no answer in time")
	if text != err && !answered && strings.HasPrefix(store[0], "redis") && !strings.HasPrefix(store[0], "rediss") {
		text += " (is it a Redis, and without TLS?)"
	}
	return text
}

// HostName returns the name of this host in its group.
func HostName(s *config.Shared) string {
	if s.Name != "" {
		return s.Name
	}
	name, err := os.Hostname()
	if err != nil || name == "" {
		return "localhost"
	}
	return plainName(name)
}

// plainName replaces what the name of a host in a group may not have.
func plainName(name string) string {
	name = strings.Map(func(r rune) rune {
		if r == '.' || r == '_' || r == '-' || '0' <= r && r <= '9' || 'A' <= r && r <= 'Z' || 'a' <= r && r <= 'z' {
			return r
		}
		return '-'
	}, name)
	return name[:min(len(name), 64)]
}

// OpenStore returns the store of the ledger. local, unless nil, is the server of this process.
func OpenStore(s *config.Shared, local *peer.Server) member.Store {
	files := Files(s)
	if !strings.HasPrefix(s.Store[0], "shaperd://") {
		o := redis.Options{
			URL: s.Store[0], CAFile: files.CA, CertFile: files.Cert, KeyFile: files.Key, Username: s.Username,
			Prefix: s.Prefix, Group: s.Group, ClientName: "shaperd-" + HostName(s),
		}
		if s.PasswordFile != "" {
			o.Password = redis.PasswordFile(Path(s.PasswordFile))
		}
		return redis.New(o)
	}
	var addresses []string
	for _, url := range s.Store {
		if address, ok := strings.CutPrefix(url, "shaperd://"); ok {
			addresses = append(addresses, address)
		}
	}
	return peer.NewClient(peer.ClientOptions{Addresses: addresses, Group: s.Group, Files: files, Local: local, LocalAddress: s.Serve})
}

// Files returns the files for TLS.
func Files(s *config.Shared) peer.Files {
	return peer.Files{CA: Path(s.CAFile), Cert: Path(s.CertFile), Key: Path(s.KeyFile)}
}

// Path returns the path of a file in [shared], which may be the name of a credential.
func Path(file string) string {
	if file == "" || strings.Contains(file, "/") {
		return file
	}
	return filepath.Join(os.Getenv("CREDENTIALS_DIRECTORY"), file)
}
