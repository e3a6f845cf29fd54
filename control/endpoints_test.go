package control

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper/topk"
)

// endpoint is the part of openapi.json on a route besides its path and role.
type endpoint struct {
	says    string
	query   map[string]param
	body    any // nil for none
	maxBody int // if others than most
	answer  any // nil if it is not JSON of a type
	as      string
	errors  []int       // status codes that asks cover
	more    []int       // further status codes, which one request cannot cause
	instead map[int]any // response types other than Error, by status code
	asks    []ask       // the first succeeds
}

// param is a query parameter.
type param struct {
	says     string
	required bool
	schema   object
	header   bool
}

func (p param) in() string {
	if p.header {
		return "header"
	}
	return "query"
}

func (e endpoint) media() string {
	if e.as != "" {
		return e.as
	}
	return "application/json"
}

// ask is a request, and the status code of its response.
type ask struct {
	at   string // value of {limit} or {id}, then the query
	body string
	err  error // returned by the daemon
	code int
	fine bool // valid by openapi.json
}

// target returns the path and the query.
func (a ask) target(path string) string {
	value, query, ok := strings.Cut(a.at, "?")
	if value == "" {
		value = "aa"
		switch {
		case strings.Contains(path, "{id}"):
			value = "1"
		case strings.Contains(path, "{host}"):
			value = "gw2"
		}
	}
	path = strings.NewReplacer("{limit}", value, "{id}", value, "{host}", value).Replace(path)
	if ok {
		path += "?" + query
	}
	return path
}

// codes returns the status codes other than 200, with their descriptions.
func (e endpoint) codes(role Role) map[int]string {
	says := map[int]string{
		400: "Invalid request.",
		403: fmt.Sprintf("Requires the role %v.", role),
		404: "Unknown name.",
		413: fmt.Sprintf("The request body is larger than %d bytes.", cmp.Or(e.maxBody, maxBody)),
		422: "Rejected; the message says why.",
		500: "Internal error.",
		503: "The daemon is starting or stopping, or there are too many connections or streams.",
	}
	all := map[int]string{}
	for _, code := range slices.Concat(e.errors, e.more, []int{403}) {
		all[code] = says[code]
	}
	return all
}

func text(says string) param { return param{says: says, schema: object{"type": "string"}} }

func one[T any](says, byDefault string, of map[string]T) param {
	return param{says: says, schema: object{"type": "string", "enum": slices.Sorted(maps.Keys(of)), "default": byDefault}}
}

func topSchema(byDefault, maxTop int) param {
	return param{says: "Maximum number of results.", schema: object{"type": "integer", "minimum": 1, "maximum": maxTop, "default": byDefault}}
}

func must(p param) param {
	p.required = true
	return p
}

func in(p param) param {
	p.header = true
	return p
}

var pathSchemas = map[string]object{
	"limit": {"type": "string", "description": "The name of a limit."},
	"host":  {"type": "string", "description": "The name of a host of the group."},
	"id":    {"type": "integer", "minimum": 0, "description": "The ID of a connection."},
}

var (
	sorts        = one("Sort key; the order is descending.", "delayed", sortKeys)
	eventIDParam = param{says: "Return the events after this ID; without it, all that are retained.", schema: object{"type": "integer", "minimum": 0}}
	prefix       = "A prefix or an address: 192.0.2.0/24, 2001:db8::7."

	unknownLimit  = ask{at: "zz", code: 404, fine: true}
	rejected      = ask{err: ErrRefused, code: 422, fine: true}
	daemonFails   = ask{err: errors.New("no"), code: 500, fine: true}
	whileStopping = ask{err: ErrStopping, code: 503, fine: true}
)

// with returns a with a body, or a query.
func (a ask) with(body string) ask { a.body = body; return a }

func (a ask) query(q string) ask { a.at += "?" + q; return a }

// invalidBodies are bodies that are invalid for each request.
func invalidBodies() []ask {
	return []ask{
		{body: `{`, code: 400},
		{body: `[]`, code: 400},
		{body: `{"what":1}`, code: 400},
		{body: `null`, code: 400},
		{body: `{}`, code: 400},
		{body: `{"` + strings.Repeat("x", maxBody) + `":1}`, code: 413},
	}
}

const (
	setRate  = `{"set":{"rate":"1MB/s"},"duration_seconds":60}`
	block    = `{"prefix":"192.0.2.0/24","duration_seconds":60.5}`
	blocks   = `{"block":["192.0.2.0/24"]}`
	hold     = `{"listener":"l","held":true,"duration_seconds":60,"end_idle":true}`
	rollback = `{"revision":"5f0c61"}`
	drain    = `{"downstream":"10.0.0.5:5432","drained":true}`
)

var endpoints = map[string]endpoint{
	"GET /v1/status": {says: "State of the daemon", answer: api.Status{}, asks: []ask{{code: 200}}},
	"GET /v1/health": {says: "Whether the daemon can take traffic; answered also while it starts, stops or hangs", answer: api.Health{}, asks: []ask{{code: 200}}},
	"GET /v1/limits": {says: "All limits, sorted by name", answer: []api.Limit{}, asks: []ask{{code: 200}}},
	"GET /v1/limits/{limit}": {
		says: "One limit", answer: api.Limit{}, errors: []int{404},
		asks: []ask{{code: 200}, unknownLimit, {at: "a%2Fb%25", code: 404, fine: true}},
	},
	"GET /v1/limits/{limit}/keys": {
		says: "Top keys of a limit", answer: []api.Key{}, query: map[string]param{"sort": sorts, "top": topSchema(20, topk.Size)}, errors: []int{400, 404},
		asks: []ask{{at: "?sort=rate&top=1", code: 200}, unknownLimit, {at: "?sort=size", code: 400}, {at: "?top=0", code: 400}, {at: "?top=9999999", code: 400}},
	},
	"GET /v1/talkers": {
		says: "Top talkers", answer: []api.Talker{}, errors: []int{400},
		query: map[string]param{
			"by":   one("Aggregation of sources.", "source", map[string]bool{"source": true, "prefix": true, "asn": true}),
			"sort": sorts, "top": topSchema(20, topk.Size),
		},
		asks: []ask{{at: "?by=asn", code: 200}, {at: "?by=name", code: 400}, {at: "?sort=name", code: 400}, {at: "?top=x", code: 400}},
	},
	"GET /v1/connections": {
		says: "TCP connections and UDP flows", answer: api.Connections{}, errors: []int{400},
		query: map[string]param{
			"listener": text("Only connections of this listener."), "limit": text("Only connections that this limit applies to."), "source": text("Only connections from this source. " + prefix),
			"sort": one("Sort key; the order is descending.", "bytes", connectionOrders), "top": topSchema(100, 10000),
		},
		asks: []ask{
			{at: "?listener=l&limit=aa&source=192.0.2.0/24&sort=idle&top=7", code: 200},
			{at: "?source=x", code: 400, fine: true},
			{at: "?source=10.0.0.5/24", code: 400, fine: true},
			{at: "?sort=x", code: 400},
			{at: "?top=-1", code: 400},
		},
	},
	"GET /v1/quotas": {
		says: "The most used quotas", answer: api.Quotas{}, errors: []int{400},
		query: map[string]param{"limit": text("Only quotas of this limit."), "top": topSchema(100, 10000)},
		asks:  []ask{{code: 200}, {at: "?limit=aq&top=1", code: 200}, {at: "?top=0", code: 400}},
	},
	"GET /v1/downstreams": {says: "The downstreams of all listeners", answer: []api.DownstreamStatus{}, asks: []ask{{code: 200}}},
	"GET /v1/explain": {
		says: "Limits and verdict for a hypothetical connection or packet", answer: api.Explanation{}, errors: []int{422},
		query: map[string]param{
			"source": must(text("Source address.")), "to": must(text("Protocol and destination: tcp/5432, tcp/192.0.2.1:5432, udp/53, icmp.")),
			"listener": text("Listener, if several have the port."),
			"attach":   text("Attachment, for packets."), "destination": text("Destination address, for packets."), "dscp": text("DSCP, for packets: a name or a number; default 0."), "mark": text("Mark, for packets; default 0."), "cgroup": text("Control group of the local process that sends packets."), "tlv": text("Type and value in the PROXY header: 0xE0=tenant-7."), "downstream": text("Downstream that is chosen, if the listener has several."),
		},
		asks: []ask{{at: "?source=192.0.2.1&to=tcp/1", code: 200}, rejected.query("source=x&to=x")},
	},
	"GET /v1/shared": {says: "The group of hosts that share limits", answer: api.Shared{}, asks: []ask{{code: 200}}},
	"GET /v1/blocks": {says: "Blocked source prefixes", answer: []api.Block{}, asks: []ask{{code: 200}}},
	"GET /v1/events": {
		says: "Log records of the daemon", answer: []api.Event{}, query: map[string]param{"since": eventIDParam, "kind": text("Only those of this kind, as in their attribute kind: penalty.")}, errors: []int{400},
		asks: []ask{{at: "?since=0", code: 200}, {at: "?kind=penalty", code: 200}, {at: "?since=-1", code: 400}, {at: "?since=x", code: 400}},
	},
	"GET /v1/history": {says: "History of the charts: the last samples, a second apart", answer: api.History{}, asks: []ask{{code: 200}}},
	"GET /v1/live": {
		says: `Server-sent events "live", one per second. The data is a Live; the id is the ID of its last event`, as: "text/event-stream",
		query: map[string]param{"Last-Event-ID": in(eventIDParam)}, more: []int{400, 503}, asks: []ask{{code: 200}},
	},
	"GET /v1/openapi.json": {says: "This document", asks: []ask{{code: 200}}},
	"GET /v1/config":       {says: "The effective configuration, by its keys in the file", asks: []ask{{code: 200}}},

	"PATCH /v1/limits/{limit}": {
		says: "Override values of a limit: for a duration, until the next reload, or until removed. Overrides of other keys stay", body: api.SetLimit{}, answer: api.Limit{},
		errors: []int{400, 404, 413, 422, 500, 503},
		asks: append(
			invalidBodies(), ask{body: setRate, code: 200}, unknownLimit.with(setRate), rejected.with(setRate), daemonFails.with(setRate), whileStopping.with(setRate),
			ask{body: `{"set":{"rate":"1MB/s"},"until_reload":true}`, code: 200},
			ask{body: `{"set":{"rate":"1MB/s"},"duration_seconds":1,"until_reload":true}`, code: 400, fine: true},
			ask{body: `{"source":"192.0.2.0/24","set":{"rate":"1MB/s"}}`, code: 200}, ask{body: `{"source":"192.0.2.1/24","set":{"rate":"1MB/s"}}`, code: 400, fine: true},
			ask{body: `{"set":{}}`, code: 400}, ask{body: `{"set":{"rate":1}}`, code: 400}, ask{body: `{"set":{"rate":"1MB/s"},"duration_seconds":-1}`, code: 400},
			ask{body: `{"set":{"rate":"1MB/s"},"duration_seconds":1e10}`, code: 400}, ask{body: `{"set":{"rate":"1MB/s"},"duration_seconds":1e999}`, code: 400},
			ask{body: `{"set":{"rate":"1MB/s"},"duration_seconds":NaN}`, code: 400}, ask{body: `{"set":{"rate":"1MB/s"},"duration_seconds":"1m"}`, code: 400},
			ask{body: `{"set":{"rate":"1MB/s"},"duration_seconds":1e-12}`, code: 400, fine: true}, ask{body: setRate + `]`, code: 400, fine: true}, ask{body: setRate + setRate, code: 400, fine: true},
		),
	},
	"DELETE /v1/limits/{limit}/override": {
		says: "Remove the override of a limit", answer: api.Limit{}, errors: []int{400, 404, 422, 500, 503},
		query: map[string]param{
			"keys":   text("Keys to remove, separated by commas; without it, all."),
			"source": text("Prefix of the sources whose values alone were overridden."),
		},
		asks: []ask{{code: 200}, {at: "?keys=rate,burst", code: 200}, {at: "?source=192.0.2.0/24", code: 200}, {at: "?source=192.0.2", code: 400, fine: true}, unknownLimit, rejected, daemonFails, whileStopping},
	},
	"DELETE /v1/limits/{limit}/bucket": {
		says: "Forget what the bucket of a limit owes", answer: api.Limit{}, errors: []int{400, 404, 422, 500, 503},
		query: map[string]param{"source": text("Address of the source whose bucket it is; without it, the limit has one for all.")},
		asks:  []ask{{code: 200}, {at: "?source=192.0.2.1", code: 200}, {at: "?source=192.0.2.0/24", code: 400, fine: true}, unknownLimit, rejected, daemonFails, whileStopping},
	},
	"DELETE /v1/limits/{limit}/quota": {
		says: "Forget what was used of the quota of a limit", answer: api.Limit{}, errors: []int{400, 404, 422, 500, 503},
		query: map[string]param{"source": text("Address of the source whose quota it is; without it, the limit has one for all.")},
		asks:  []ask{{code: 200}, {at: "?source=192.0.2.1", code: 200}, {at: "?source=192.0.2.0/24", code: 400, fine: true}, unknownLimit, rejected, daemonFails, whileStopping},
	},
	"POST /v1/blocks": {
		says: "Block a source prefix", body: api.SetBlock{}, answer: []api.Block{}, errors: []int{400, 413, 422, 500, 503},
		asks: append(
			invalidBodies(), ask{body: block, code: 200}, rejected.with(block), daemonFails.with(block), whileStopping.with(block),
			ask{body: `{"prefix":"192.0.2.0/33"}`, code: 400, fine: true}, ask{body: `{"prefix":"10.0.0.5/8"}`, code: 400, fine: true}, ask{body: `{"prefix":null}`, code: 400}, ask{body: `{"duration_seconds":1}`, code: 400},
		),
	},
	"DELETE /v1/blocks": {
		says: "Remove a block", answer: []api.Block{}, query: map[string]param{"prefix": must(text(prefix))}, errors: []int{400, 404, 422, 500, 503},
		asks: []ask{
			{at: "?prefix=192.0.2.0/24", code: 200},
			{at: "?prefix=x", code: 400, fine: true},
			{code: 400},
			{at: "?prefix=192.0.2.0/24", err: ErrUnknown, code: 404, fine: true},
			rejected.query("prefix=::/0"), daemonFails.query("prefix=::/0"), whileStopping.query("prefix=::/0"),
		},
	},
	bulkRoute: {
		says: "Block and unblock many source prefixes at once, all of them or none", body: api.ChangeBlocks{}, maxBody: maxBulkBody, answer: api.BlockChanges{}, errors: []int{400, 422, 500, 503}, more: []int{413},
		asks: []ask{
			{body: `{"block":["192.0.2.0/24","2001:db8::7"],"unblock":["198.51.100.1"],"duration_seconds":60}`, code: 200},
			{body: `{"block":["192.0.2.0/24","10.0.0.5/8"]}`, code: 400, fine: true},
			{body: `{"unblock":[7]}`, code: 400},
			rejected.with(blocks), daemonFails.with(blocks), whileStopping.with(blocks),
		},
	},
	"GET /v1/penalties": {says: "Sources that penalties of limits block, would block, or have blocked and remember", answer: []api.Penalty{}, asks: []ask{{code: 200}}},
	"DELETE /v1/penalties": {
		says: "End the penalty of a source, by one limit or by all, and forget what it was refused", answer: []api.Penalty{}, query: map[string]param{"source": must(text(prefix)), "limit": text("The name of a limit.")}, errors: []int{400, 404, 500, 503},
		asks: []ask{
			{at: "?source=192.0.2.7", code: 200},
			{at: "?source=x", code: 400, fine: true},
			{code: 400},
			{at: "?source=192.0.2.7&limit=aa", err: ErrUnknown, code: 404, fine: true},
			daemonFails.query("source=::/0"), whileStopping.query("source=::/0"),
		},
	},
	"PUT /v1/bypass": {
		says: "Turn bypass on or off: every limit observes", body: api.SetBypass{}, answer: api.Status{}, errors: []int{400, 413, 422, 500, 503},
		asks: append(
			invalidBodies(), ask{body: `{"on":true}`, code: 200}, ask{body: `{"on":null}`, code: 400}, ask{body: `{"on":"yes"}`, code: 400},
			rejected.with(`{"on":true}`), daemonFails.with(`{"on":true}`), whileStopping.with(`{"on":true}`),
		),
	},
	"DELETE /v1/connections/{id}": {
		says: "Close a connection", answer: struct{}{}, errors: []int{400, 404},
		asks: []ask{{code: 200}, {at: "2", code: 404, fine: true}, {at: "x", code: 400}, {at: "-1", code: 400}, {at: "99999999999999999999", code: 400}},
	},
	"PATCH /v1/downstreams": {
		says: "Drain or enable a downstream", body: api.SetDownstream{}, answer: []api.DownstreamStatus{}, errors: []int{400, 404, 413, 500, 503},
		asks: append(
			invalidBodies(), ask{body: drain, code: 200}, ask{body: drain, err: ErrUnknown, code: 404, fine: true}, daemonFails.with(drain), whileStopping.with(drain),
		),
	},
	"PATCH /v1/listeners": {
		says: "Hold a listener, or resume it", body: api.SetListener{}, answer: api.HeldListener{}, errors: []int{400, 404, 413, 500, 503},
		asks: append(
			invalidBodies(), ask{body: hold, code: 200}, ask{body: `{"listener":"l","held":false}`, code: 200},
			ask{body: `{"listener":"l","held":false,"end_idle":true}`, code: 400, fine: true}, ask{body: `{"listener":"l","held":true,"duration_seconds":-1}`, code: 400},
			ask{body: hold, err: ErrUnknown, code: 404, fine: true}, daemonFails.with(hold), whileStopping.with(hold),
		),
	},
	"DELETE /v1/shared/hosts/{host}": {
		says: "Tell the ledger that a host is gone for good: its part of shared limits is given to the others", answer: api.Shared{}, errors: []int{422, 500, 503},
		asks: []ask{{code: 200}, rejected, daemonFails, whileStopping},
	},
	"GET /v1/revisions": {
		says: "The configurations that are kept, the newest first", answer: []api.Revision{}, errors: []int{422, 500}, asks: []ask{{code: 200}, rejected, daemonFails},
	},
	"GET /v1/config/files": {says: "The configuration in effect, as its files were read", answer: api.Configuration{}, asks: []ask{{code: 200}}},
	"POST /v1/rollback": {
		says: "Apply a configuration that is kept, until the next reload or start", body: api.SetRevision{}, answer: api.Status{}, errors: []int{400, 404, 413, 422, 500, 503},
		asks: append(
			invalidBodies(), ask{body: rollback, code: 200}, ask{body: `{"revision":""}`, code: 200},
			ask{body: rollback, err: ErrUnknown, code: 404, fine: true}, rejected.with(rollback), daemonFails.with(rollback), whileStopping.with(rollback),
		),
	},
	"POST /v1/reload": {
		says: "Reload the configuration", answer: api.ReloadStatus{}, errors: []int{422, 500, 503}, instead: map[int]any{422: api.ReloadStatus{}},
		asks: []ask{{code: 200}, rejected, daemonFails, whileStopping},
	},
	"POST /v1/stop": {says: "Stop the daemon gracefully", answer: api.Status{}, asks: []ask{{code: 200}}},

	"GET /debug/pprof/": {says: "Index of the profiles of the daemon, each available under its name", as: "text/html", asks: []ask{{code: 200}}},
	"GET /debug/pprof/profile": {
		says: "CPU profile", as: "application/octet-stream", query: map[string]param{"seconds": text("Duration in seconds; the default is 30.")},
		asks: []ask{{at: "?seconds=1", code: 200}},
	},
	"GET /debug/pprof/trace": {
		says: "Execution trace of the Go runtime", as: "application/octet-stream", query: map[string]param{"seconds": text("Duration in seconds; the default is 1.")},
		asks: []ask{{at: "?seconds=0.01", code: 200}},
	},
}
