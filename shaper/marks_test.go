package shaper

import (
	"fmt"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

func TestParseDSCP(t *testing.T) {
	for d := range DSCP(NumDSCP) {
		if got, err := ParseDSCP(d.String()); err != nil || got != d {
			t.Errorf("ParseDSCP(%q) = %d, %v, want %d", d, got, err, d)
		}
	}
	for text, want := range map[string]DSCP{"EF": 46, "46": 46, "cs0": 0, "le": 1, "af41": 34, "cs7": 56} {
		if got, err := ParseDSCP(text); err != nil || got != want {
			t.Errorf("ParseDSCP(%q) = %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "64", "-1", "af14", "0x2e", "ef "} {
		if got, err := ParseDSCP(text); err == nil {
			t.Errorf("ParseDSCP(%q) = %d, want an error", text, got)
		}
	}
}

func TestParseMark(t *testing.T) {
	for text, want := range map[string]Mark{
		"16": {16, AnyMark}, "0x10": {16, AnyMark}, "0x10/0xff": {16, 0xff}, "0": {0, AnyMark}, "0/1": {0, 1}, "0xffffffff": {AnyMark, AnyMark},
	} {
		got, err := ParseMark(text)
		if err != nil || got != want {
			t.Errorf("ParseMark(%q) = %v, %v, want %v", text, got, err, want)
		}
		if again, err := ParseMark(got.String()); err != nil || again != got {
			t.Errorf("ParseMark(%q) = %v, %v, want %v", got, again, err, got)
		}
	}
	for _, text := range []string{"", "/", "1/", "/1", "1/0", "0/0", "3/1", "0x100000000", "1/0x100000000", "-1"} {
		if got, err := ParseMark(text); err == nil {
			t.Errorf("ParseMark(%q) = %v, want an error", text, got)
		}
	}
}

// Of two marks, it is compared with all marks of 8 bits whether they overlap, and whether one covers the other.
func TestMark_OverlapsAndCovers(t *testing.T) {
	rnd := testutil.Rand(t)
	overlapping, covering := 0, 0
	for range 20_000 {
		mark := func() Mark {
			some := rnd.Uint32N(256)
			mask := max(1, some&rnd.Uint32N(256))
			return Mark{uint32(rnd.IntN(256)) & mask, mask}
		}
		a, b := mark(), mark()
		overlap, cover := false, true
		for n := range uint32(256) {
			inA, inB := n&a.Mask == a.Value, n&b.Mask == b.Value
			overlap = overlap || inA && inB
			cover = cover && (inA || !inB)
		}
		if a.overlaps(b) != overlap || a.covers(b) != cover {
			t.Fatalf("%v and %v: overlap %v, covers %v; want %v, %v", a, b, a.overlaps(b), a.covers(b), overlap, cover)
		}
		if overlap {
			overlapping++
		}
		if cover {
			covering++
		}
	}
	if overlapping == 0 || covering == 0 {
		t.Errorf("%d overlap, %d cover: this tested nothing", overlapping, covering)
	}
}

func TestCompile_MasksOfMarks(t *testing.T) {
	limit := Limit{Name: "l", Rate: 8, Match: Match{Attach: []string{"a"}, Mark: []Mark{{0, 1}, {1, 1}, {0, 2}, {0, 4}, {0, 8}}}}
	if _, err := New(1).Compile([]Limit{limit}, nil, []Attachment{{Name: "a"}}, nil, false); err != nil {
		t.Errorf("four masks: %v", err)
	}
	limit.Match.Mark = append(limit.Match.Mark, Mark{0, 16})
	if _, err := New(1).Compile([]Limit{limit}, nil, []Attachment{{Name: "a"}}, nil, false); err == nil || !strings.Contains(err.Error(), "too many different masks of marks: 5 (maximum 4)") {
		t.Errorf("five masks: %v", err)
	}
	limit.Match.Mark = []Mark{{1, 1}}
	if _, err := New(1).Compile([]Limit{limit}, nil, []Attachment{{Name: "a", Hook: HookXDP}}, nil, false); err == nil || !strings.Contains(err.Error(), `match.mark: unsupported at attachment "a": packets have no mark at XDP`) {
		t.Errorf("marks at XDP: %v", err)
	}
}

func TestCompile_Cgroups(t *testing.T) {
	limit := Limit{Name: "l", Rate: 8, Match: Match{Attach: []string{"a"}}}
	for i := range MaxCgroups {
		limit.Match.Cgroup = append(limit.Match.Cgroup, fmt.Sprint("/", i))
	}
	if _, err := New(1).Compile([]Limit{limit}, nil, []Attachment{{Name: "a"}}, nil, false); err != nil {
		t.Errorf("sixteen: %v", err)
	}
	if _, err := New(1).Compile([]Limit{limit}, nil, []Attachment{{Name: "a", Direction: Ingress}}, nil, false); err == nil || !strings.Contains(err.Error(), "match.cgroup: unsupported at attachment \"a\": only packets at egress") {
		t.Errorf("at ingress: %v", err)
	}
	limit.Match.Cgroup = append(limit.Match.Cgroup, "/one-more")
	if _, err := New(1).Compile([]Limit{limit}, nil, []Attachment{{Name: "a"}}, nil, false); err == nil || !strings.Contains(err.Error(), "too many different control groups: 17 (maximum 16)") {
		t.Errorf("seventeen: %v", err)
	}
}

func TestParseCgroup(t *testing.T) {
	for _, path := range []string{"/", "/a", "/system.slice/x y.service", "/a/..b"} {
		if got, err := ParseCgroup(path); err != nil || got != path {
			t.Errorf("ParseCgroup(%q) = %q, %v", path, got, err)
		}
	}
	for _, path := range []string{"", "a", "/a/", "//a", "/a/../b", "/./a", "/a\x00", "/" + strings.Repeat("a", 1024)} {
		if _, err := ParseCgroup(path); err == nil {
			t.Errorf("ParseCgroup(%q): no error", path)
		}
	}
}
