package shaper

import (
	"net/netip"
	"time"
)

// DownstreamStatus is the status of a downstream of a listener.
type DownstreamStatus struct {
	Listen, Downstream string
	Up                 bool // reachable, according to checks, dials and replies
	Down               bool // checks fail
	Drained            bool // drained by an operator
	BreakerOpen        bool
	RetryIn            time.Duration // from now, when the open breaker lets a connection try again; 0 if it may now
	Error              string        // reason if not Up
	InFlight           int           // connections
	MaxConnections     int           // maximum of InFlight; 0 is unlimited
	State              *DownstreamState
}

// ListenerStatus says which connections of a listener wait for a downstream, and why.
type ListenerStatus struct {
	Listen     string
	Loop       int           // number of the thread that moves its bytes, from 1
	Held, Down bool          // held by an operator, or as no downstream can be reached
	HeldFor    time.Duration // so far
	HeldUntil  time.Duration // from now, by an operator; Forever if it does not end by itself
	Waiting    int           // connections
	Rate       float64       // new connections a second of the ramp; 0 without a ramp
	LastServed time.Duration // from now, when the last of them will have passed the ramp; -1 if that is not known
}

// ConnectionStatus is the status of a TCP connection or UDP flow.
type ConnectionStatus struct {
	ID                uint64
	Protocol          Protocol
	Source            netip.AddrPort
	Listen            string
	Port              uint16 // destination port, as the source sees it
	Downstream        string // "" before one is chosen
	Stage             string // "proxy_header", "waiting", "connecting", "open" or "closing"
	Age, Idle         time.Duration
	ToDownstream      uint64        // bytes
	FromDownstream    uint64        // bytes
	Waited            time.Duration // total time in queues and waiting for slots
	ThrottledBy       string        // limit that it is waiting for
	MostlyThrottledBy string        // limit that it has waited for longest
	Class             string        // for the slots that it has or waits for; "" before it needs any

	Connect   time.Duration // until the downstream had accepted it
	FirstByte time.Duration // of the downstream, see [DownstreamState]; 0 before it
	Turns     uint64        // questions that were answered
	Answering time.Duration // that the downstream took for these, up to the first byte of each answer
}

// Addr returns the source address in the form of [Flow.Source].
func (c *ConnectionStatus) Addr() netip.Addr { return c.Source.Addr().Unmap().WithZone("") }

// FlowQuota is the number of UDP flows of a source and of its listener, and their maxima.
// Full is the key that refuses the source another flow, "max_flows_per_source" or
// "max_flows", and "" when neither does: at a maximum, an idle flow is evicted then.
type FlowQuota struct {
	SourceFlows, MaxSourceFlows int // a maximum of 0 is no bound
	Flows, MaxFlows             int
	Full                        string
}

// BucketState is the state of a bucket and of the connections of its key.
type BucketState struct {
	BacklogBytes, BacklogPackets uint64        // charged and not drained
	Queued                       int           // units in the queue
	QueuedBytes                  uint64        // bytes of datagrams in the queue
	NextDeparture                time.Duration // delay of a unit that is enqueued now
	NextAdmission                time.Duration // delay of a new connection by new_connections

	// Of a shared limit, Parts and NewParts are what this host may use of the bucket and of that of
	// new connections. With 0 parts the delay is years.
	Parts, NewParts uint32

	InFlight, Waiting int          // connections
	Slots             int          // of a shared or an adaptive limit: connections that may be in flight at this host now
	Quota             *QuotaStatus // nil if the limit has none, or nothing was used of it
	Reserved          bool         // the free slot or admission is reserved for a waiter that also needs those of other limits
}

// PenaltyStatus is the status of a source that the penalty of a limit blocks, would block, or has blocked and remembers.
type PenaltyStatus struct {
	Limit    string
	Source   netip.Prefix
	Age      time.Duration // since the last block began
	Left     time.Duration // until it ends; negative since then
	Times    int           // how often it was blocked in a row
	Observed bool          // by a penalty that observes
	Enforced bool          // the source is blocked now: neither the penalty nor its limit observes
}
