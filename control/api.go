package control

import "time"

// The types of the API: JSON over the control socket, and its GET half over the page's
// port. Rates are per second, times in seconds, and points in time RFC 3339. Arrays are
// never null.
//
// openapi.json is made of them and of their comments, by "go test -run OpenAPI -update". A
// comment that begins with words in quotes has all that a field can be. What is not
// omitted when it is empty is always there, in requests too.

// Status is how the daemon is doing: GET /v1/status.
type Status struct {
	Version string    `json:"version"`
	PID     int       `json:"pid"`
	Config  string    `json:"config"`
	Started time.Time `json:"started"`
	Now     time.Time `json:"now"`

	State   string  `json:"state"` // "running", "draining"
	Mode    string  `json:"mode"`  // "enforce", "observe": of the configuration
	Bypass  *Bypass `json:"bypass,omitempty"`
	Promise string  `json:"promise"`           // "kept", "broken" in the last minute
	Unsaved string  `json:"unsaved,omitempty"` // why a restart would forget, or bring back, what operators ordered

	Unshown     []string     `json:"unshown,omitempty"` // why metrics, or the page, cannot be reached
	Reload      ReloadStatus `json:"reload"`
	Overrides   []Override   `json:"overrides"`
	Blocks      []Block      `json:"blocks"` // the first 100; GET /v1/blocks has all
	BlocksTotal int          `json:"blocks_total"`

	Listeners   []ListenerStatus   `json:"listeners"`
	Attachments []AttachmentStatus `json:"attachments"`
	Buckets     []TableStatus      `json:"buckets"`
	Process     Process            `json:"process"`
}

// Bypass says that the kill switch is on: every limit observes.
type Bypass struct {
	Since time.Time  `json:"since"`
	Until *time.Time `json:"until,omitempty"` // until somebody turns it off, without
}

// ReloadStatus is the result of the last reload, or of the start.
type ReloadStatus struct {
	OK     bool      `json:"ok"`
	At     time.Time `json:"at"`
	Loaded time.Time `json:"loaded"` // when what is in force was
	Took   float64   `json:"took"`
	Errors []string  `json:"errors"` // one a mistake, with file, line and column
	// What operators had set and a reload ended, as it was until then, or does not go with
	// the configuration any more.
	Dropped []string `json:"dropped,omitempty"`
}

// Override is what was set in a limit since the configuration was loaded.
type Override struct {
	Limit string            `json:"limit"`
	Set   map[string]string `json:"set"` // by key, as in the configuration
	Since time.Time         `json:"since"`
	Until *time.Time        `json:"until,omitempty"` // until it is taken back, without
	// Until the next reload; a restart ends it too.
	UntilReload bool `json:"until_reload,omitempty"`
}

// Block is a source prefix from which nothing passes.
type Block struct {
	Prefix string     `json:"prefix"`
	Since  time.Time  `json:"since"`
	Until  *time.Time `json:"until,omitempty"` // until it is taken away, without
}

// ListenerStatus is what a listener has done.
type ListenerStatus struct {
	Name                string             `json:"name"`
	Addresses           []string           `json:"addresses"`
	Open                int64              `json:"open"`      // TCP connections
	Flows               int64              `json:"flows"`     // of UDP
	MaxFlows            int64              `json:"max_flows"` // that it may have; 0 without a UDP address
	ToDownstream        uint64             `json:"to_downstream_bytes"`
	FromDownstream      uint64             `json:"from_downstream_bytes"`
	ToDownstreamRate    float64            `json:"to_downstream_rate"` // bytes/s over 10 s
	FromDownstreamRate  float64            `json:"from_downstream_rate"`
	Accepted            uint64             `json:"accepted"`
	Ended               map[string]uint64  `json:"ended"`              // connections, by how
	FlowsRefused        uint64             `json:"flows_refused"`      // datagrams for whose flow there was no room
	FlowsRefusedRate    float64            `json:"flows_refused_rate"` // a second, over 10 s
	AnswersWithheld     uint64             `json:"answers_withheld"`   // beyond amplification
	AnswersWithheldRate float64            `json:"answers_withheld_rate"`
	DialErrors          uint64             `json:"dial_errors"`
	Unserved            string             `json:"unserved,omitempty"` // why nobody is served: no downstream is up
	Downstreams         []DownstreamStatus `json:"downstreams"`
}

// DownstreamStatus is how a downstream is doing.
type DownstreamStatus struct {
	Listener   string `json:"listener"`
	Downstream string `json:"downstream"`
	State      string `json:"state"`           // "up", "failing" (dials or datagrams), "down" (checks), "drained"
	Error      string `json:"error,omitempty"` // the last one, while it is failing or down
	InFlight   int    `json:"in_flight"`
	Most       int    `json:"most"` // connections it may have; 0 is no bound
}

// AttachmentStatus is an attachment at an interface, or at none.
type AttachmentStatus struct {
	Name      string       `json:"name"`
	Interface string       `json:"interface"` // "" while there is none
	Direction string       `json:"direction"` // "ingress", "egress"
	Mode      string       `json:"mode"`      // "shape", "police", "observe"
	Up        bool         `json:"up"`        // packets there meet the limits, or there are none
	Error     string       `json:"error,omitempty"`
	Waits     string       `json:"waits,omitempty"`  // patterns that no interface matches: it is at none, and up
	Before    []string     `json:"before,omitempty"` // programs and filters that packets meet before the limits
	Queue     *QueueStatus `json:"queue,omitempty"`
}

// QueueStatus is the queue of an interface.
type QueueStatus struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
	Drops   uint64 `json:"drops"`
}

// TableStatus is a table of buckets.
type TableStatus struct {
	Plane           string `json:"plane"` // "proxy", "packet"
	Entries         int    `json:"entries"`
	Capacity        int    `json:"capacity"`
	EvictedDrained  uint64 `json:"evicted_drained"`
	EvictedIndebted uint64 `json:"evicted_indebted"`
}

// Process is what the daemon takes of the host.
type Process struct {
	CPU            float64 `json:"cpu_seconds"`
	CPURate        float64 `json:"cpu"` // processors in use, over 10 s
	Memory         uint64  `json:"memory_bytes"`
	Descriptors    int     `json:"descriptors"`
	MaxDescriptors int     `json:"max_descriptors"`
	LateP99        float64 `json:"late_p99"` // of the pacing thread, since the start
}

// Limit is what a limit holds traffic to, and how it is doing: GET /v1/limits.
type Limit struct {
	Name     string            `json:"name"`
	Plane    string            `json:"plane"` // "proxy", "packet"
	Mode     string            `json:"mode"`  // "enforce", "observe"; bypass included
	Key      string            `json:"key"`   // "all", "source", "source,port", ...
	Single   bool              `json:"single"`
	HeldTo   string            `json:"held_to"` // in words
	Block    bool              `json:"block,omitempty"`
	Override map[string]string `json:"override,omitempty"` // what was set, by key
	// Attachments that it is of; no others, and no listeners, are under it then. One that
	// observes does so whatever the mode.
	Attachments []string `json:"attachments,omitempty"`
	// Which file and line overrides the limit, by key.
	FileOverride map[string]string `json:"file_override,omitempty"`
	Direction    string            `json:"direction"` // "to-downstream", "from-downstream", "both"

	// What each bucket is held to; 0 is to nothing. Single says that there is one.
	Rate           float64 `json:"rate"` // bytes/s
	Packets        float64 `json:"packets"`
	NewConnections float64 `json:"new_connections"`
	Connections    int     `json:"connections"`
	MaxDelay       float64 `json:"max_delay"`
	MaxWait        float64 `json:"max_wait"`

	// What left all its buckets, or would have in mode "observe".
	Bytes          Rates   `json:"bytes_rate"`
	PacketsRate    Rates   `json:"packets_rate"`
	Admitted       Rates   `json:"admitted_rate"` // connections
	BytesTotal     uint64  `json:"bytes_total"`
	PacketsTotal   uint64  `json:"packets_total"`
	AdmittedTotal  uint64  `json:"admitted_total"`
	DelayedShare   float64 `json:"delayed_share"` // of bytes, over 10 s, from 0 to 1
	Slows          bool    `json:"slows"`         // noticeably: 5 % of the bytes are delayed, or 1 of 100 of those by 10 ms, or connections wait
	InFlight       int64   `json:"in_flight"`
	Waiting        int64   `json:"waiting"`
	QueueDelay     Delay   `json:"queue_delay"`     // of what was delayed, in the last minute
	ConnectionWait Delay   `json:"connection_wait"` // of who got a slot, in the last minute

	Refused     map[string]uint64  `json:"refused"`      // datagrams and connections by reason, since the start
	RefusedRate map[string]float64 `json:"refused_rate"` // the same, over 10 s

	Promise Promise `json:"promise"`
}

// Rates is events or bytes a second over the last 1, 10 and 60 s.
type Rates struct {
	S1  float64 `json:"1s"`
	S10 float64 `json:"10s"`
	S60 float64 `json:"60s"`
}

// Delay is a median and a 99th percentile in seconds, from classes: see
// shaper.HistogramBounds. Both are 0 when there was none.
type Delay struct {
	Count uint64  `json:"count"`
	P50   float64 `json:"p50"`
	P99   float64 `json:"p99"`
}

// Promise is whether what left each bucket has kept to rate x t + what is allowed.
type Promise struct {
	Kept       bool    `json:"kept"`       // in the last minute
	Sigma      float64 `json:"sigma"`      // bytes: the largest excess over rate x t in any interval, in the last minute
	SigmaMost  float64 `json:"sigma_most"` // the same, since the start
	Allowed    float64 `json:"allowed"`    // bytes: burst, one unit, what a late wake-up gives back
	Violations uint64  `json:"violations"` // units that left beyond it, since the start
	InPackets  bool    `json:"in_packets"` // sigma and allowed are packets: the limit has no rate of bytes
	Unwatched  bool    `json:"unwatched"`  // it paces nothing, or only observes
	Sampled    bool    `json:"sampled"`    // one bucket at a time is watched, not all
}

// Key is a bucket of a limit that is heavy: GET /v1/limits/{limit}/keys.
type Key struct {
	Key     string  `json:"key"` // as "explain" writes it: "source 192.0.2.0/24, port 53"
	Source  string  `json:"source,omitempty"`
	ASN     uint32  `json:"asn,omitempty"`
	ASName  string  `json:"as_name,omitempty"`
	Rate    Heavy   `json:"rate"`             // bytes/s
	Delayed Heavy   `json:"delayed"`          // seconds waited each second
	Dropped Heavy   `json:"dropped"`          // datagrams and connections refused each second
	Bucket  *Bucket `json:"bucket,omitempty"` // its state now, where it has one
}

// Heavy is a weight that is at most Error too large. What was 5 s ago counts half, of what
// was dropped what was a minute ago.
type Heavy struct {
	Value float64 `json:"value"`
	Error float64 `json:"error"`
}

// Bucket is the state of a bucket now.
type Bucket struct {
	BacklogBytes   uint64  `json:"backlog_bytes"` // charged and not drained
	BacklogPackets uint64  `json:"backlog_packets"`
	QueuedBytes    uint64  `json:"queued_bytes"` // of datagrams in its queue
	Queued         int     `json:"queued"`       // units in it
	NextIn         float64 `json:"next_in"`      // when the next unit may leave, seconds from now
	NewIn          float64 `json:"new_in"`       // when a new connection would have its turn, seconds from now
	InFlight       int     `json:"in_flight"`
	Waiting        int     `json:"waiting"`
	Reserved       bool    `json:"reserved"` // the slot or the turn that is free is for a connection that waits for those of other limits too
}

// Who is a source, prefix or autonomous system that is heavy: GET /v1/who.
type Who struct {
	Name    string `json:"name"`              // "192.0.2.7", "192.0.2.0/24", "AS64500"
	ASName  string `json:"as_name,omitempty"` // where files of ASNs name it
	Rate    Heavy  `json:"rate"`
	Delayed Heavy  `json:"delayed"`
	Dropped Heavy  `json:"dropped"`
}

// Connections is GET /v1/connections: at most as many as were asked for, of all that match.
type Connections struct {
	Total       int          `json:"total"`
	Connections []Connection `json:"connections"`
}

// Connection is a TCP connection or UDP flow.
type Connection struct {
	ID             uint64  `json:"id"`
	Protocol       string  `json:"protocol"`
	Source         string  `json:"source"` // with its port
	ASN            uint32  `json:"asn,omitempty"`
	ASName         string  `json:"as_name,omitempty"`
	Listener       string  `json:"listener"`
	Port           uint16  `json:"port"` // that it asked for
	Downstream     string  `json:"downstream"`
	Stage          string  `json:"stage"` // "waiting", "announcing", "connecting", "open", "ending"
	Age            float64 `json:"age"`
	Idle           float64 `json:"idle"`
	ToDownstream   uint64  `json:"to_downstream_bytes"`
	FromDownstream uint64  `json:"from_downstream_bytes"`
	Waited         float64 `json:"waited"`    // in queues and for slots, all together
	HeldBy         string  `json:"held_by"`   // the limit it waits for now, or "downstream"
	HeldMost       string  `json:"held_most"` // the limit it has waited for longest
}

// Explanation is GET /v1/explain: what a connection, or a packet, would meet now.
type Explanation struct {
	Source      string       `json:"source"`
	To          string       `json:"to"`
	Listener    string       `json:"listener,omitempty"`
	Attachment  string       `json:"attachment,omitempty"`
	ASN         uint32       `json:"asn,omitempty"`
	ASName      string       `json:"as_name,omitempty"`
	Limits      []BucketOf   `json:"limits"` // in the order of passing them
	BindsFirst  []Binding    `json:"binds_first"`
	Verdict     string       `json:"verdict"` // "pass", "delay", "refuse": what a unit that came now would get
	Reason      string       `json:"reason"`
	By          string       `json:"by,omitempty"`       // the limit
	Unserved    string       `json:"unserved,omitempty"` // why nobody is served there, whatever the limits are
	Flows       *FlowRoom    `json:"flows,omitempty"`    // at a listener's UDP address
	Connections []Connection `json:"connections"`        // of the source, at most 20
}

// FlowRoom is how many UDP flows a source and its listener have, of how many.
type FlowRoom struct {
	OfSource     int    `json:"of_source"`
	MostOfSource int    `json:"most_of_source"` // max_flows_per_source; 0 is no bound
	Open         int    `json:"open"`
	Most         int    `json:"most"`           // max_flows
	Full         string `json:"full,omitempty"` // the key that keeps the source from another one, whatever the limits are
}

// BucketOf is the bucket of a limit that a flow is under.
type BucketOf struct {
	Limit     string  `json:"limit"`
	Key       string  `json:"key"`
	Direction string  `json:"direction"` // "to-downstream", "from-downstream", "both", "ingress", "egress"
	HeldTo    string  `json:"held_to"`   // in words
	Mode      string  `json:"mode"`      // "enforce", "observe"
	Bucket    *Bucket `json:"bucket,omitempty"`
}

// Binding is which limit a source that asks for ever more would meet first.
type Binding struct {
	What  string `json:"what"` // "Bytes to the downstream", ...
	Limit string `json:"limit"`
}

// Event is a line of the daemon's log at level info or above: GET /v1/events.
type Event struct {
	ID      uint64            `json:"id"`
	Time    time.Time         `json:"time"`
	Level   string            `json:"level"` // "info", "warn", "error"
	Message string            `json:"message"`
	Attrs   map[string]string `json:"attrs,omitempty"`
}

// History is what the charts begin with: GET /v1/history. Samples are a second apart,
// the last one is the newest.
type History struct {
	Times  []time.Time             `json:"times"`
	Limits map[string]LimitHistory `json:"limits"`
}

// LimitHistory is as long as History.Times.
type LimitHistory struct {
	Rate     []float64 `json:"rate"`     // bytes/s
	Packets  []float64 `json:"packets"`  // a second
	Admitted []float64 `json:"admitted"` // connections a second
	P99      []float64 `json:"p99"`      // queue delay, of the last minute
	InFlight []int64   `json:"in_flight"`
	Waiting  []int64   `json:"waiting"`
	Refused  []float64 `json:"refused"` // a second, over 10 s
}

// Live is what each server-sent event "live" of GET /v1/live has, once a second.
type Live struct {
	Status Status           `json:"status"`
	Limits []Limit          `json:"limits"`
	Who    map[string][]Who `json:"who"`    // by "source", "prefix" and "asn": the heaviest 10 by delay, drops, rate
	Events []Event          `json:"events"` // new since the last one; at first the last 50
}

// Requests that change something. They want the role "admin".

// SetLimit is the body of PATCH /v1/limits/{limit}. DELETE /v1/limits/{limit}/override
// takes it back.
type SetLimit struct {
	Set map[string]string `json:"set"`           // by key, as in the configuration: {"rate": "20Mbit/s"}
	For float64           `json:"for,omitempty"` // seconds; until it is taken back, without
	// Until the next reload, and not for a time.
	UntilReload bool `json:"until_reload,omitempty"`
}

// SetBlock is the body of POST /v1/blocks. DELETE /v1/blocks?prefix= takes it back.
type SetBlock struct {
	Prefix string  `json:"prefix"`
	For    float64 `json:"for,omitempty"`
}

// SetBypass is the body of PUT /v1/bypass.
type SetBypass struct {
	On  bool    `json:"on"`
	For float64 `json:"for,omitempty"`
}

// SetDownstream is the body of PATCH /v1/downstreams.
type SetDownstream struct {
	Listener   string `json:"listener,omitempty"` // every listener that has it, without
	Downstream string `json:"downstream"`
	Drained    bool   `json:"drained"`
}

// Error is the body of every answer that is not a success.
type Error struct {
	Message string `json:"error"`
}
