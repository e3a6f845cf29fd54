package shaper

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestEnumNames(t *testing.T) {
	for _, tt := range []struct {
		name   string
		values []fmt.Stringer
		want   []string
	}{
		{"Verdict", values[Verdict](NumVerdicts), []string{"pass", "delay", "refuse"}},
		{"Reason", values[Reason](NumReasons), []string{
			"none", "rate", "queue-full", "connections", "new-connections",
			"wait-timeout", "waiting-full", "client-gone", "memory-full", "blocked", "flow-closed",
		}},
		{"Ending", values[Ending](NumEndings), []string{
			"closed", "reset-by-client", "reset-by-server", "refused", "bad-proxy-header", "not-connected", "first-byte-timeout",
			"idle-timeout", "half-close-timeout", "lifetime-over", "too-slow", "overload", "stopped", "killed",
		}},
		{"Share", values[Scheduling](int(ScheduleFIFO) + 1), []string{"fair", "fifo"}},
		{"Protocol", values[Protocol](int(numProtocols)), []string{"any", "tcp", "udp", "icmp"}},
		{"Direction", values[Direction](int(Both) + 1), []string{"to-downstream", "from-downstream", "both"}},
		{"RefuseWith", values[RefuseWith](int(RefuseReply) + 1), []string{"reset", "close", "drop", "reply"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			seen := map[string]bool{}
			for _, v := range tt.values {
				s := v.String()
				if s == "" || seen[s] {
					t.Errorf("%q is empty or a duplicate", s)
				}
				seen[s] = true
				got = append(got, s)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func values[E interface {
	~uint8
	fmt.Stringer
}](n int) (all []fmt.Stringer) {
	for v := range n {
		all = append(all, E(v))
	}
	return all
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
	all := KeySource | KeyASN | KeyPort | KeyListen | KeyConnection | KeyAttach
	if got, want := all.String(), "source,asn,port,listen,connection,attach"; got != want || int(all) != 1<<len(FieldNames())-1 {
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
