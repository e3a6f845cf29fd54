package api

// Shared is the group of hosts that share limits, as this host knows it: GET /v1/shared.
type Shared struct {
	State    string  `json:"state"` // "none", "static", "joining", "joined", "alone", "leaving"; none without [shared], static without a ledger
	For      float64 `json:"for_seconds"`
	Why      string  `json:"why,omitempty"` // it is not joined
	Group    string  `json:"group"`
	Name     string  `json:"name"`               // of this host
	Hosts    int     `json:"hosts"`              // that may exist
	Alone    string  `json:"alone,omitempty"`    // "share", "closed", "open": what this host uses of each limit while no ledger answers
	Failover string  `json:"failover,omitempty"` // "fast", "strict"; strict: the part of a host that is gone is kept until another one takes its place

	Withdrawn bool `json:"withdrawn"` // alone = "open": this host lets the whole of each limit pass, and all together may exceed it

	// What this host knows from the last answer of the ledger.
	Counted   bool    `json:"counted"`   // the others count on this host
	Live      int     `json:"live"`      // hosts that are counted, and with failover = "fast" those that are gone
	Gone      int     `json:"gone"`      // hosts that have left or were forgotten
	Differing int     `json:"differing"` // hosts with other shared limits
	LeaseAge  float64 `json:"lease_age_seconds"`
	LeaseLeft float64 `json:"lease_left_seconds"`
	Epoch     int64   `json:"epoch"`

	Stores     []string `json:"stores"`                // URLs of the ledger
	StoreError string   `json:"store_error,omitempty"` // of the last call
	Server     string   `json:"server,omitempty"`      // host:port of the server of the ledger that answered last

	Problems    []Problem          `json:"problems"`    // that an operator must know, the worst first
	Differences []SharedDifference `json:"differences"` // between limits here and at other hosts
	Limits      []SharedLimit      `json:"limits"`      // by name
	HotBuckets  int                `json:"hot_buckets"` // of all limits
	Ledger      *Ledger            `json:"ledger,omitempty"`
	LedgerError string             `json:"ledger_error,omitempty"` // why it is not known what the ledger knows
}

// Problem is what an operator must know.
type Problem struct {
	Severity string `json:"severity"` // "critical", "warning"; critical: limits do not hold, or too little passes
	Title    string `json:"title"`
	Text     string `json:"text"`
}

// SharedDifference is a shared limit that is not the same at another host.
type SharedDifference struct {
	Host  string `json:"host"`
	Limit string `json:"limit"` // "[shared]" is the group; "" if it is not known which limits differ
	Here  string `json:"here"`  // values that differ; "" if it is not known which, or the limit is not shared here
	There string `json:"there"`
}

// SharedLimit is a limit that hosts share, and what this host may use of it now.
type SharedLimit struct {
	Limit string `json:"limit"`
	Key   string `json:"key"` // as in Limit

	// Of all hosts together, for each bucket; 0 is unlimited.
	Rate           float64 `json:"rate"` // bytes/s
	Packets        float64 `json:"packets"`
	NewConnections float64 `json:"new_connections"`
	MaxConnections int     `json:"max_connections"`

	HostConnections int            `json:"host_connections"` // of max_connections, those that this host may use now, if no host needs more of the bucket
	ColdShare       float64        `json:"cold_share"`       // of each bucket that no host needs more of
	HotBuckets      int            `json:"hot_buckets"`      // of which a host needs more; at most 1,000 are counted
	Buckets         []SharedBucket `json:"buckets"`          // the only ones, or those of the hot ones of which this host has most, at most 10
}

// SharedBucket is a bucket of a shared limit. Shares are fractions of the whole, from 0 to 1: of the rates, or of
// max_connections.
type SharedBucket struct {
	Name           string         `json:"name"`            // that all hosts have for it
	Key            string         `json:"key"`             // as in Key: "all", "source 192.0.2.0/24"
	NewConnections bool           `json:"new_connections"` // it limits new connections
	Slots          bool           `json:"slots"`           // it limits connections in flight
	Tickets        bool           `json:"tickets"`         // new connections pass in turn with those of other hosts: the share is that of all that take turns
	Hot            bool           `json:"hot"`
	Share          float64        `json:"share"` // that this host may use now
	Want           float64        `json:"want"`  // that it would use; 0 if the bucket is cold
	Short          bool           `json:"short"` // it should get more when others have given it back
	Tight          bool           `json:"tight"` // all hosts together want more than there is
	Holders        []SharedHolder `json:"holders"`
}

// SharedHolder is what the ledger gives a host of a bucket.
type SharedHolder struct {
	Host   string  `json:"host"`
	Share  float64 `json:"share"`
	Want   float64 `json:"want"`
	Weight int64   `json:"weight"` // sources that wait there
}

// Ledger is what the ledger knows of the group.
type Ledger struct {
	Epoch   int64        `json:"epoch"`
	Age     float64      `json:"age_seconds"` // of the epoch
	Settled bool         `json:"settled"`     // it knows of everything that hosts use
	Hosts   []SharedHost `json:"hosts"`       // by name
	Unknown int          `json:"unknown"`     // hosts that may exist and have not called in this epoch
}

// SharedHost is a host of the group.
type SharedHost struct {
	Name      string  `json:"name"`
	State     string  `json:"state"`       // "counted", "joining", "absent", "gone"; a part is kept for one that is absent, and with failover = "strict" for one that is gone
	Age       float64 `json:"age_seconds"` // since its last call; 0 if it is gone
	LeaseLeft float64 `json:"lease_left_seconds"`
	Differs   bool    `json:"differs"` // it has other shared limits than this host
	Version   string  `json:"version,omitempty"`
}

// LimitShare is what this host may use now of each bucket of a limit that hosts share.
type LimitShare struct {
	Share       float64 `json:"share"`       // of its rates, from 0 to 1; with a key, of a bucket that no host needs more of
	Connections int     `json:"connections"` // that may be in flight; with a key, of a bucket that no host needs more of
}
