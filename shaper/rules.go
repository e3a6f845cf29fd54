package shaper

import "shaperd.dev/shaperd/shaper/asn"

// Rules are what a policy is compiled from.
type Rules struct {
	Limits      []Limit
	Listeners   []Listener   // with Attachments the origins of traffic
	Attachments []Attachment // at interfaces
	ASNs        *asn.Table   // may be nil; then every ASN is 0
	Observe     bool         // only limits with Always are enforced
	Groups      []Group      // that limits and classes name
	Classes     []TrafficClass
}

// Compile is [Shaper.CompileRules] without classes.
func (s *Shaper) Compile(limits []Limit, listeners []Listener, attachments []Attachment, table *asn.Table, observe bool, groups ...Group) (*Policy, error) {
	return s.CompileRules(Rules{Limits: limits, Listeners: listeners, Attachments: attachments, ASNs: table, Observe: observe, Groups: groups})
}
