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
	WaitTimeout                 // waited max_wait for a slot
	WaitingFull                 // max_waiting connections wait already
	ClientGone                  // the client left while it waited
	MemoryFull                  // the memory for queued datagrams is used up
	numReasons
)

// Reasons is the number of reasons.
const Reasons = int(numReasons)

func (r Reason) String() string {
	return [...]string{
		"none", "rate", "queue-full", "connections", "new-connections",
		"wait-timeout", "waiting-full", "client-gone", "memory-full",
	}[r]
}
