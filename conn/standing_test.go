package conn

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"testing"
	"time"

	proxyproto "github.com/pires/go-proxyproto"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// The header tells the downstream what the limit with the fewest left leaves the source, and it is true: so many more
// connections are admitted at once, and no more.
func TestStanding(t *testing.T) {
	bySource := func(l shaper.Limit) shaper.Limit {
		l.Key, l.IPv4Prefix, l.IPv6Prefix = shaper.KeySource, 32, 64
		return l
	}
	perHour := shaper.Frequency{N: 6, Per: time.Hour}
	for name, tt := range map[string]struct {
		limits []shaper.Limit
		first  string // limit, remaining, reset
		second string
		more   int // connections that are admitted after the second
	}{
		"none":           {nil, "", "", -1},
		"cap":            {[]shaper.Limit{bySource(shaper.Limit{Name: "cap", MaxConnections: 5})}, "5 4 -", "5 3 -", 3},
		"observing":      {[]shaper.Limit{{Name: "cap", MaxConnections: 5, Observe: true}}, "", "", -1},
		"spaced":         {[]shaper.Limit{bySource(shaper.Limit{Name: "new", NewConnections: shaper.Frequency{N: 7200, Per: time.Hour}})}, "1 0 1", "1 0 1", -1},
		"burst":          {[]shaper.Limit{bySource(shaper.Limit{Name: "new", NewConnections: perHour, BurstConnections: 4})}, "4 3 600", "4 2 1200", 2},
		"fixed window":   {[]shaper.Limit{bySource(shaper.Limit{Name: "new", NewConnections: perHour, Algorithm: shaper.FixedWindow})}, "6 5 ?", "6 4 ?", 4},
		"sliding window": {[]shaper.Limit{bySource(shaper.Limit{Name: "new", NewConnections: perHour, Algorithm: shaper.SlidingWindow})}, "6 5 ?", "6 4 ?", 4},
		"sliding log":    {[]shaper.Limit{bySource(shaper.Limit{Name: "new", NewConnections: perHour, Algorithm: shaper.SlidingLog})}, "6 5 ?", "6 4 ?", 4},
		"several": {
			[]shaper.Limit{bySource(shaper.Limit{Name: "cap", MaxConnections: 50, NewConnections: perHour, BurstConnections: 4}), {Name: "all", MaxConnections: 4}},
			"4 3 600", "4 2 1200", 2,
		},
		"several, and the cap is the narrowest": {
			[]shaper.Limit{bySource(shaper.Limit{Name: "cap", MaxConnections: 50, NewConnections: perHour, BurstConnections: 4}), {Name: "all", MaxConnections: 3}},
			"3 2 -", "3 1 -", 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			told := make(chan string, 100)
			addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
				h, err := proxyproto.Read(bufio.NewReader(c))
				if err != nil {
					return // at the end of the test, when those that wait get in
				}
				told <- standingText(t, h)
				io.Copy(io.Discard, c)
			})
			r := start(t, shaper.TCP, addr)
			r.listen.SendProxy, r.listen.SendStanding = shaper.ProxyV2, true
			for i := range tt.limits { // those beyond wait: a reset may come before they are connected
				tt.limits[i].QueueTimeout, tt.limits[i].MaxQueue = time.Hour, 100
			}
			r.apply(tt.limits...)
			begun := time.Now()
			for i, want := range []string{tt.first, tt.second} {
				dial(t, r.addr()).Write([]byte("x"))
				if got := <-told; !alike(got, want, time.Since(begun)) {
					t.Errorf("connection %d is told %q, want %q", i, got, want)
				}
			}
			if tt.more < 0 {
				return
			}
			for range tt.more + 3 {
				dial(t, r.addr()).Write([]byte("x"))
			}
			for range tt.more {
				<-told
			}
			select {
			case got := <-told:
				t.Errorf("more than %d were admitted: %s", tt.more, got)
			case <-time.After(50 * time.Millisecond):
			}
		})
	}
}

// standingText returns limit, remaining and reset in h, "-" for one that is not there; "" without any.
func standingText(t *testing.T, h *proxyproto.Header) string {
	all, err := h.TLVs()
	if err != nil {
		t.Error(err)
	}
	if len(all) == 0 {
		return ""
	}
	values := map[proxyproto.PP2Type]string{}
	for _, v := range all {
		values[v.Type] = string(v.Value)
	}
	text := ""
	for i := range 3 {
		v := values[tlvLimit+proxyproto.PP2Type(i)]
		if v == "" {
			v = "-"
		}
		text += " " + v
	}
	if len(values) > 3 || len(values) != len(all) {
		t.Errorf("%+v", all)
	}
	return text[1:]
}

// alike reports whether got is want, in which "?" is a number of seconds up to an hour or two. Any number of seconds may be less by
// what has passed.
func alike(got, want string, passed time.Duration) bool {
	var limit, remaining, reset, wantLimit, wantRemaining int
	most, least := 7200, 1
	if n, _ := fmt.Sscanf(want, "%d %d %d", &wantLimit, &wantRemaining, &most); n == 3 {
		least = max(1, most-int(math.Ceil(passed.Seconds())))
	} else if n != 2 || want[len(want)-1] != '?' {
		return got == want
	}
	n, err := fmt.Sscanf(got, "%d %d %d", &limit, &remaining, &reset)
	if most == 1 && passed >= time.Second/2 && reset == 0 && remaining == limit { // what takes half a second may be over
		return limit == wantLimit
	}
	return err == nil && n == 3 && limit == wantLimit && remaining == wantRemaining && reset >= least && reset <= most
}

// Without send_standing nothing is told.
func TestStanding_Off(t *testing.T) {
	told := make(chan string, 1)
	addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
		h, err := proxyproto.Read(bufio.NewReader(c))
		if err != nil {
			t.Error(err)
			return
		}
		told <- standingText(t, h)
	})
	r := start(t, shaper.TCP, addr)
	r.listen.SendProxy = shaper.ProxyV2
	r.apply(shaper.Limit{Name: "cap", Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}, MaxConnections: 5})
	dial(t, r.addr()).Write([]byte("x"))
	if got := <-told; got != "" {
		t.Errorf("told %q", got)
	}
}

// The header has the class of a connection, if there are classes.
func TestStanding_Class(t *testing.T) {
	told := make(chan string, 10)
	addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
		h, err := proxyproto.Read(bufio.NewReader(c))
		if err != nil {
			t.Error(err)
			return
		}
		all, err := h.TLVs()
		if err != nil || len(all) != 1 || all[0].Type != tlvClass {
			t.Errorf("%v, TLVs %v, want that of the class alone", err, all)
		}
		for _, v := range all {
			told <- string(v.Value)
		}
		io.Copy(io.Discard, c)
	})
	r := start(t, shaper.TCP, addr)
	r.listen.SendProxy, r.listen.SendStanding = shaper.ProxyV2, true
	p := policyOf(t, r.shaper, []shaper.TrafficClass{classOf("127.0.0.2/32", 3)}, shaper.Limit{Name: "rate", Rate: 8e6})
	if err := r.proxy.Apply(t.Context(), []shaper.Listener{r.listen}, p, nil); err != nil {
		t.Fatal(err)
	}
	for source, want := range map[string]string{"127.0.0.1": shaper.DefaultClass, "127.0.0.2": "127.0.0.2/32"} {
		dialFrom(t, source, r.addr()).Write([]byte("x"))
		if got := <-told; got != want {
			t.Errorf("the downstream is told class %q of %s, want %q", got, source, want)
		}
	}
}

// A connection that comes after the time that is told finds all free again, and one 2 s before does not.
func TestStanding_Reset(t *testing.T) {
	for name, l := range map[string]shaper.Limit{
		"spaced": {}, "burst": {BurstConnections: 4}, "fixed": {Algorithm: shaper.FixedWindow}, "sliding": {Algorithm: shaper.SlidingWindow}, "log": {Algorithm: shaper.SlidingLog},
	} {
		l.Name, l.Key, l.IPv4Prefix, l.IPv6Prefix, l.NewConnections = "l", shaper.KeySource, 32, 64, shaper.Frequency{N: 6, Per: time.Hour}
		for _, use := range []int{1, 3, 6} {
			for _, at := range []time.Duration{0, 100 * time.Second, 3500 * time.Second} {
				start := func() (r *admissionRig, last *visitor) {
					r = newAdmissionRig(t, l)
					r.sleep(at)
					for range use {
						if v := r.visit("192.0.2.1", nil); v.granted {
							last = v
						}
					}
					return r, last
				}
				free := func(r *admissionRig) (n int) {
					for r.visit("192.0.2.1", nil).granted {
						n++
					}
					return n
				}
				r, last := start()
				told := last.held[0].standings(r.now)[0]
				now := free(r)
				r, _ = start()
				r.sleep(told.reset - 2*time.Second)
				before := free(r)
				r, _ = start()
				r.sleep(told.reset)
				full := free(r)
				if now != int(told.remaining) || full != int(told.limit) || before >= full {
					t.Errorf("%s, %d used at %v: told %+v; %d are free then, %d 2 s before, and now %d", name, use, at, told, full, before, now)
				}
			}
		}
	}
}
