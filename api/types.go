package api

import "time"

// Status is the state of the daemon: GET /v1/status.
type Status struct {
	Version string `json:"version"`
	PID     int    `json:"pid"`
	Config  string `json:"config"`
	// Hash of the configuration in its canonical form, without overrides of operators and the contents of files that it names.
	Revision string    `json:"revision"`
	Started  time.Time `json:"started"`
	Now      time.Time `json:"now"`

	State         string    `json:"state"` // "running", "stopping"
	Mode          string    `json:"mode"`  // "enforce", "observe": as configured
	Bypass        *Bypass   `json:"bypass,omitempty"`
	Conformance   string    `json:"conformance"`              // "conformant", "violated": over the last minute
	RolledBack    *Revision `json:"rolled_back,omitempty"`    // the configuration to which an operator has gone back: its files are others
	SourceErrors  []string  `json:"source_errors,omitempty"`  // mistakes in files of groups or with values as they are now: what was read before is effective
	ScheduleError string    `json:"schedule_error,omitempty"` // why the values of a schedule could not be applied: those before are effective
	QuotaError    string    `json:"quota_error,omitempty"`    // why the file of quotas cannot be written: what has not been claimed yet waits
	StateError    string    `json:"state_error,omitempty"`    // why runtime changes could not be saved: a restart loses them, or restores outdated ones

	EndpointErrors []string     `json:"endpoint_errors,omitempty"` // why the metrics or the dashboard are not served
	Reload         ReloadStatus `json:"reload"`
	Shared         *Shared      `json:"shared,omitempty"` // unless no limits are shared
	Overrides      []Override   `json:"overrides"`
	Blocks         []Block      `json:"blocks"` // the first 100; GET /v1/blocks returns all
	BlocksTotal    int          `json:"blocks_total"`

	Penalized        int64 `json:"penalized"`          // sources that penalties block: see GET /v1/penalties
	WouldBePenalized int64 `json:"would_be_penalized"` // sources that penalties would block that observe

	Listeners   []ListenerStatus   `json:"listeners"`
	Attachments []AttachmentStatus `json:"attachments"`
	Buckets     []TableStatus      `json:"buckets"`
	Process     Process            `json:"process"`
}

// Health is whether the daemon can take traffic: GET /v1/health, which never waits for it.
type Health struct {
	State  string `json:"state"` // "ready", "starting", "stopping", "silent", "not attached"
	Detail string `json:"detail,omitempty"`
}

// States of a Health.
const (
	Ready       = "ready"
	Starting    = "starting"
	Stopping    = "stopping"
	Silent      = "silent"       // a loop of the daemon does not answer
	NotAttached = "not attached" // limits of an attachment are not enforced
)

func (h Health) String() string {
	if h.Detail == "" {
		return h.State
	}
	return h.State + ": " + h.Detail
}

// Bypass is the kill switch while it is on: every limit observes.
type Bypass struct {
	Since time.Time  `json:"since"`
	Until *time.Time `json:"until,omitempty"` // end; without it, until it is turned off
}

// ReloadStatus is the result of the last reload, or of the first load.
type ReloadStatus struct {
	OK       bool      `json:"ok"`
	At       time.Time `json:"at"`     // time of that reload
	Loaded   time.Time `json:"loaded"` // when the effective configuration was loaded
	Duration float64   `json:"duration_seconds"`
	Errors   []string  `json:"errors"` // one per mistake, with file, line and column

	// Runtime overrides that the reload ended, or that no longer fit the configuration.
	DroppedOverrides []string `json:"dropped_overrides,omitempty"`
}

// Revision is a configuration that is kept.
type Revision struct {
	Revision  string    `json:"revision"`
	At        time.Time `json:"at"` // when it became effective
	Effective bool      `json:"effective"`
}

// Configuration is the configuration in effect, as its files were read.
type Configuration struct {
	Revision string       `json:"revision"`
	Files    []ConfigFile `json:"files"` // the main file first
}

// ConfigFile is a file of a configuration.
type ConfigFile struct {
	Path string `json:"path"`
	Text string `json:"text"`
}

// Override is a set of values that an operator changed in a limit at runtime.
type Override struct {
	Limit       string            `json:"limit"`
	Source      string            `json:"source,omitempty"` // prefix of the sources whose buckets alone have these values; without it all
	Set         map[string]string `json:"set"`              // values by configuration key
	Since       time.Time         `json:"since"`
	Until       *time.Time        `json:"until,omitempty"`        // end; without it, until it is removed
	UntilReload bool              `json:"until_reload,omitempty"` // ends with the next reload or restart
}

// Scheduled is an override that holds at some times.
type Scheduled struct {
	When    []string          `json:"when"` // as in the configuration: "Mon-Fri 08:00-18:00 Europe/Berlin"
	Set     map[string]string `json:"set"`  // values by configuration key
	Holds   bool              `json:"holds"`
	Changes *time.Time        `json:"changes,omitempty"` // when it holds next, or holds no longer; without it, never
}

// Block is a source prefix from which nothing passes.
type Block struct {
	Prefix string     `json:"prefix"`
	Since  time.Time  `json:"since"`
	Until  *time.Time `json:"until,omitempty"` // end; without it, until it is removed
}

// Penalty is a source that a limit has refused often, and that is blocked for it: GET /v1/penalties.
type Penalty struct {
	Source string    `json:"source"` // prefix
	Limit  string    `json:"limit"`
	Mode   string    `json:"mode"`   // "enforce"; "observe": the penalty or its limit observes, and blocks nobody
	Active bool      `json:"active"` // the source is blocked, or would be; else it was, and is remembered
	Since  time.Time `json:"since"`
	Until  time.Time `json:"until"`
	Times  int       `json:"times"` // how often the source was blocked in a row
}

// LimitPenalty is the penalty of a limit.
type LimitPenalty struct {
	Mode        string `json:"mode"` // "enforce", "observe": as of the limit, if that observes
	Blocked     int64  `json:"blocked"`
	WouldBlock  int64  `json:"would_block"`   // by a penalty that observes
	Imposed     uint64 `json:"imposed_total"` // blocks
	WouldImpose uint64 `json:"would_impose_total"`
}

// ListenerStatus is the state and the counters of a listener.
type ListenerStatus struct {
	Name                  string             `json:"name"`
	Addresses             []string           `json:"addresses"`
	Connections           int64              `json:"connections"` // open TCP connections
	Flows                 int64              `json:"flows"`       // open UDP flows
	MaxFlows              int64              `json:"max_flows"`   // maximum of UDP flows; 0 without a UDP address
	ToDownstream          uint64             `json:"to_downstream_bytes"`
	FromDownstream        uint64             `json:"from_downstream_bytes"`
	ToDownstreamRate      float64            `json:"to_downstream_rate"` // bytes/s over 10 s
	FromDownstreamRate    float64            `json:"from_downstream_rate"`
	Accepted              uint64             `json:"accepted"`
	Ended                 map[string]uint64  `json:"ended"`              // TCP connections, by reason
	FlowsRefused          uint64             `json:"flows_refused"`      // datagrams dropped because their flow could not be opened
	FlowsRefusedRate      float64            `json:"flows_refused_rate"` // per second, over 10 s
	RepliesSuppressed     uint64             `json:"replies_suppressed"` // UDP replies that would have amplified traffic to an unverified source
	RepliesSuppressedRate float64            `json:"replies_suppressed_rate"`
	DialErrors            uint64             `json:"dial_errors"`
	Unavailable           string             `json:"unavailable,omitempty"` // why no downstream is available
	Loop                  int                `json:"loop"`                  // number of the thread that moves its bytes, from 1
	Waiting               int                `json:"waiting"`               // connections and flows that wait for a downstream
	Hold                  *Hold              `json:"hold,omitempty"`        // why new ones wait although downstreams have room
	Downstreams           []DownstreamStatus `json:"downstreams"`
}

// Hold is why new connections of a listener wait although its downstreams have room.
type Hold struct {
	State      string  `json:"state"`                         // "held" (by an operator), "down" (no downstream can be reached), "ramp" (they are let in, at a rate that grows)
	For        float64 `json:"for_seconds,omitempty"`         // since it is held or down
	Left       float64 `json:"left_seconds,omitempty"`        // until a hold by an operator ends; 0 if it does not end by itself
	Rate       float64 `json:"rate,omitempty"`                // of the ramp, new connections per second
	LastServed float64 `json:"last_served_seconds,omitempty"` // until the last one that waits now will have passed the ramp; 0 if that is not known
}

// DownstreamStatus is the state of a downstream.
type DownstreamStatus struct {
	Listener       string `json:"listener"`
	Downstream     string `json:"downstream"`
	State          string `json:"state"`           // "up", "failing" (dials or datagrams), "open" (breaker), "down" (checks), "drained"
	Error          string `json:"error,omitempty"` // last error, while it is failing, open or down
	InFlight       int    `json:"in_flight"`
	MaxConnections int    `json:"max_connections"` // 0 is unlimited

	RetryIn float64 `json:"retry_in_seconds,omitempty"` // until a connection may try it, while the breaker is open; 0 if one may now

	// What was measured of it. No time that traffic waits inside shaperd is in it.
	Connect   Delay `json:"connect"`    // handshakes of TCP connections, over the last minute
	FirstByte Delay `json:"first_byte"` // its first byte on each connection, since the last byte before, or the handshake
	Answer    Delay `json:"answer"`     // from the last byte of a request to the first byte of its answer
	RTT       Delay `json:"rtt"`        // smoothed round-trip times of TCP connections that are in use, once a second each

	TurnsRate          float64 `json:"turns_rate"`           // requests answered per second, over 10 s
	ToDownstreamRate   float64 `json:"to_downstream_rate"`   // bytes/s, over 10 s
	FromDownstreamRate float64 `json:"from_downstream_rate"` // bytes/s, over 10 s
	ReceiverLimited    float64 `json:"receiver_limited"`     // part of the time in which data was on its way to it that its receive window was full, over 10 s, 0 to 1

	Turns         uint64 `json:"turns"`           // requests answered
	DialsRefused  uint64 `json:"dials_refused"`   // by the downstream
	DialsTimedOut uint64 `json:"dials_timed_out"` // connect_timeout, or the system's
	DialsFailed   uint64 `json:"dials_failed"`    // for other reasons; not those of this host
	Resets        uint64 `json:"resets"`          // connections that it has reset, or that have timed out
	ICMPErrors    uint64 `json:"icmp_errors"`     // of UDP flows
	Retransmits   uint64 `json:"retransmits"`     // segments that TCP has sent to it again
	BreakerOpened uint64 `json:"breaker_opened"`  // how often its breaker has opened
}

// AttachmentStatus is the state of an attachment at one interface, or at none.
type AttachmentStatus struct {
	Name              string       `json:"name"`
	Interface         string       `json:"interface"` // "" while it is at none
	Direction         string       `json:"direction"` // "ingress", "egress"
	Mode              string       `json:"mode"`      // "shape", "police", "observe"
	Up                bool         `json:"up"`        // packets there are limited, or no interface matches
	Error             string       `json:"error,omitempty"`
	UnmatchedPatterns string       `json:"unmatched_patterns,omitempty"` // interface patterns without a match: the attachment is at no interface, and up
	PrecedingPrograms []string     `json:"preceding_programs,omitempty"` // programs and filters that run before the limits
	Queue             *QueueStatus `json:"queue,omitempty"`
}

// QueueStatus is the state of the queue of an interface.
type QueueStatus struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
	Drops   uint64 `json:"drops"`
}

// TableStatus is the state of the bucket table of a plane.
type TableStatus struct {
	Plane             string `json:"plane"` // "proxy", "packet"
	Entries           int    `json:"entries"`
	Capacity          int    `json:"capacity"`
	EvictedDrained    uint64 `json:"evicted_drained"`
	EvictedBacklogged uint64 `json:"evicted_backlogged"`
}

// Process is the resource usage of the daemon.
type Process struct {
	CPU              float64 `json:"cpu_seconds"`
	CPUCores         float64 `json:"cpu_cores"` // CPUs in use, over 10 s
	Memory           uint64  `json:"memory_bytes"`
	Descriptors      int     `json:"descriptors"`
	MaxDescriptors   int     `json:"max_descriptors"`
	WakeupLatencyP99 float64 `json:"wakeup_latency_p99_seconds"` // 99th percentile of the wake-up latency of the pacing thread, since the start
}

// Limit is the configuration, the state and the counters of a limit: GET /v1/limits.
type Limit struct {
	Name     string            `json:"name"`
	Plane    string            `json:"plane"`   // "proxy", "packet"
	Mode     string            `json:"mode"`    // "enforce", "observe": bypass included
	Key      string            `json:"key"`     // "all", "source", "source,port", ...
	Single   bool              `json:"single"`  // it has one bucket
	Summary  string            `json:"summary"` // effective values in words
	Block    bool              `json:"block,omitempty"`
	Override map[string]string `json:"override,omitempty"` // values that operators set, by configuration key
	// The only attachments to which the limit applies, and then to no listeners. An attachment
	// that observes does so whatever the mode of the limit.
	Attachments []string `json:"attachments,omitempty"`
	// File and line of the [[override]] that sets a key, by key.
	FileOverride map[string]string `json:"file_override,omitempty"`
	Scheduled    []Scheduled       `json:"scheduled,omitempty"` // overrides in files that hold at some times
	Direction    string            `json:"direction"`           // "to-downstream", "from-downstream", "both"

	// Effective bounds of each bucket; 0 is unlimited.
	Rate           float64 `json:"rate"` // bytes/s
	Packets        float64 `json:"packets"`
	NewConnections float64 `json:"new_connections"`
	MaxConnections int     `json:"max_connections"`
	MaxDelay       float64 `json:"max_delay_seconds"`
	QueueTimeout   float64 `json:"queue_timeout_seconds"`

	Shared   *LimitShare `json:"shared,omitempty"`   // of the above, what this host may use: hosts share the limit
	SlotFor  string      `json:"slot_for,omitempty"` // "turn" or "transaction" if connections hold slots only then: their number is in admitted_rate, in_flight and waiting
	Adaptive *Adaptive   `json:"adaptive,omitempty"` // the maximum in flight that the downstream bears, if it is looked for
	Shed     *Shed       `json:"shed,omitempty"`     // what a limit with shed refuses now

	Penalty *LimitPenalty `json:"penalty,omitempty"` // of sources that the limit has refused often

	// Traffic that left the buckets of the limit, or would have in mode "observe".
	Bytes          Rates   `json:"bytes_rate"`
	PacketsRate    Rates   `json:"packets_rate"`
	Admitted       Rates   `json:"admitted_rate"` // connections
	BytesTotal     uint64  `json:"bytes_total"`
	PacketsTotal   uint64  `json:"packets_total"`
	AdmittedTotal  uint64  `json:"admitted_total"`
	DelayedShare   float64 `json:"delayed_share"` // of bytes, over 10 s, from 0 to 1
	Throttling     bool    `json:"throttling"`    // connections wait, 5 % of the bytes are delayed, or some are and the p99 of queue_delay is at least 10 ms
	InFlight       int64   `json:"in_flight"`
	Waiting        int64   `json:"waiting"`
	QueueDelay     Delay   `json:"queue_delay"`     // of delayed units, over the last minute
	ConnectionWait Delay   `json:"connection_wait"` // of connections that got a slot, over the last minute

	Refused     map[string]uint64  `json:"refused"`      // datagrams and connections by reason, since the start
	RefusedRate map[string]float64 `json:"refused_rate"` // the same, over 10 s

	Conformance Conformance `json:"conformance"`
}

// Rates is the number of events or bytes per second over the last 1, 10 and 60 s.
type Rates struct {
	S1  float64 `json:"1s"`
	S10 float64 `json:"10s"`
	S60 float64 `json:"60s"`
}

// Delay is a median and a 99th percentile in seconds, estimated from a histogram: see
// shaper.HistogramBounds. Both are 0 if count is 0.
type Delay struct {
	Count uint64  `json:"count"`
	P50   float64 `json:"p50_seconds"`
	P99   float64 `json:"p99_seconds"`
}

// Conformance tells whether the traffic of each bucket stayed within rate x t + allowed.
type Conformance struct {
	Conformant  bool    `json:"conformant"`  // over the last minute
	Sigma       float64 `json:"sigma"`       // bytes: the largest excess over rate x t of any interval, over the last minute
	SigmaMax    float64 `json:"sigma_max"`   // sigma since the start
	Allowed     float64 `json:"allowed"`     // bytes: burst, one unit, and the catch-up after a late wake-up
	Violations  uint64  `json:"violations"`  // units beyond allowed, since the start
	InPackets   bool    `json:"in_packets"`  // sigma and allowed are packets: the limit has no byte rate
	Unmonitored bool    `json:"unmonitored"` // the limit has no rate, or observes
	Sampled     bool    `json:"sampled"`     // one bucket at a time is monitored, not all
}

// Key is a heavy key of a limit: GET /v1/limits/{limit}/keys.
type Key struct {
	Key     string   `json:"key"` // as in "explain": "source 192.0.2.0/24, port 53"
	Source  string   `json:"source,omitempty"`
	ASN     uint32   `json:"asn,omitempty"`
	ASName  string   `json:"as_name,omitempty"`
	Rate    Estimate `json:"rate"`             // bytes/s
	Delayed Estimate `json:"delayed"`          // seconds of delay per second
	Dropped Estimate `json:"dropped"`          // datagrams and connections refused per second
	Bucket  *Bucket  `json:"bucket,omitempty"` // its current state, if it has one
}

// Estimate is a decaying weight that is at most Error too large. Its half-life is 5 s, and a
// minute for drops.
type Estimate struct {
	Value float64 `json:"value"`
	Error float64 `json:"error"`
}

// Bucket is the current state of a bucket.
type Bucket struct {
	BacklogBytes   uint64  `json:"backlog_bytes"` // charged and not yet drained
	BacklogPackets uint64  `json:"backlog_packets"`
	QueuedBytes    uint64  `json:"queued_bytes"`           // payload of the queued datagrams
	Queued         int     `json:"queued"`                 // units in the queue
	NextDeparture  float64 `json:"next_departure_seconds"` // time until the next unit may leave
	NextAdmission  float64 `json:"next_admission_seconds"` // time until a new connection would be admitted
	InFlight       int     `json:"in_flight"`
	Slots          int     `json:"slots,omitempty"` // connections that may be in flight at this host now, if hosts share the limit or it is adaptive
	Waiting        int     `json:"waiting"`
	Quota          *Quota  `json:"quota,omitempty"`
	Reserved       bool    `json:"reserved"` // the free slot, or the next admission, is reserved for a connection that also waits for other limits
}

// Talker is a source, prefix or autonomous system with heavy traffic: GET /v1/talkers.
type Talker struct {
	Name    string   `json:"name"`              // "192.0.2.7", "192.0.2.0/24", "AS64500"
	ASName  string   `json:"as_name,omitempty"` // from the ASN files
	Rate    Estimate `json:"rate"`
	Delayed Estimate `json:"delayed"`
	Dropped Estimate `json:"dropped"`
}

// Connections is a selection of the connections that match: GET /v1/connections.
type Connections struct {
	Total       int          `json:"total"` // all that match
	Connections []Connection `json:"connections"`
}

// Connection is a TCP connection or UDP flow.
type Connection struct {
	ID                uint64  `json:"id"`
	Protocol          string  `json:"protocol"`
	Source            string  `json:"source"` // address and port
	ASN               uint32  `json:"asn,omitempty"`
	ASName            string  `json:"as_name,omitempty"`
	Listener          string  `json:"listener"`
	Port              uint16  `json:"port"` // port of the listener
	Downstream        string  `json:"downstream"`
	Stage             string  `json:"stage"` // "waiting", "proxy_header", "connecting", "open", "closing"
	Age               float64 `json:"age_seconds"`
	Idle              float64 `json:"idle_seconds"`
	ToDownstream      uint64  `json:"to_downstream_bytes"`
	FromDownstream    uint64  `json:"from_downstream_bytes"`
	Waited            float64 `json:"waited_seconds"`      // total time in queues and waiting for slots
	ThrottledBy       string  `json:"throttled_by"`        // limit that it waits for now, or "downstream"
	MostlyThrottledBy string  `json:"mostly_throttled_by"` // limit that it waited for the longest
	Class             string  `json:"class,omitempty"`     // absent without classes
}

// Event is a log record of the daemon at level info or above: GET /v1/events.
type Event struct {
	ID      uint64            `json:"id"`
	Time    time.Time         `json:"time"`
	Level   string            `json:"level"` // "info", "warn", "error"
	Message string            `json:"message"`
	Attrs   map[string]string `json:"attrs,omitempty"`
}

// History is the initial content of the charts: GET /v1/history. Samples are a second apart,
// the newest is the last.
type History struct {
	Times  []time.Time             `json:"times"`
	Limits map[string]LimitHistory `json:"limits"`
}

// LimitHistory has series that are as long as History.Times.
type LimitHistory struct {
	Rate     []float64 `json:"rate"`        // bytes/s
	Packets  []float64 `json:"packets"`     // per second
	Admitted []float64 `json:"admitted"`    // connections per second
	P99      []float64 `json:"p99_seconds"` // queue delay over the last minute
	InFlight []int64   `json:"in_flight"`
	Waiting  []int64   `json:"waiting"`
	Refused  []float64 `json:"refused"` // per second, over 10 s
}

// Live is the data of a server-sent event "live", once a second: GET /v1/live.
type Live struct {
	Status  Status              `json:"status"`
	Limits  []Limit             `json:"limits"`
	Quotas  *Quotas             `json:"quotas,omitempty"` // unless no limit has one: the top 10
	Talkers map[string][]Talker `json:"talkers"`          // by "source", "prefix" and "asn": the top 10 by delay, drops and rate
	Events  []Event             `json:"events"`           // since the previous event; at first the last 50
}

// Error is the body of every response that is not a success.
type Error struct {
	Message string `json:"error"`
}
