package config

import (
	"fmt"
	"strings"
	"time"
)

var sharedKeys = keys{
	{
		name: "hosts", typ: integerType(1, 1000), defText: "required",
		field: fieldOf(func(c *Config) *int { return &c.Shared.Hosts }),
		doc: "Maximum number of hosts in the group. 1/`hosts` of each limit is reserved for each host. A host gets more only " +
			"from the unused parts of the other hosts.",
	},
	{
		name: "name", typ: labelType("gw1"), defText: "the host name", needs: []condition{withLedger}, perHost: true,
		field: fieldOf(func(c *Config) *string { return &c.Shared.Name }),
		doc:   "Name of this host, unique in its group.",
	},
	{
		name: "group", typ: labelType("default"), def: `"default"`, needs: []condition{withLedger},
		field: fieldOf(func(c *Config) *string { return &c.Shared.Group }),
		doc:   "Name of the group. Several groups can use the same ledger.",
	},
	{
		name: "store", typ: arrayType(`URL such as "rediss://10.0.0.9:6379"`, stringType("URL", "rediss://10.0.0.9:6379", storePattern), parseStore, asIs), def: "[]", perHost: true,
		field:    fieldOf(func(c *Config) *[]string { return &c.Shared.Store }),
		omitZero: true,
		doc: "The ledger, which gives the hosts their parts of the limits: one Redis or Valkey, or the hosts that serve a " +
			"ledger, each as `\"shaperd://host:port\"`. The URL of a Redis is `\"redis://host:port\"`, `\"unix:///path\"`, " +
			"`\"redis+sentinel://host:port,host:port/master\"` or `\"redis+cluster://host:port,host:port\"`; `rediss` " +
			"instead of `redis` uses TLS. Without a ledger each host has 1/`hosts`.",
	},
	{
		name: "username", typ: textType("name", "shaperd", `^[^ ]+$`, parseUsername), defText: "the default user", needs: []condition{atRedis}, perHost: true,
		field: fieldOf(func(c *Config) *string { return &c.Shared.Username }),
		doc:   "User name for Redis.",
	},
	{
		name: "password_file", typ: fileType("/etc/shaperd/redis.pass"), defText: "none", needs: []condition{atRedis}, perHost: true,
		field: fieldOf(func(c *Config) *string { return &c.Shared.PasswordFile }),
		doc:   "File with the password for Redis.",
	},
	{
		name: "ca_file", typ: fileType("/etc/shaperd/ca.pem"), defText: "the CA certificates of the system", needs: []condition{overTLS}, perHost: true,
		field: fieldOf(func(c *Config) *string { return &c.Shared.CAFile }),
		doc: "CA certificates (PEM) that verify the certificate of the ledger and, with `serve`, the certificates of the " +
			"other hosts.",
	},
	{
		name: "cert_file", typ: fileType("/etc/shaperd/cert.pem"), defText: "none", needs: []condition{with("key_file", func(s *Shared) string { return s.KeyFile }), overTLS}, perHost: true,
		field: fieldOf(func(c *Config) *string { return &c.Shared.CertFile }),
		doc:   "Certificate (PEM) of this host.",
	},
	{
		name: "key_file", typ: fileType("/etc/shaperd/key.pem"), defText: "none", needs: []condition{with("cert_file", func(s *Shared) string { return s.CertFile }), overTLS}, perHost: true,
		field: fieldOf(func(c *Config) *string { return &c.Shared.KeyFile }),
		doc:   "Private key (PEM) of the certificate.",
	},
	{
		name: "prefix", typ: labelType("shaperd"), def: `"shaperd"`, needs: []condition{atRedis},
		field: fieldOf(func(c *Config) *string { return &c.Shared.Prefix }),
		doc: "Prefix of the keys in Redis. The keys of group `default` are `{shaperd:default}` and a suffix, and all are in " +
			"one hash slot.",
	},
	{
		name: "lease", typ: durationType(300*time.Millisecond, 30*time.Second), def: `"1s"`, needs: []condition{withLedger},
		field: fieldOf(func(c *Config) *time.Duration { return &c.Shared.Lease }),
		doc:   "Time for which a host may use its parts without an answer of the ledger.",
	},
	{
		name: "interval", typ: durationType(20*time.Millisecond, 10*time.Second), def: `"100ms"`, needs: []condition{withLedger}, perHost: true,
		field: fieldOf(func(c *Config) *time.Duration { return &c.Shared.Interval }),
		doc:   "Interval between calls to the ledger; at most a third of `lease`.",
	},
	{
		name: "alone", typ: enumType(AloneShare, AloneClosed, AloneOpen), def: `"share"`, needs: []condition{withLedger}, perHost: true,
		field: fieldOf(func(c *Config) *Alone { return &c.Shared.Alone }),
		doc: "Part of each limit that a host uses while no ledger answers: 1/`hosts` (`\"share\"`), nothing (`\"closed\"`), " +
			"or the whole limit (`\"open\"`). With `\"open\"`, all hosts together may exceed the limit.",
	},
	{
		name: "failover", typ: enumType(FailoverFast, FailoverStrict), def: `"fast"`, needs: []condition{withLedger},
		field: fieldOf(func(c *Config) *Failover { return &c.Shared.Failover }),
		doc: "Behavior of the hosts when another ledger answers. With `\"fast\"` they continue with their parts; if the " +
			"previous ledger still answers other hosts, all hosts together may exceed a limit for a moment. With " +
			"`\"strict\"` they wait until the leases of the previous ledger have ended.",
	},
	{
		name: "serve", typ: endpointType("10.0.0.1:9466"), def: `""`, needs: []condition{servingLedger}, perHost: true,
		field:    fieldOf(func(c *Config) *string { return &c.Shared.Serve }),
		omitZero: true,
		doc: "Address at which this host serves the ledger over TLS, to hosts whose certificate is signed by `ca_file`. A " +
			"host that serves a ledger lists its own address in `store` as well.",
	},
}

// labelType is the type of names in [shared].
func labelType(example string) valueType {
	v := nameType
	v.example, v.parse = example, textType(v.desc, example, v.pattern, parseLabel).parse
	return v
}

// fileType is the type of a file in [shared].
func fileType(example string) valueType {
	return textType("path, or name of a credential", example, "", func(s string, _ any) (any, error) { return notEmpty(s) })
}

func parseUsername(s string, _ any) (any, error) {
	if s == "" || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return nil, fmt.Errorf("%s is not a valid user name", quote(s))
	}
	return s, nil
}

// Conditions of keys of [shared], by the values of all files.
var (
	withLedger = sharedNeeds("`store`", func(s *Shared) bool { return len(s.Store) > 0 })
	atRedis    = sharedNeeds("a Redis in `store`", func(s *Shared) bool { return len(s.Store) > 0 && !s.embedded() })
	// "" is the default, and no mistake without a ledger.
	servingLedger = needs("`store`", "", func(c *Config, _ isSet) bool { return len(c.Shared.Store) > 0 || c.Shared.Serve == "" })
	overTLS       = needs("a ledger over TLS", `has no effect without a ledger over TLS, such as "rediss://10.0.0.9:6379"`, func(c *Config, _ isSet) bool {
		s := &c.Shared
		return s.uses("rediss") || s.embedded() || s.Serve != ""
	})
)

// with is the condition that another key is set.
func with(key string, get func(*Shared) string) condition {
	return sharedNeeds("`"+key+"`", func(s *Shared) bool { return get(s) != "" })
}

func sharedNeeds(doc string, met func(*Shared) bool) condition {
	return needs(doc, "", func(c *Config, _ isSet) bool { return met(&c.Shared) })
}
