package shaper

import (
	"bytes"
	"testing"
)

// Two values that begin alike have texts of their own, as they have buckets.
func TestTLVText_Long(t *testing.T) {
	s := New(10)
	long := bytes.Repeat([]byte("a"), maxTLVText)
	texts := map[string]bool{}
	for _, value := range [][]byte{long, append(long[:maxTLVText:maxTLVText], 'x'), append(long[:maxTLVText:maxTLVText], 'y')} {
		texts[s.tlvNames.text(s.NewTLV(0xe0, value).Hash)] = true
	}
	if len(texts) != 3 {
		t.Errorf("texts of three values: %v", texts)
	}
}

// Names of hosts are equal in upper and lower case.
func TestDownstreamID_Case(t *testing.T) {
	s := New(10)
	if s.DownstreamID("DB.example:80") != s.DownstreamID("db.example:80") {
		t.Error("one downstream has two numbers")
	}
}
