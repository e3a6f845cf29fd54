package shaper

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestEnumNames(t *testing.T) {
	for _, tt := range []struct {
		name string
		got  []string
		want []string
	}{
		{"Verdict", enumNames[Verdict](), []string{"pass", "delay", "refuse"}},
		{"Reason", enumNames[Reason](), []string{
			"none", "rate", "queue-full", "connections", "new-connections",
			"wait-timeout", "waiting-full", "client-gone", "memory-full", "blocked", "flow-closed", "shed", "quota",
		}},
		{"Ending", enumNames[Ending](), []string{
			"closed", "reset-by-client", "reset-by-server", "refused", "bad-proxy-header", "not-connected", "first-byte-timeout",
			"idle-timeout", "half-close-timeout", "lifetime-over", "too-slow", "overload", "stopped", "killed", "breaker-open", "yielded", "quota",
		}},
		{"Scheduling", enumNames[Scheduling](), []string{"fair", "fifo"}},
		{"Protocol", enumNames[Protocol](), []string{"any", "tcp", "udp", "icmp"}},
		{"Direction", enumNames[Direction](), []string{"to-downstream", "from-downstream", "both"}},
		{"RefuseWith", enumNames[RefuseWith](), []string{"reset", "close", "drop", "reply", "reject"}},
		{"AttachDirection", enumNames[AttachDirection](), []string{"egress", "ingress"}},
		{"AttachMode", enumNames[AttachMode](), []string{"shape", "police", "observe"}},
		{"Hook", enumNames[Hook](), []string{"auto", "tcx", "clsact", "xdp"}},
		{"OnStop", enumNames[OnStop](), []string{"open", "keep"}},
		{"Balance", enumNames[Balance](), []string{"round-robin", "least-connections", "source-hash"}},
		{"ProxyVersion", enumNames[ProxyVersion](), []string{"off", "v1", "v2"}},
	} {
		if diff := cmp.Diff(tt.want, tt.got); diff != "" {
			t.Errorf("%s: %s", tt.name, diff)
		}
	}
	for name, tt := range map[string][2]int{
		"Verdict": {len(enumNames[Verdict]()), NumVerdicts}, "Reason": {len(enumNames[Reason]()), NumReasons},
		"Ending": {len(enumNames[Ending]()), NumEndings}, "Protocol": {len(enumNames[Protocol]()), int(numProtocols)},
	} {
		if tt[0] != tt[1] {
			t.Errorf("%s: %d names of %d values", name, tt[0], tt[1])
		}
	}
}

func TestModeNames(t *testing.T) {
	if Enforce.String() != "enforce" || Observe.String() != "observe" {
		t.Errorf("the modes are %v and %v", Enforce, Observe)
	}
}

// enumNames returns the names of the values of E, up to the first without one.
func enumNames[E interface {
	~uint8
	fmt.Stringer
}]() (names []string) {
	for v := E(0); v.String() != "???"; v++ {
		names = append(names, v.String())
	}
	return names
}

func TestFieldNames(t *testing.T) {
	if got := Fields(0).String(); got != "all" {
		t.Errorf("no fields are %q, want all", got)
	}
	for i, name := range FieldNames() {
		if got := Fields(1 << i).String(); got != name {
			t.Errorf("field %d is %q, want %q", i, got, name)
		}
	}
	all := KeySource | KeyASN | KeyPort | KeyListen | KeyConnection | KeyAttach | KeyDestination | KeyDownstream | KeyCountry | KeyTLV
	if got, want := all.String(), "source,asn,port,listen,connection,attach,destination,downstream,country,tlv"; got != want || int(all) != 1<<len(FieldNames())-1 {
		t.Errorf("all fields are %q, want %q", got, want)
	}
}

func TestHistogram(t *testing.T) {
	for _, tt := range []struct {
		d      time.Duration
		bucket int
	}{
		{-time.Second, 0},
		{0, 0},
		{100 * time.Microsecond, 0},
		{100*time.Microsecond + 1, 1},
		{time.Millisecond, 3},
		{10 * time.Second, len(HistogramBounds) - 1},
		{10*time.Second + 1, len(HistogramBounds)},
		{time.Hour, len(HistogramBounds)},
	} {
		var h Histogram
		h.Observe(tt.d)
		for i := range h.Counts {
			want := uint64(0)
			if i == tt.bucket {
				want = 1
			}
			if got := h.Counts[i].Load(); got != want {
				t.Errorf("%v: %d in bucket %d, want %d", tt.d, got, i, want)
			}
		}
		if got := h.Sum.Load(); got != uint64(max(tt.d, 0)) {
			t.Errorf("%v: sum %d", tt.d, got)
		}
	}
	for i := 1; i < len(HistogramBounds); i++ {
		if HistogramBounds[i] <= HistogramBounds[i-1] {
			t.Errorf("bound %d is not above the previous one", i)
		}
	}
}

func TestLimitState_FollowsName(t *testing.T) {
	s := New(1)
	a := mustCompile(t, s, []Limit{{Name: "a", Rate: 8}, {Name: "b", Rate: 8}}, nil)
	b := mustCompile(t, s, []Limit{{Name: "b", Rate: 8}, {Name: "c", Rate: 8}}, nil)
	if a.State(1) != b.State(0) || a.State(1).Name != "b" {
		t.Error("states with the same limit name differ")
	}
	ids := map[uint32]bool{}
	for _, st := range []*LimitState{a.State(0), a.State(1), b.State(1)} {
		if ids[st.ID] || ids[st.ID+1] {
			t.Errorf("limit %q: duplicate ID %d", st.Name, st.ID)
		}
		ids[st.ID], ids[st.ID+1] = true, true
	}
	var c Counters
	c.Add(Delay, ByRate, 3)
	c.Add(Delay, ByRate, 4)
	if got := c[Delay][ByRate].Load(); got != 7 {
		t.Errorf("counted %d, want 7", got)
	}
}

func TestSetAll(t *testing.T) {
	for _, tt := range []struct {
		set  Set
		want []int
	}{
		{0, nil}, {1, []int{0}}, {1 << 63, []int{63}}, {1<<63 | 1<<5 | 1, []int{0, 5, 63}},
	} {
		var got []int
		for i := range tt.set.All {
			got = append(got, i)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%b: %s", tt.set, diff)
		}
	}
	for i := range Set(0b110).All {
		if i != 1 {
			t.Errorf("limit %d after a break", i)
		}
		break
	}
}
