package api

import "time"

// Shed is how much a limit refuses while this host, or the downstream behind another limit, is short of something.
type Shed struct {
	Share   float64      `json:"share"` // of new connections and UDP flows, from 0 to 1
	Order   int          `json:"order"` // the lowest ones shed first
	Signals []ShedSignal `json:"signals"`
}

// ShedSignal is what such a limit looks at.
type ShedSignal struct {
	Name  string  `json:"name"`            // "cpu", "memory", "pressure", "late", "descriptors" or "limit"
	Limit string  `json:"limit,omitempty"` // its name, with "limit"
	Value float64 `json:"value"`           // part of the whole, or seconds for "late"
	Above float64 `json:"above"`           // from there on the limit sheds more
	Error string  `json:"error,omitempty"` // why it cannot be read: then it sheds nothing
}

// Adaptive is what an adaptive limit has found out about its downstream.
type Adaptive struct {
	Observed       bool             `json:"observed"`                  // max_connections holds, and this is what would hold
	MinConnections int              `json:"min_connections,omitempty"` // 0 if observed
	Connections    int              `json:"connections"`               // maximum in flight; 0 while that is not known
	Most           int              `json:"most,omitempty"`            // up to so many are in flight while limits around it are compared
	Unheard        []string         `json:"unheard,omitempty"`         // of a shared limit, hosts that may have connections in flight and are not heard: the limit stays
	Leader         string           `json:"leader,omitempty"`          // of a shared limit, the host that finds out for all; "" while none is known
	Throughput     float64          `json:"throughput"`                // answers per second with as many, while connections waited; 0 while that is not known
	Changes        []AdaptiveChange `json:"changes"`                   // the last ones, the newest last
}

// AdaptiveChange is a change of an adaptive limit.
type AdaptiveChange struct {
	At     time.Time `json:"at"`
	From   int       `json:"from"`
	To     int       `json:"to"`
	Reason string    `json:"reason"` // see [AdaptiveReasons]
}

// AdaptiveReasons are the reasons of changes, in words.
var AdaptiveReasons = map[string]string{
	"bounds":             "the bounds were changed",
	"resumed":            "another host had found this out, or hosts have come or gone",
	"more-pays":          "more in flight gave more answers",
	"more-gives-little":  "more in flight gave almost no more answers",
	"less-costs-nothing": "fewer in flight gave as many answers",
	"less-costs":         "fewer in flight gave fewer answers",
	"demand":             "no more connections came",
	"slow":               "answers took too long, or max_connections was reached",
	"throughput-fell":    "throughput fell by a third",
	"crowd":              "answers were slow, and nobody waited",
	"failures":           "a tenth of the connections failed",
	"failures-stay":      "fewer in flight did not help against failures",
	"silence":            "nothing was answered for 10s, and all slots were taken",
}

// Quotas are the quotas of which most is used: GET /v1/quotas.
type Quotas struct {
	Total  int     `json:"total"`           // keys of which something was used
	UsedUp int     `json:"used_up"`         // of these, those of which nothing is left
	Error  string  `json:"error,omitempty"` // why the file of quotas cannot be written
	Quotas []Quota `json:"quotas"`
}

// Quota is what was used of a quota.
type Quota struct {
	Limit  string  `json:"limit"`
	Key    string  `json:"key"`            // "" if the limit has one for all, "others" for keys that are not counted apart
	Unit   string  `json:"unit"`           // "bytes", "packets" or "connections"
	Period string  `json:"period"`         // as in the configuration
	Amount uint64  `json:"amount"`         // of the unit, in the period
	Used   uint64  `json:"used"`           // more than the amount if that was made smaller, or the limit observes
	Ends   float64 `json:"ends_seconds"`   // until the period is over, or of a rolling one the present 24th of it
	Slow   float64 `json:"slow,omitempty"` // bytes/s of what passes when it is used up; 0 if nothing does
	Waits  bool    `json:"waits"`          // something waits for a claim that is being written
}
