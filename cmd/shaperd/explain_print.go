package main

import (
	"context"
	"errors"
	"fmt"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

// explainFromDaemon asks the running daemon to explain q, and prints the answer.
func explainFromDaemon(ctx context.Context, e env, q question) error {
	x, err := e.client().Explain(ctx, api.ExplainQuery{Source: q.source, To: q.target(), Listener: q.listener, Attach: q.attach, Destination: q.destination})
	switch {
	case errors.Is(err, api.ErrNoDaemon):
		return fmt.Errorf("%w; to explain a configuration file, use --config", err)
	case err != nil:
		return err
	}
	return e.show(x, func(p *term.Printer) {
		where := fmt.Sprintf("listener %q", x.Listener)
		if q.attach != "" {
			where = fmt.Sprintf("attachment %q", x.Attachment)
		}
		p.Line("%v to %s: %s", q.source, q.destinationText(), where)
		printExplanation(p, x)
	})
}

// printExplanation prints an explanation without its first line.
func printExplanation(p *term.Printer, x api.Explanation) {
	if as := asnLabel(x.ASN, x.ASName); as != "" {
		p.Line("%s", as)
	}
	if x.Unavailable != "" {
		p.Line("%s", p.Red(unavailableText(x.Listener, x.Unavailable)))
	}
	printFlowQuota(p, x.Flows)
	switch {
	case len(x.Limits) == 0 && x.Flows != nil && x.Flows.Full != "":
		p.Line("No limit matches.")
	case len(x.Limits) == 0:
		p.Line("No limit matches: traffic passes without delay.")
	default:
		p.Line("%s", verdictText(x))
		p.Line("")
		p.Table(bucketsTable(x.Limits))
		p.Line("")
		for _, b := range x.Bottlenecks {
			p.Line("%s: bottleneck is %q.", b.Resource, b.Limit)
		}
	}
	if len(x.Connections) > 0 {
		p.Line("")
		p.Table(connectionsTable(x.Connections))
	}
}

// printFlowQuota prints the number of UDP flows, and whether another one is possible.
func printFlowQuota(p *term.Printer, f *api.FlowQuota) {
	if f == nil {
		return
	}
	of := ""
	if f.MaxSourceFlows > 0 {
		of = fmt.Sprintf(" of %d", f.MaxSourceFlows)
	}
	p.Line("UDP flows: %d%s for this source, %d of %d at the listener.", f.SourceFlows, of, f.Flows, f.MaxFlows)
	switch {
	case f.Full != "":
		p.Line("%s", p.Red(fmt.Sprintf("A new flow would be REFUSED: the quota is exhausted (%s).", f.Full)))
	case f.MaxSourceFlows > 0 && f.SourceFlows >= f.MaxSourceFlows, f.Flows >= f.MaxFlows:
		p.Line("A new flow would evict an idle one.")
	}
}

// verdictText describes what a unit that arrived now would get.
func verdictText(x api.Explanation) string {
	next := 0.0
	var by api.Bucket // bucket of the limit that decides
	for _, l := range x.Limits {
		if l.Bucket == nil || l.Mode == "observe" {
			continue
		}
		next = max(next, l.Bucket.NextDeparture)
		if l.Limit == x.By {
			by = *l.Bucket
		}
	}
	switch {
	case x.Verdict == "pass":
		return "New traffic passes without delay."
	case x.Verdict == "delay" && x.Reason == "connections":
		reserved := ""
		if by.Reserved {
			reserved = ", the free one is reserved for a waiter that needs other limits too"
		}
		text := fmt.Sprintf("A new connection would wait for a slot of limit %q: %d in use%s, %d waiting.", x.By, by.InFlight, reserved, by.Waiting)
		if next > 0 {
			text += fmt.Sprintf(" Open connections may send again in %s.", term.Seconds(next))
		}
		return text
	case x.Verdict == "delay":
		return fmt.Sprintf("New traffic would be delayed by %s: limit %q, %s.", term.Seconds(next), x.By, x.Reason)
	}
	return fmt.Sprintf("New traffic would be refused: limit %q, %s.", x.By, x.Reason)
}

func bucketsTable(limits []api.LimitBucket) *term.Table {
	t := term.NewTable("LIMIT", "BUCKET", "DIRECTION", "LIMITS", "MODE", ">BACKLOG", ">QUEUED", ">NEXT IN", ">IN FLIGHT", ">WAITING")
	for _, l := range limits {
		row := []string{api.Printable(l.Limit), api.Printable(l.Key), api.Printable(l.Direction), api.Printable(l.Summary), api.Printable(l.Mode), "-", "-", "-", "-", "-"}
		if b := l.Bucket; b != nil {
			copy(row[5:], []string{backlogText(b), fmt.Sprint(b.Queued), term.Seconds(b.NextDeparture), fmt.Sprint(b.InFlight), fmt.Sprint(b.Waiting)})
		}
		t.Add(row...)
	}
	return t
}
