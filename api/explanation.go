package api

// Explanation is the result for a hypothetical connection or packet: GET /v1/explain.
type Explanation struct {
	Source      string        `json:"source"`
	To          string        `json:"to"`
	Listener    string        `json:"listener,omitempty"`
	Attachment  string        `json:"attachment,omitempty"`
	ASN         uint32        `json:"asn,omitempty"`
	ASName      string        `json:"as_name,omitempty"`
	Country     string        `json:"country,omitempty"` // of the source, if a limit has to do with countries
	Class       *Class        `json:"class,omitempty"`   // absent at attachments, and without classes
	Limits      []LimitBucket `json:"limits"`            // in the order in which they apply
	Exempt      []string      `json:"exempt,omitempty"`  // limits that would apply if they did not except the source
	Bottlenecks []Bottleneck  `json:"bottlenecks"`
	Verdict     string        `json:"verdict"` // "pass", "delay", "refuse": of a unit that arrives now
	Reason      string        `json:"reason"`
	By          string        `json:"by,omitempty"`          // deciding limit
	Penalties   []Penalty     `json:"penalties,omitempty"`   // that block the source, or would block it, of whatever limits
	Unavailable string        `json:"unavailable,omitempty"` // why no downstream is available, whatever the limits
	Waiting     int           `json:"waiting"`               // connections and flows of the listener that wait for a downstream
	Hold        *Hold         `json:"hold,omitempty"`        // why new ones wait, whatever the limits
	Flows       *FlowQuota    `json:"flows,omitempty"`       // only for a UDP address of a listener
	Connections []Connection  `json:"connections"`           // of the source, at most 20
}

// Class is the class of a connection.
type Class struct {
	Name     string `json:"name"`
	Weight   int    `json:"weight"`
	Priority int    `json:"priority"`
}

// FlowQuota is the number of UDP flows of a source and of its listener, and their maxima.
type FlowQuota struct {
	SourceFlows    int    `json:"source_flows"`
	MaxSourceFlows int    `json:"max_source_flows"` // max_flows_per_source; 0 is unlimited
	Flows          int    `json:"flows"`
	MaxFlows       int    `json:"max_flows"`
	Full           string `json:"full,omitempty"` // configuration key that refuses the source another flow, whatever the limits
}

// LimitBucket is the bucket of a limit that applies to a flow.
type LimitBucket struct {
	Limit     string  `json:"limit"`
	Key       string  `json:"key"`
	Direction string  `json:"direction"`            // "to-downstream", "from-downstream", "both", "ingress", "egress"
	Summary   string  `json:"summary"`              // effective values in words
	Mode      string  `json:"mode"`                 // "enforce", "observe"
	OwnValues bool    `json:"own_values,omitempty"` // the summary has values of this source, others than those of the limit
	SlotFor   string  `json:"slot_for,omitempty"`   // see [Limit]
	Shed      float64 `json:"shed,omitempty"`       // part of new connections that the limit refuses now
	Reserved  int     `json:"reserved,omitempty"`   // slots of the bucket that are reserved for the class of the connection

	ReservedRate int     `json:"reserved_rate,omitempty"` // percent of the bucket's rates that are reserved for the class
	Bucket       *Bucket `json:"bucket,omitempty"`

	Shared *LimitShare `json:"shared,omitempty"` // of the bucket, what this host may use now: hosts share the limit

	Penalty *SourcePenalty `json:"penalty,omitempty"` // how near the source is to the penalty of the limit
}

// SourcePenalty is how near a source is to the penalty of a limit.
type SourcePenalty struct {
	Exempt   bool    `json:"exempt,omitempty"` // the penalty excepts the source
	Refusals uint64  `json:"refusals"`         // of the source in the present period
	After    uint64  `json:"after"`            // so many of them block it
	Left     float64 `json:"left_seconds"`     // until the period ends; 0 if none was refused
}

// Bottleneck is the limit that an ever growing load of one source would hit first.
type Bottleneck struct {
	Resource string `json:"resource"` // "Bytes to the downstream", ...
	Limit    string `json:"limit"`
}
