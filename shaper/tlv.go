package shaper

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strconv"
	"sync"
)

// TLV is a value in the PROXY protocol header of a connection: its type, and a hash of both.
type TLV struct {
	Type uint8
	Hash uint64 // see HashTLV
}

const (
	// MaxTLVs is how many values of a header a flow has. Further ones count as missing.
	MaxTLVs = 16

	// maxTLVText is how many bytes of a value are kept to be shown.
	maxTLVText = 64

	// tlvTexts is how many values are kept to be shown.
	tlvTexts = 4096
)

// HashTLV returns the hash of a value of some type by which keys refer to it: 64 bits of SHA-256, never 0. It is the same in
// all processes and on all hosts: saved buckets and shared ones are found by it. It needs no secret: whoever finds two values
// with one hash shares a bucket with himself, and the value of another one takes 2^64 attempts to meet.
func HashTLV(tlvType uint8, value []byte) uint64 {
	h := sha256.New()
	h.Write([]byte{tlvType})
	h.Write(value)
	return max(1, binary.BigEndian.Uint64(h.Sum(nil)))
}

// tlv returns the hash of f's value of some type, or 0 if it has none.
func (f *Flow) tlv(tlvType uint8) uint64 {
	for _, v := range f.TLVs {
		if v.Type == tlvType {
			return v.Hash
		}
	}
	return 0
}

// tlvNames remembers the beginnings of values, to show them. One that is seen again and again is remembered. It is safe for
// concurrent use, and takes up to 400 kB.
type tlvNames struct {
	mu    sync.Mutex
	texts []tlvText // nil before the first
}

type tlvText struct {
	hash uint64
	text string
	cut  bool // the value goes on
}

// NewTLV returns a value of a header, and remembers it to be shown.
func (s *Shaper) NewTLV(tlvType uint8, value []byte) TLV { return s.tlvNames.add(tlvType, value) }

// NewTLV is that of the shaper that compiled p.
func (p *Policy) NewTLV(tlvType uint8, value []byte) TLV { return p.tlvNames.add(tlvType, value) }

func (n *tlvNames) add(tlvType uint8, value []byte) TLV {
	hash := HashTLV(tlvType, value)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.texts == nil {
		n.texts = make([]tlvText, tlvTexts)
	}
	if at := &n.texts[hash%tlvTexts]; at.hash != hash {
		*at = tlvText{hash, string(value[:min(len(value), maxTLVText)]), len(value) > maxTLVText}
	}
	return TLV{tlvType, hash}
}

// text returns a hash in keys as text: the value if it is remembered, and of a long one its beginning and the hash.
func (n *tlvNames) text(hash uint64) string {
	if hash == 0 {
		return "none"
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.texts != nil && n.texts[hash%tlvTexts].hash == hash {
		at := &n.texts[hash%tlvTexts]
		if at.cut {
			return fmt.Sprintf("%s...#%016x", strconv.QuoteToASCII(at.text), hash)
		}
		return strconv.QuoteToASCII(at.text)
	}
	return fmt.Sprintf("#%016x", hash)
}
