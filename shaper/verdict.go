package shaper

// Verdict is the decision on a unit or a connection. It is a metric label.
type Verdict uint8

// The verdicts.
const (
	Pass   Verdict = iota // forwarded at once
	Delay                 // forwarded later
	Refuse                // not forwarded: a datagram is dropped, a connection gets the response of RefuseWith
	numVerdicts
)

func (v Verdict) String() string { return enumName(v, "pass", "delay", "refuse") }

// NumVerdicts is the number of verdicts.
const NumVerdicts = int(numVerdicts)

// Reason is the reason for a verdict other than Pass. It is a metric label and a log field.
type Reason uint8

// The reasons.
const (
	None             Reason = iota // passed
	ByRate                         // paced by the bucket of bytes or packets
	QueueFull                      // the delay would exceed max_delay
	ByConnections                  // all slots of the key are taken
	ByNewConnections               // new connections of the key are paced
	WaitTimeout                    // waited queue_timeout for a slot
	WaitingFull                    // max_queue connections were waiting already
	ClientGone                     // the client left while it waited
	MemoryFull                     // the memory for queued datagrams is exhausted
	Blocked                        // the limit blocks
	FlowClosed                     // the UDP flow ended while the datagram was queued
	ShedLoad                       // this host, or what is behind another limit, is short of something
	QuotaUsed                      // the quota of the key is used up, or the next part of it is being claimed
	numReasons
)

// NumReasons is the number of reasons.
const NumReasons = int(numReasons)

func (r Reason) String() string {
	return enumName(
		r,
		"none", "rate", "queue-full", "connections", "new-connections",
		"wait-timeout", "waiting-full", "client-gone", "memory-full", "blocked", "flow-closed", "shed", "quota",
	)
}

// Ending is the way in which a TCP connection through a listener ended. It is a metric label.
type Ending uint8

// The endings.
const (
	Closed           Ending = iota // closed by both sides
	ResetByClient                  // reset by the client, or the path to it failed
	ResetByServer                  // reset by the downstream, or the path to it failed
	Refused                        // refused by a limit
	BadProxyHeader                 // the PROXY header was missing or invalid
	NotConnected                   // no downstream could be reached
	FirstByteTimeout               // the client sent nothing for first_byte_timeout
	IdleTimeout                    // neither side sent anything for tcp_idle_timeout
	HalfCloseTimeout               // one side was closed, the other sent nothing for half_close_timeout
	LifetimeOver                   // max_lifetime passed
	TooSlow                        // throughput was below min_throughput
	Overload                       // descriptors or memory ran short
	Stopped                        // the daemon was stopped
	Killed                         // ended by an operator
	BreakerOpen                    // refused, as the breaker of its downstream was open
	Yielded                        // idle, and another source waited for its slot
	QuotaOver                      // a quota was used up
	numEndings
)

// NumEndings is the number of endings.
const NumEndings = int(numEndings)

func (e Ending) String() string {
	return enumName(
		e,
		"closed", "reset-by-client", "reset-by-server", "refused", "bad-proxy-header", "not-connected", "first-byte-timeout",
		"idle-timeout", "half-close-timeout", "lifetime-over", "too-slow", "overload", "stopped", "killed", "breaker-open", "yielded", "quota",
	)
}
