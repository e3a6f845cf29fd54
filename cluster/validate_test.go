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
	for range 2 * MaxHosts {
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
		"gone hosts":     {func(q *Request) { q.Gone = append(q.Gone, Gone{Host: "g"}) }, "2001 hosts are gone or replaced"},
		"more gone":      {func(q *Request) { q.Params.Hosts = 3 }, "2000 hosts are gone or replaced: must be at most 6"},
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
		"gone start":     {func(q *Request) { q.Gone[7].Start = -2 - maxNumber }, "start of a gone host 4503599627370497"},
		"gone n":         {func(q *Request) { q.Gone[7].N = maxNumber + 1 }, "call of a gone host"},
	} {
		q := fullRequest()
		test.change(q)
		if err := q.Validate(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v; want an error with %q", name, err, test.want)
		}
	}
}

func TestReply_Validate(t *testing.T) {
	q := fullRequest()
	// full is a valid reply with everything at its maximum.
	full := func() *Reply {
		r := &Reply{N: q.N, Start: q.Start, Latest: maxReplied, Epoch: maxReplied, Live: MaxHosts, Differ: MaxHosts, Version: maxReplied, Gone: fullRequest().Gone}
		r.Sales = []Sale{{Key: "@a", N: 1, At: -MaxEvery, Every: MaxEvery * MaxHosts}, {Key: "@b", N: MaxTickets, At: MaxEvery - MaxTickets*Second, Every: Second}}
		for range eventPage {
			r.Events = append(r.Events, Event{Key: strings.Repeat("~", MaxKey), Version: maxReplied})
			r.Grants = append(r.Grants, Grant{Key: strings.Repeat("~", MaxKey), Parts: Whole})
		}
		return r
	}
	if err := full().Validate(q); err != nil {
		t.Errorf("a reply with everything at its maximum: %v", err)
	}
	for name, test := range map[string]struct {
		change func(*Reply)
		want   string
	}{
		"another call":    {func(r *Reply) { r.N-- }, "it is to call 4503599627370495"},
		"another start":   {func(r *Reply) { r.Start = 1 }, "of start 1, not"},
		"no epoch":        {func(r *Reply) { r.Epoch = 0 }, "no epoch"},
		"negative epoch":  {func(r *Reply) { r.Epoch = -1 }, "epoch -1"},
		"last epoch":      {func(r *Reply) { r.Epoch = maxNumber }, "epoch 4503599627370496"},
		"version":         {func(r *Reply) { r.Version = maxReplied + 1 }, "version"},
		"latest":          {func(r *Reply) { r.Refused, r.Latest = RefusedOld, maxNumber }, "latest start"},
		"refusal":         {func(r *Reply) { r.Refused = 99 }, "refusal 99"},
		"no params":       {func(r *Reply) { r.Refused = RefusedParams }, "0 hosts"},
		"live":            {func(r *Reply) { r.Live = -1 }, "live hosts -1"},
		"differ":          {func(r *Reply) { r.Differ = MaxHosts + 1 }, "hosts that differ 1001"},
		"events":          {func(r *Reply) { r.Events = append(r.Events, r.Events[0]) }, "257 events"},
		"event to come":   {func(r *Reply) { r.Version = 7 }, "version of an event"},
		"event's key":     {func(r *Reply) { r.Events[9].Key = "a b" }, `bucket "a b"`},
		"grant's key":     {func(r *Reply) { r.Grants[9].Key = "" }, `bucket ""`},
		"negative parts":  {func(r *Reply) { r.Grants[9].Parts = -1 }, "parts given -1"},
		"parts":           {func(r *Reply) { r.Grants[9].Parts = Whole + 1 }, "parts given 1048577"},
		"sale's key":      {func(r *Reply) { r.Sales[0].Key = "\x00" }, "bucket"},
		"tickets":         {func(r *Reply) { r.Sales[0].N = MaxTickets + 1 }, "tickets 65"},
		"every":           {func(r *Reply) { r.Sales[0].Every = -1 }, "time between tickets"},
		"distant tickets": {func(r *Reply) { r.Sales[0].N = MaxTickets }, `tickets of "@a"`},
		"distant ticket":  {func(r *Reply) { r.Sales[0].At = math.MinInt64 }, `tickets of "@a"`},
		"gone":            {func(r *Reply) { r.Gone = append(r.Gone, r.Gone[0]) }, "2001 hosts are gone or replaced"},
		"gone name":       {func(r *Reply) { r.Gone[7].Host = "bad name" }, "gone host"},
		"gone start":      {func(r *Reply) { r.Gone[7].Start = -2 - maxNumber }, "start of a gone host"},
	} {
		r := full()
		test.change(r)
		if err := r.Validate(q); err == nil || !strings.Contains(err.Error(), test.want) {
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
