package shaper

import "time"

// Adaptation says whether the maximum of connections in flight of a limit follows what the downstream bears.
type Adaptation uint8

// The values, with their names in configuration.
const (
	AdaptOff     Adaptation = iota // "off": it is Limit.MaxConnections
	AdaptObserve                   // "observe": the same, and what it would be is found out
	AdaptOn                        // "on": between Limit.MinConnections and Limit.MaxConnections
)

func (a Adaptation) String() string { return enumName(a, "off", "observe", "on") }

// AdaptiveStatus is what an adaptive limit has found out.
type AdaptiveStatus struct {
	Observed   bool     // the maximum is MaxConnections, and Limit what it would be
	Limit      int      // maximum in flight; 0 while that is not known
	Most       int      // up to so many are in flight while limits around it are compared
	Current    int      // maximum in flight now; 0 if Observed
	Leader     string   // of a shared limit, the host that has the controller; "" while none is known
	Unheard    []string // of a shared limit, hosts that may have connections in flight and are not heard: the limit stays
	Throughput float64  // answers a second at this limit, while connections waited; 0 while that is not known
	Changes    []AdaptiveChange
}

// AdaptiveChange is a change of an adaptive limit.
type AdaptiveChange struct {
	At       time.Time
	From, To int
	Reason   string // such as "more-pays"
}
