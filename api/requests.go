// Bodies of requests that change something, and answers to them. They require the role "admin".

package api

// SetLimit is the body of PATCH /v1/limits/{limit}. DELETE /v1/limits/{limit}/override
// removes the override, with ?source= that of these sources.
type SetLimit struct {
	Source      string            `json:"source,omitempty"`           // prefix of the sources whose buckets alone get these values; without it all
	Set         map[string]string `json:"set"`                        // values by configuration key: {"rate": "20Mbit/s"}
	Duration    float64           `json:"duration_seconds,omitempty"` // without it, until it is removed
	UntilReload bool              `json:"until_reload,omitempty"`     // ends with the next reload; not with a duration
}

// SetBlock is the body of POST /v1/blocks. DELETE /v1/blocks?prefix= removes the block.
type SetBlock struct {
	Prefix   string  `json:"prefix"`
	Duration float64 `json:"duration_seconds,omitempty"`
}

// ChangeBlocks is the body of PATCH /v1/blocks: prefixes to block for a time, and to unblock. All of it happens, or nothing.
type ChangeBlocks struct {
	Block    []string `json:"block,omitempty"`
	Unblock  []string `json:"unblock,omitempty"` // one that is not blocked makes no difference
	Duration float64  `json:"duration_seconds,omitempty"`

	KeepPermanent bool `json:"keep_permanent,omitempty"` // blocks without an end are not unblocked
}

// BlockChanges is what PATCH /v1/blocks has changed.
type BlockChanges struct {
	Blocked   int `json:"blocked"`   // prefixes that were not blocked, or not for so long
	Unblocked int `json:"unblocked"` // prefixes that were blocked
	Total     int `json:"total"`     // prefixes that are blocked now
}

// SetBypass is the body of PUT /v1/bypass.
type SetBypass struct {
	On       bool    `json:"on"`
	Duration float64 `json:"duration_seconds,omitempty"`
}

// SetDownstream is the body of PATCH /v1/downstreams.
type SetDownstream struct {
	Listener   string `json:"listener,omitempty"` // without it, every listener with that downstream
	Downstream string `json:"downstream"`
	Drained    bool   `json:"drained"`
}

// SetListener is the body of PATCH /v1/listeners.
type SetListener struct {
	Listener string  `json:"listener"`
	Held     bool    `json:"held"`
	Duration float64 `json:"duration_seconds,omitempty"` // of the hold; without it, until it is resumed
	EndIdle  bool    `json:"end_idle,omitempty"`         // close connections on which neither side owes an answer
}

// HeldListener is the answer to it.
type HeldListener struct {
	Ended   int   `json:"ended"` // idle connections that were closed
	Waiting int   `json:"waiting"`
	Hold    *Hold `json:"hold,omitempty"`
}

// SetRevision is the body of POST /v1/rollback.
type SetRevision struct {
	Revision string `json:"revision"` // or its first letters; "": the last one that is another than the one in effect
}
