package main

import (
	"context"
	"errors"
	"fmt"

	"shaperd/control"
)

// explainLive asks the running daemon.
func explainLive(ctx context.Context, e env, q question) error {
	x, err := e.daemon().Explain(ctx, control.ExplainQuery{Source: q.source, To: q.service(), Listener: q.listener, Attach: q.attach, Destination: q.destination})
	switch {
	case errors.Is(err, control.ErrNoDaemon):
		return fmt.Errorf("%w; to ask a file instead, name it with --config", err)
	case err != nil:
		return err
	}
	return e.show(x, func(p *page) {
		where := fmt.Sprintf("listener %q", x.Listener)
		if q.attach != "" {
			where = fmt.Sprintf("attachment %q", x.Attachment)
		}
		p.line("%v to %s: %s", q.source, q.to(), where)
		p.explanation(x)
	})
}

// explanation writes what comes behind the line that says whose it is.
func (p *page) explanation(x control.Explanation) {
	if as := system(x.ASN, x.ASName); as != "" {
		p.line("%s", as)
	}
	if x.Unserved != "" {
		p.line("%s", p.red(unservedText(x.Listener, x.Unserved)))
	}
	p.flowRoom(x.Flows)
	switch {
	case len(x.Limits) == 0 && x.Flows != nil && x.Flows.Full != "":
		p.line("No limit matches.")
	case len(x.Limits) == 0:
		p.line("No limit matches: nothing is held back.")
	default:
		p.line("%s", now(x))
		p.line("")
		p.table(bucketsTable(x.Limits))
		p.line("")
		for _, b := range x.BindsFirst {
			p.line("%s: %q binds first.", b.What, b.Limit)
		}
	}
	if len(x.Connections) > 0 {
		p.line("")
		p.table(connectionsTable(x.Connections))
	}
}

// flowRoom tells how many UDP flows there are, and whether there may be another one.
func (p *page) flowRoom(f *control.FlowRoom) {
	if f == nil {
		return
	}
	of := ""
	if f.MostOfSource > 0 {
		of = fmt.Sprintf(" of %d", f.MostOfSource)
	}
	p.line("UDP flows: %d%s for this source, %d of %d at the listener.", f.OfSource, of, f.Open, f.Most)
	switch {
	case f.Full != "":
		p.line("%s", p.red(fmt.Sprintf("What it sent from a new port now would be REFUSED: no room for another flow (%s).", f.Full)))
	case f.MostOfSource > 0 && f.OfSource >= f.MostOfSource, f.Open >= f.Most:
		p.line("For another one an idle flow makes room.")
	}
}

// now tells what a unit that came now would get.
func now(x control.Explanation) string {
	next := 0.0
	var by control.Bucket // of the limit that decides
	for _, l := range x.Limits {
		if l.Bucket == nil || l.Mode == "observe" {
			continue
		}
		next = max(next, l.Bucket.NextIn)
		if l.Limit == x.By {
			by = *l.Bucket
		}
	}
	switch {
	case x.Verdict == "pass":
		return "What came now would leave at once."
	case x.Verdict == "delay" && x.Reason == "connections":
		reserved := ""
		if by.Reserved {
			reserved = ", the next is reserved for one that waits for other limits too"
		}
		return fmt.Sprintf("A new connection would wait for a slot of %q: %d are taken%s, %d wait. The next unit of those that are in leaves in %s.",
			x.By, by.InFlight, reserved, by.Waiting, seconds(next))
	case x.Verdict == "delay":
		return fmt.Sprintf("What came now would leave in %s: %q, %s.", seconds(next), x.By, x.Reason)
	}
	return fmt.Sprintf("What came now would be refused: %q, %s.", x.By, x.Reason)
}

func bucketsTable(limits []control.BucketOf) *table {
	t := newTable("LIMIT", "BUCKET", "DIRECTION", "HELD TO", "MODE", ">BACKLOG", ">QUEUED", ">NEXT IN", ">IN FLIGHT", ">WAITING")
	for _, l := range limits {
		row := []string{printable(l.Limit), printable(l.Key), printable(l.Direction), printable(l.HeldTo), printable(l.Mode), "-", "-", "-", "-", "-"}
		if b := l.Bucket; b != nil {
			copy(row[5:], []string{backlog(b), fmt.Sprint(b.Queued), seconds(b.NextIn), fmt.Sprint(b.InFlight), fmt.Sprint(b.Waiting)})
		}
		t.add(row...)
	}
	return t
}
