package shaper

// Verdict is what becomes of a unit or a connection. It is a metric label.
type Verdict uint8

// The verdicts.
const (
	Pass   Verdict = iota // goes on at once
	Delay                 // goes on later
	Refuse                // does not go on: a datagram is dropped, a connection answered by Excess
	numVerdicts
)

func (v Verdict) String() string { return [...]string{"pass", "delay", "refuse"}[v] }

// Verdicts is the number of verdicts.
const Verdicts = int(numVerdicts)

// Reason is why a verdict is not Pass. It is a metric label and a log field.
type Reason uint8

// The reasons.
const (
	None          Reason = iota // passed
	ByRate                      // the bucket's bytes or packets are paced
	QueueFull                   // the bucket's queue holds max_delay already
	ByConnections               // all slots of the key are taken
	ByNew                       // new connections of the key are paced
	WaitTimeout                 // waited queue_timeout for a slot
	WaitingFull                 // max_queue connections wait already
	ClientGone                  // the client left while it waited
	MemoryFull                  // the memory for queued datagrams is used up
	Blocked                     // the limit blocks all it matches
	FlowClosed                  // its UDP flow ended while the datagram was queued
	numReasons
)

// Reasons is the number of reasons.
const Reasons = int(numReasons)

func (r Reason) String() string {
	return [...]string{
		"none", "rate", "queue-full", "connections", "new-connections",
		"wait-timeout", "waiting-full", "client-gone", "memory-full", "blocked", "flow-closed",
	}[r]
}

// Ending is how a TCP connection through a listener ended. It is a metric label.
type Ending uint8

// The endings.
const (
	Closed           Ending = iota // by both sides
	ResetByClient                  // or its way here has failed
	ResetByServer                  // the downstream, or the way there has failed
	Refused                        // by a limit
	BadProxyHeader                 // a PROXY header was to come, and none did
	NotConnected                   // to any downstream
	FirstByteTimeout               // the client sent nothing for first_byte_timeout
	IdleTimeout                    // neither side sent anything for tcp_idle_timeout
	HalfCloseTimeout               // one side had ended, the other sent nothing for half_close_timeout
	LifetimeOver                   // it was there for max_lifetime
	TooSlow                        // it moved less than min_throughput
	Overload                       // descriptors or memory ran short
	Stopped                        // the daemon was
	Killed                         // by an operator
	numEndings
)

// Endings is the number of endings.
const Endings = int(numEndings)

func (e Ending) String() string {
	return [...]string{
		"closed", "reset-by-client", "reset-by-server", "refused", "bad-proxy-header", "not-connected", "first-byte-timeout",
		"idle-timeout", "half-close-timeout", "lifetime-over", "too-slow", "overload", "stopped", "killed",
	}[e]
}
