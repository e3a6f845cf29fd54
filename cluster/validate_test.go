package cluster

import (
	"math"
	"strings"
	"testing"
)

// fullRequest is a valid call with everything at its maximum.
func fullRequest() *Request {
	q := &Request{
		Params: Params{Hosts: MaxHosts, Lease: Second, Step: Second / 2}, Host: strings.Repeat("h", MaxName),
		Start: maxNumber, N: maxNumber, Got: maxNumber, GotAge: maxNumber, Epoch: maxNumber, Known: maxNumber,
		Digest: math.MaxUint64, Info: strings.Repeat("i", MaxInfo),
	}
	for range MaxItems {
		q.Items = append(q.Items, Item{Key: strings.Repeat("~", MaxKey), Has: Whole, Want: Whole, Weight: MaxWeight})
	}
	for range MaxHosts {
		q.Gone = append(q.Gone, Gone{Host: "A.z_0-", Start: maxNumber, N: maxNumber})
	}
	return q
}

func TestRequest_Validate(t *testing.T) {
	if err := fullRequest().Validate(); err != nil {
		t.Errorf("a call with everything at its maximum: %v", err)
	}
	for name, test := range map[string]struct {
		change func(*Request)
		want   string
	}{
		"no hosts":       {func(q *Request) { q.Params.Hosts = 0 }, "0 hosts"},
		"many hosts":     {func(q *Request) { q.Params.Hosts = MaxHosts + 1 }, "1001 hosts"},
		"no lease":       {func(q *Request) { q.Params.Lease = 0 }, "lease of 0 us"},
		"endless lease":  {func(q *Request) { q.Params.Lease = math.MaxInt64 }, "lease of 9223372036854775807 us"},
		"negative step":  {func(q *Request) { q.Params.Step = -1 }, "step of -1 us"},
		"no name":        {func(q *Request) { q.Host = "" }, `host ""`},
		"long name":      {func(q *Request) { q.Host += "h" }, "must be 1 to 64 letters"},
		"name of words":  {func(q *Request) { q.Host = "gw 1" }, `host "gw 1"`},
		"name in UTF-8":  {func(q *Request) { q.Host = "gwä" }, "host"},
		"path as name":   {func(q *Request) { q.Host = "../gw" }, "host"},
		"items":          {func(q *Request) { q.Items = append(q.Items, Item{Key: "k"}) }, "101 items"},
		"info":           {func(q *Request) { q.Info += "i" }, "1025 bytes of information"},
		"gone hosts":     {func(q *Request) { q.Gone = append(q.Gone, Gone{Host: "g"}) }, "1001 hosts are gone"},
		"more gone":      {func(q *Request) { q.Params.Hosts = 3 }, "1000 hosts are gone: must be at most 3"},
		"start":          {func(q *Request) { q.Start = -1 }, "start -1: must be 0 to"},
		"n":              {func(q *Request) { q.N = maxNumber + 1 }, "call 4503599627370497: must be 0 to"},
		"got":            {func(q *Request) { q.Got = math.MinInt64 }, "call that was taken"},
		"age":            {func(q *Request) { q.GotAge = -1 }, "age -1"},
		"epoch":          {func(q *Request) { q.Epoch = math.MaxInt64 }, "epoch"},
		"known":          {func(q *Request) { q.Known = -1 }, "version -1"},
		"no key":         {func(q *Request) { q.Items[3].Key = "" }, `bucket ""`},
		"long key":       {func(q *Request) { q.Items[3].Key += "k" }, "must be 1 to 256 printable"},
		"key with break": {func(q *Request) { q.Items[3].Key = "a\nb" }, `bucket "a\nb"`},
		"invalid UTF-8":  {func(q *Request) { q.Items[3].Key = "\xff" }, "bucket"},
		"has":            {func(q *Request) { q.Items[99].Has = Whole + 1 }, "parts in use 1048577"},
		"want":           {func(q *Request) { q.Items[99].Want = -1 }, "parts wanted -1"},
		"weight":         {func(q *Request) { q.Items[99].Weight = MaxWeight + 1 }, "weight 65537"},
		"gone name":      {func(q *Request) { q.Gone[7].Host = "" }, `gone host ""`},
		"gone start":     {func(q *Request) { q.Gone[7].Start = -1 }, "start of a gone host -1"},
		"gone n":         {func(q *Request) { q.Gone[7].N = maxNumber + 1 }, "call of a gone host"},
	} {
		q := fullRequest()
		test.change(q)
		if err := q.Validate(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want an error with %q", name, err, test.want)
		}
	}
}

// TestHost_SendsValidCalls has a host be told of more than fits into a call.
func TestHost_SendsValidCalls(t *testing.T) {
	g := newGroup(2)
	h := g.hosts[0]
	h.SetInfo(1, strings.Repeat("i", MaxInfo+1))
	g.run(2 * Second)
	h.Want("db", Whole, MaxWeight+1)
	h.Want("", Whole, 1)
	h.Want(strings.Repeat("k", MaxKey+1), Whole, 1)
	q := h.Request(g.now, nil)
	if err := q.Validate(); err != nil {
		t.Error(err)
	}
	if len(q.Items) != 1 || q.Items[0].Key != "db" {
		t.Errorf("the host tells of %v", q.Items)
	}
}
