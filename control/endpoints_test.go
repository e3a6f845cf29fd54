package control

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"shaperd/shaper"
)

// endpoint is what openapi.json says of a route beside its path and its role.
type endpoint struct {
	says    string
	query   map[string]param
	body    any // nil for none
	answer  any // nil for what is no JSON of a type
	as      string
	errors  []int       // codes of asks
	more    []int       // codes that take more than an ask
	instead map[int]any // of Error
	asks    []ask       // the first one succeeds
}

// param is a parameter of a query.
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

// ask is a request, and the code of its answer.
type ask struct {
	at   string // what is in place of {limit} or {id}, then the query
	body string
	err  error // of the daemon
	code int
	fine bool // the file has nothing against it
}

// target returns the path and the query.
func (a ask) target(path string) string {
	value, query, ok := strings.Cut(a.at, "?")
	if value == "" {
		value = "aa"
		if strings.Contains(path, "{id}") {
			value = "1"
		}
	}
	path = strings.NewReplacer("{limit}", value, "{id}", value).Replace(path)
	if ok {
		path += "?" + query
	}
	return path
}

// codes returns when what is answered instead of 200.
func (e endpoint) codes(role Role) map[int]string {
	says := map[int]string{
		400: "The request is wrong.",
		403: fmt.Sprintf("Only the role %v may.", role),
		404: "There is nothing of that name.",
		413: fmt.Sprintf("The body is larger than %d bytes.", maxBody),
		422: "It cannot be; the text says why.",
		500: "It was tried, and went wrong.",
		503: "Not now: the daemon ends, or too many ask.",
	}
	all := map[int]string{}
	for _, code := range slices.Concat(e.errors, e.more, []int{403}) {
		all[code] = says[code]
	}
	return all
}

func text(says string) param { return param{says: says, schema: object{"type": "string"}} }

func one[T any](says, usual string, of map[string]T) param {
	return param{says: says, schema: object{"type": "string", "enum": slices.Sorted(maps.Keys(of)), "default": usual}}
}

func many(usual, most int) param {
	return param{says: "At most as many.", schema: object{"type": "integer", "minimum": 1, "maximum": most, "default": usual}}
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
	"id":    {"type": "integer", "minimum": 0, "description": "The ID of a connection."},
}

var (
	sorts   = one("By what they are sorted, the heaviest first.", "delayed", traits)
	eventID = param{says: "The ID of an event: those after it. All that are kept, without.", schema: object{"type": "integer", "minimum": 0}}
	prefix  = "A prefix, or an address: 192.0.2.0/24, 2001:db8::7."

	unknownLimit = ask{at: "zz", code: 404, fine: true}
	refusedByIt  = ask{err: ErrRefused, code: 422, fine: true}
	brokenByIt   = ask{err: errors.New("no"), code: 500, fine: true}
	ending       = ask{err: ErrEnding, code: 503, fine: true}
)

// with returns a with a body, or a query.
func (a ask) with(body string) ask { a.body = body; return a }

func (a ask) query(q string) ask { a.at += "?" + q; return a }

// wrongBodies are no body of any request.
func wrongBodies() []ask {
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
	setRate = `{"set":{"rate":"1MB/s"},"for":60}`
	block   = `{"prefix":"192.0.2.0/24","for":60.5}`
	drain   = `{"downstream":"10.0.0.5:5432","drained":true}`
)

var endpoints = map[string]endpoint{
	"GET /v1/status": {says: "How the daemon is doing", answer: Status{}, asks: []ask{{code: 200}}},
	"GET /v1/limits": {says: "All limits, by name", answer: []Limit{}, asks: []ask{{code: 200}}},
	"GET /v1/limits/{limit}": {
		says: "A limit", answer: Limit{}, errors: []int{404},
		asks: []ask{{code: 200}, unknownLimit, {at: "a%2Fb%25", code: 404, fine: true}},
	},
	"GET /v1/limits/{limit}/keys": {
		says: "The heaviest buckets of a limit", answer: []Key{}, query: map[string]param{"sort": sorts, "top": many(20, shaper.TopSize)}, errors: []int{400, 404},
		asks: []ask{{at: "?sort=rate&top=1", code: 200}, unknownLimit, {at: "?sort=size", code: 400}, {at: "?top=0", code: 400}, {at: "?top=9999999", code: 400}},
	},
	"GET /v1/who": {
		says: "Who is the heaviest", answer: []Who{}, errors: []int{400},
		query: map[string]param{
			"by":   one("What sources are put together by.", "source", map[string]bool{"source": true, "prefix": true, "asn": true}),
			"sort": sorts, "top": many(20, shaper.TopSize),
		},
		asks: []ask{{at: "?by=asn", code: 200}, {at: "?by=name", code: 400}, {at: "?sort=name", code: 400}, {at: "?top=x", code: 400}},
	},
	"GET /v1/connections": {
		says: "TCP connections and UDP flows", answer: Connections{}, errors: []int{400},
		query: map[string]param{
			"listener": text("Those of a listener."), "limit": text("Those under a limit."), "source": text("Those from there. " + prefix),
			"sort": one("By what they are sorted, what is most first.", "bytes", orders), "top": many(100, 10000),
		},
		asks: []ask{
			{at: "?listener=l&limit=aa&source=192.0.2.0/24&sort=idle&top=7", code: 200},
			{at: "?source=x", code: 400, fine: true},
			{at: "?source=10.0.0.5/24", code: 400, fine: true},
			{at: "?sort=x", code: 400},
			{at: "?top=-1", code: 400},
		},
	},
	"GET /v1/downstreams": {says: "The downstreams of all listeners", answer: []DownstreamStatus{}, asks: []ask{{code: 200}}},
	"GET /v1/explain": {
		says: "What a connection or a packet would meet now", answer: Explanation{}, errors: []int{422},
		query: map[string]param{
			"source": must(text("The address that it is from.")), "to": must(text("What it is to: tcp/5432, tcp/192.0.2.1:5432, udp/53, icmp.")),
			"listener": text("The listener, where several take the port."),
			"attach":   text("The attachment at which packets are."), "destination": text("The address that packets are to."),
		},
		asks: []ask{{at: "?source=192.0.2.1&to=tcp/1", code: 200}, refusedByIt.query("source=x&to=x")},
	},
	"GET /v1/blocks": {says: "Prefixes from which nothing passes", answer: []Block{}, asks: []ask{{code: 200}}},
	"GET /v1/events": {
		says: "What the daemon has logged", answer: []Event{}, query: map[string]param{"since": eventID}, errors: []int{400},
		asks: []ask{{at: "?since=0", code: 200}, {at: "?since=-1", code: 400}, {at: "?since=x", code: 400}},
	},
	"GET /v1/history": {says: "What charts begin with: the last samples, a second apart", answer: History{}, asks: []ask{{code: 200}}},
	"GET /v1/live": {
		says: `Server-sent events "live", one a second. The data of each is a Live, its id the ID of the last event in it`, as: "text/event-stream",
		query: map[string]param{"Last-Event-ID": in(eventID)}, more: []int{400, 503}, asks: []ask{{code: 200}},
	},
	"GET /v1/openapi.json": {says: "This", asks: []ask{{code: 200}}},
	"GET /v1/config":       {says: "The configuration in force, by the names it has in its file", asks: []ask{{code: 200}}},

	"PATCH /v1/limits/{limit}": {
		says: "Set values of a limit: for a while, until the next reload, or until they are taken back. What was set and is not named stays set", body: SetLimit{}, answer: Limit{},
		errors: []int{400, 404, 413, 422, 500, 503},
		asks: append(
			wrongBodies(), ask{body: setRate, code: 200}, unknownLimit.with(setRate), refusedByIt.with(setRate), brokenByIt.with(setRate), ending.with(setRate),
			ask{body: `{"set":{"rate":"1MB/s"},"until_reload":true}`, code: 200},
			ask{body: `{"set":{"rate":"1MB/s"},"for":1,"until_reload":true}`, code: 400, fine: true},
			ask{body: `{"set":{}}`, code: 400}, ask{body: `{"set":{"rate":1}}`, code: 400}, ask{body: `{"set":{"rate":"1MB/s"},"for":-1}`, code: 400},
			ask{body: `{"set":{"rate":"1MB/s"},"for":1e10}`, code: 400}, ask{body: `{"set":{"rate":"1MB/s"},"for":1e999}`, code: 400},
			ask{body: `{"set":{"rate":"1MB/s"},"for":NaN}`, code: 400}, ask{body: `{"set":{"rate":"1MB/s"},"for":"1m"}`, code: 400},
			ask{body: `{"set":{"rate":"1MB/s"},"for":1e-12}`, code: 400, fine: true}, ask{body: setRate + `]`, code: 400, fine: true}, ask{body: setRate + setRate, code: 400, fine: true},
		),
	},
	"DELETE /v1/limits/{limit}/override": {
		says: "Take back what was set in a limit", answer: Limit{}, errors: []int{404, 422, 500, 503},
		query: map[string]param{"keys": text("Which keys of it, with commas in between; all without.")},
		asks:  []ask{{code: 200}, {at: "?keys=rate,burst", code: 200}, unknownLimit, refusedByIt, brokenByIt, ending},
	},
	"POST /v1/blocks": {
		says: "Let nothing pass from a prefix", body: SetBlock{}, answer: []Block{}, errors: []int{400, 413, 422, 500, 503},
		asks: append(
			wrongBodies(), ask{body: block, code: 200}, refusedByIt.with(block), brokenByIt.with(block), ending.with(block),
			ask{body: `{"prefix":"192.0.2.0/33"}`, code: 400, fine: true}, ask{body: `{"prefix":"10.0.0.5/8"}`, code: 400, fine: true}, ask{body: `{"prefix":null}`, code: 400}, ask{body: `{"for":1}`, code: 400},
		),
	},
	"DELETE /v1/blocks": {
		says: "Take a block away", answer: []Block{}, query: map[string]param{"prefix": must(text(prefix))}, errors: []int{400, 404, 422, 500, 503},
		asks: []ask{
			{at: "?prefix=192.0.2.0/24", code: 200},
			{at: "?prefix=x", code: 400, fine: true},
			{code: 400},
			{at: "?prefix=192.0.2.0/24", err: ErrUnknown, code: 404, fine: true},
			refusedByIt.query("prefix=::/0"), brokenByIt.query("prefix=::/0"), ending.query("prefix=::/0"),
		},
	},
	"PUT /v1/bypass": {
		says: "Have every limit observe, or end that", body: SetBypass{}, answer: Status{}, errors: []int{400, 413, 422, 500, 503},
		asks: append(
			wrongBodies(), ask{body: `{"on":true}`, code: 200}, ask{body: `{"on":null}`, code: 400}, ask{body: `{"on":"yes"}`, code: 400},
			refusedByIt.with(`{"on":true}`), brokenByIt.with(`{"on":true}`), ending.with(`{"on":true}`),
		),
	},
	"DELETE /v1/connections/{id}": {
		says: "End a connection", answer: struct{}{}, errors: []int{400, 404},
		asks: []ask{{code: 200}, {at: "2", code: 404, fine: true}, {at: "x", code: 400}, {at: "-1", code: 400}, {at: "99999999999999999999", code: 400}},
	},
	"PATCH /v1/downstreams": {
		says: "Take a downstream out of use, or into it again", body: SetDownstream{}, answer: []DownstreamStatus{}, errors: []int{400, 404, 413, 500, 503},
		asks: append(
			wrongBodies(), ask{body: drain, code: 200}, ask{body: drain, err: ErrUnknown, code: 404, fine: true}, brokenByIt.with(drain), ending.with(drain),
		),
	},
	"POST /v1/reload": {
		says: "Put the configuration file in force as it is now", answer: ReloadStatus{}, errors: []int{422, 500, 503}, instead: map[int]any{422: ReloadStatus{}},
		asks: []ask{{code: 200}, refusedByIt, brokenByIt, ending},
	},
	"POST /v1/drain": {says: "End the daemon, when connections have ended", answer: Status{}, asks: []ask{{code: 200}}},

	"GET /debug/pprof/": {says: "Profiles of the daemon itself: their names, and each under its name", as: "text/html", asks: []ask{{code: 200}}},
	"GET /debug/pprof/profile": {
		says: "Where processors spend their time", as: "application/octet-stream", query: map[string]param{"seconds": text("For how long; 30 without.")},
		asks: []ask{{at: "?seconds=1", code: 200}},
	},
	"GET /debug/pprof/trace": {
		says: "What the Go runtime does", as: "application/octet-stream", query: map[string]param{"seconds": text("For how long; 1 without.")},
		asks: []ask{{at: "?seconds=0.01", code: 200}},
	},
}
