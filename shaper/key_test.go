package shaper

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/internal/testutil"
)

func TestKey_ContainsOnlyItsFields(t *testing.T) {
	rnd := testutil.Rand(t)
	for range 20 {
		w := newWorld(rnd)
		table := w.table(t)
		p, err := New(1).Compile(w.limits(MaxLimits), w.listeners, w.attachments, table, false)
		if err != nil {
			t.Fatal(err)
		}
		for range 200 {
			f := w.flow()
			r := p.Route(f)
			for i := range p.Len() {
				l := p.Limit(i)
				want := Key{Limit: p.State(i).ID}
				if l.Key&KeySource != 0 {
					bits := l.IPv6Prefix
					if f.Source.Is4() {
						bits = l.IPv4Prefix
					}
					prefix, _ := f.Source.Prefix(bits)
					want.Address = prefix.Addr().As16()
					if got, ok := p.SourcePrefix(i, p.Key(i, f, r)); !ok || got != prefix {
						t.Fatalf("source %v /%d: SourcePrefix = %v, %v", f.Source, bits, got, ok)
					}
				} else if got, ok := p.SourcePrefix(i, p.Key(i, f, r)); ok {
					t.Fatalf("SourcePrefix = %v of a key without a source", got)
				}
				if l.Key&KeyDestination != 0 {
					bits := l.IPv6Prefix
					if f.Destination.Is4() {
						bits = l.IPv4Prefix
					}
					prefix, _ := f.Destination.Prefix(bits)
					want.Address = prefix.Addr().As16()
				}
				if l.Key&KeyASN != 0 {
					want.ASN = table.Lookup(f.Source)
				}
				if l.Key&KeyPort != 0 {
					want.Port = f.Port
				}
				if l.Key&(KeyListen|KeyAttach) != 0 {
					want.Origin = p.origins[f.Origin].id
				}
				if l.Key&KeyCountry != 0 {
					want.Country = table.Country(f.Source)
				}
				if l.Key&KeyTLV != 0 {
					if i := slices.IndexFunc(f.TLVs, func(v TLV) bool { return v.Type == l.TLV }); i >= 0 {
						want.TLV = f.TLVs[i].Hash
					}
				}
				if l.Key&KeyDownstream != 0 {
					want.Downstream = f.Downstream
				}
				if l.Key&KeyConnection != 0 {
					want.Connection = f.Connection
				}
				if got := p.Key(i, f, r); got != want {
					t.Fatalf("limit %d, %v, flow %+v: %s", i, l.Key, *f, cmp.Diff(want, got))
				}
			}
		}
	}
}

func TestKeyMask(t *testing.T) {
	for _, tt := range []struct {
		name         string
		source       string
		bits4, bits6 int
		want         string
	}{
		{"host of IPv4", "192.0.2.129", 32, 64, "192.0.2.129/32"},
		{"within a byte", "192.0.2.129", 25, 64, "192.0.2.128/25"},
		{"one bit", "192.0.2.129", 1, 64, "128.0.0.0/1"},
		{"usual IPv6", "2001:db8:1:2:3:4:5:6", 32, 64, "2001:db8:1:2::/64"},
		{"host of IPv6", "2001:db8::6", 32, 128, "2001:db8::6/128"},
		{"one bit of IPv6", "ffff::1", 32, 1, "8000::/1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := mustCompile(t, New(1), []Limit{{
				Name: "l", Rate: 8, Key: KeySource, IPv4Prefix: tt.bits4, IPv6Prefix: tt.bits6,
			}}, udpOnly)
			f := Flow{Source: netip.MustParseAddr(tt.source), Protocol: UDP}
			got, ok := p.SourcePrefix(0, p.Key(0, &f, p.Route(&f)))
			if !ok || got.String() != tt.want {
				t.Errorf("prefix %v, %v, want %v", got, ok, tt.want)
			}
		})
	}
}

func TestKey_StableOverReloads(t *testing.T) {
	w := newWorld(testutil.Rand(t))
	w.listeners = []Listener{{Name: "a", Addresses: []Address{{Protocol: UDP}}}, {Name: "b", Addresses: []Address{{Protocol: TCP}}}, {Name: "c", Addresses: []Address{{Protocol: TCP}, {Protocol: UDP}}}}
	s := New(1)
	limits := w.limits(20)
	before := mustCompile(t, s, limits, w.listeners, w.attachments...)
	for round := range 20 {
		reordered, listeners, attachments := slices.Clone(limits), slices.Clone(w.listeners), slices.Clone(w.attachments)
		w.Shuffle(len(reordered), func(i, j int) { reordered[i], reordered[j] = reordered[j], reordered[i] })
		w.Shuffle(len(listeners), func(i, j int) { listeners[i], listeners[j] = listeners[j], listeners[i] })
		w.Shuffle(len(attachments), func(i, j int) { attachments[i], attachments[j] = attachments[j], attachments[i] })
		if round%2 == 0 {
			reordered = append([]Limit{{Name: "new", Rate: 8}}, reordered...)
		}
		after := mustCompile(t, s, reordered, listeners, attachments...)
		for range 50 {
			f1 := w.flow()
			f2 := *f1
			switch listener, attachment := w.originNames(f1); {
			case attachment != "":
				f2.Origin = after.AttachmentIndex(attachment)
			case listener != "":
				f2.Origin = after.ListenerIndex(listener)
			case int(f1.Origin) == len(w.listeners):
				f2.Origin = after.ListenerIndex("gone")
			default:
				f2.Origin = after.AttachmentIndex("gone")
			}
			for i := range before.Len() {
				j := after.IndexOf(before.State(i))
				k1, k2 := before.Key(i, f1, before.Route(f1)), after.Key(j, &f2, after.Route(&f2))
				if k1 != k2 {
					t.Fatalf("limit %q, flow %+v: %s", before.Limit(i).Name, *f1, cmp.Diff(k1, k2))
				}
			}
		}
	}
	if got := mustCompile(t, s, nil, nil).IndexOf(before.State(0)); got != -1 {
		t.Errorf("IndexOf an absent limit = %d, want -1", got)
	}
}

func TestDescribe(t *testing.T) {
	listeners := []Listener{{Name: "front", Addresses: []Address{{Protocol: TCP}}, Downstream: []Downstream{{Host: "10.0.0.1"}, {Host: "::2", Port: 80}}}}
	attached := Match{Attach: []string{"uplink"}}
	for _, tt := range []struct {
		key    Fields
		source string
		listen uint16
		want   string
	}{
		{0, "192.0.2.1", 0, "all"},
		{KeySource, "192.0.2.1", 0, "source 192.0.2.0/24"},
		{KeySource, "2001:db8::1", 0, "source 2001:db8::/56"},
		{KeyASN, "192.0.2.1", 0, "asn 64500"},
		{KeyPort, "192.0.2.1", 0, "port 443"},
		{KeyListen, "192.0.2.1", 0, "listen front"},
		{KeyListen, "192.0.2.1", 1, "listen none"},
		{KeyPort, "192.0.2.1", 1, "port 443"},
		{KeyConnection, "192.0.2.1", 0, "this connection"},
		{KeySource | KeyASN | KeyPort | KeyListen | KeyConnection, "192.0.2.1", 0, "source 192.0.2.0/24, asn 64500, port 443, listen front, this connection"},
		{KeyDestination, "192.0.2.1", 0, "destination 198.51.100.0/24"},
		{KeyDestination | KeyPort, "192.0.2.1", 2, "destination 198.51.100.0/24, port 443"},
		{KeyDownstream, "192.0.2.1", 0, "downstream [::2]:80"},
		{KeyCountry, "192.0.2.1", 0, "country DE"},
		{KeyAttach, "192.0.2.1", 2, "attach uplink"},
		{KeyAttach, "192.0.2.1", 3, "attach none"},
	} {
		t.Run(tt.key.String(), func(t *testing.T) {
			l := Limit{Name: "l", Rate: 8, Key: tt.key, IPv4Prefix: 24, IPv6Prefix: 56}
			if tt.key&KeyAttach != 0 {
				l.Match = attached
			}
			p := mustCompile(t, New(1), []Limit{l}, listeners, Attachment{Name: "uplink"})
			f := Flow{Source: netip.MustParseAddr(tt.source), Destination: netip.MustParseAddr("198.51.100.7"), Port: 443, Origin: tt.listen, Protocol: TCP, Downstream: p.DownstreamID("[::2]:80")}
			if got := p.Describe(0, &f, Route{ASN: 64500, Country: 'D'<<8 | 'E'}); got != tt.want {
				t.Errorf("Describe = %q, want %q", got, tt.want)
			}
		})
	}
}

// Limits are ordered from the narrowest key to the widest, ties by name.
func TestPolicy_OrderOfLimits(t *testing.T) {
	limits := []Limit{
		{Name: "all", Rate: 8},
		{Name: "asn", Rate: 8, Key: KeyASN},
		{Name: "wide", Rate: 8, Key: KeySource, IPv4Prefix: 8, IPv6Prefix: 32},
		{Name: "all too", Rate: 8},
		{Name: "narrow", Rate: 8, Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64},
		{Name: "narrow and port", Rate: 8, Key: KeySource | KeyPort, IPv4Prefix: 32, IPv6Prefix: 64},
		{Name: "connection", Rate: 8, Key: KeyConnection},
		{Name: "server", Rate: 8, Key: KeyDestination, IPv4Prefix: 32, IPv6Prefix: 128},
		{Name: "attach", Rate: 8, Key: KeyAttach, Match: Match{Attach: []string{"uplink"}}},
		{Name: "destination", Rate: 8, Match: Match{Attach: []string{"uplink"}, Destination: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}},
		{Name: "attachment", Rate: 8, Match: Match{Attach: []string{"uplink"}}},
	}
	p := mustCompile(t, New(1), limits, udpOnly, Attachment{Name: "uplink"})
	var got []string
	for i := range p.Len() {
		got = append(got, p.Limit(i).Name)
	}
	want := []string{"connection", "narrow and port", "narrow", "wide", "server", "attach", "asn", "destination", "attachment", "all", "all too"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
