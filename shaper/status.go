package shaper

import (
	"net/netip"
	"time"
)

// DownstreamStatus is how a downstream of a listener is doing.
type DownstreamStatus struct {
	Listen, Downstream string
	Up                 bool   // it can be reached, as far as checks, dials and answers tell
	Down               bool   // its checks fail
	Drained            bool   // an operator has it get no connections
	Error              string // why it is not up
	InFlight           int
	Most               int // connections it may have; 0 is no bound
}

// ConnectionStatus is how a TCP connection or UDP flow is doing.
type ConnectionStatus struct {
	ID             uint64
	Protocol       Protocol
	Source         netip.AddrPort
	Listen         string
	Port           uint16 // that it asked for
	Downstream     string // "" while it has none
	Stage          string // "announcing", "waiting", "connecting", "open" or "ending"
	Age, Idle      time.Duration
	ToDownstream   uint64 // bytes
	FromDownstream uint64
	Waited         time.Duration // in queues and for slots
	HeldBy         string        // the limit it waits for now
	HeldMost       string        // the limit it has waited for longest
}

// Addr returns whose the connection is, as flows have it.
func (c *ConnectionStatus) Addr() netip.Addr { return c.Source.Addr().Unmap().WithZone("") }

// FlowRoom is how many UDP flows a source and its listener have, of how many, and what keeps
// the source from another one: "max_flows_per_source", "max_flows", or "" when nothing does.
// Where there are as many as may be, and it is "", an idle one would make room.
type FlowRoom struct {
	OfSource, MostOfSource int // 0 is no bound
	Open, Most             int
	Full                   string
}

// BucketState is how a bucket is doing, and the connections of its key.
type BucketState struct {
	BacklogBytes, BacklogPackets uint64        // charged and not drained
	Queued                       int           // units that wait in its line
	QueuedBytes                  uint64        // of datagrams
	NextIn                       time.Duration // when what joins the queue now would leave
	NewIn                        time.Duration // when a new connection would have its turn, by new_connections
	InFlight, Waiting            int           // connections
	Reserved                     bool          // the slot or the turn that is free, for one that waits for those of other limits too
}
