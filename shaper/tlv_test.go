package shaper

import (
	"fmt"
	"strings"
	"testing"
)

// The hash is part of saved state, and of what hosts tell each other.
func TestHashTLV_DoesNotChange(t *testing.T) {
	if got := HashTLV(0xe0, []byte("tenant-7")); got != 0xc151e88830c1cfd9 {
		t.Errorf("hash %#x", got)
	}
	if HashTLV(0xe0, []byte("a")) == HashTLV(0xe1, []byte("a")) {
		t.Error("values of two types have one hash")
	}
}

func TestTLV_Text(t *testing.T) {
	s := New(1)
	p := mustCompile(t, s, []Limit{{Name: "l", Rate: 8, Key: KeyTLV, TLV: 0xe0}}, udpOnly)
	describe := func(tlvs ...TLV) string { return p.Describe(0, &Flow{Protocol: UDP, TLVs: tlvs}, Route{}) }
	long := strings.Repeat("x", 100)
	for _, tt := range []struct{ value, want string }{
		{"tenant-7", `tlv:0xe0 "tenant-7"`},
		{"a\x00\xffé\n", `tlv:0xe0 "a\x00\xff\u00e9\n"`},
		{long, `tlv:0xe0 "` + long[:64] + fmt.Sprintf(`"...#%016x`, HashTLV(0xe0, []byte(long)))},
	} {
		if got := describe(s.NewTLV(0xe0, []byte(tt.value))); got != tt.want {
			t.Errorf("%q is %s, want %s", tt.value, got, tt.want)
		}
	}
	if a, b := s.NewTLV(0xe0, []byte(long)), s.NewTLV(0xe0, []byte(long+"y")); a == b {
		t.Error("two values that begin alike are one")
	}
	if got := describe(); got != "tlv:0xe0 none" {
		t.Errorf("without a value: %s", got)
	}
	if got := describe(s.NewTLV(0xe1, []byte("tenant-7"))); got != "tlv:0xe0 none" {
		t.Errorf("with a value of another type: %s", got)
	}
	if got := describe(TLV{0xe0, 0x123}); got != "tlv:0xe0 #0000000000000123" {
		t.Errorf("with a value that was never seen: %s", got)
	}
	// One that comes again is shown, however many others there were.
	for i := range 10 * tlvTexts {
		s.NewTLV(0xe0, fmt.Append(nil, i))
	}
	if got, want := describe(s.NewTLV(0xe0, []byte("tenant-7"))), `tlv:0xe0 "tenant-7"`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got := p.Limit(0).KeyText(); got != "tlv:0xe0" {
		t.Errorf("KeyText = %q", got)
	}
}
