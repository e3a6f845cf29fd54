package conn

import (
	"encoding/binary"
	"slices"
	"strings"
	"testing"
)

// pgMessage is a message with a type, or without if that is 0.
func pgMessage(kind byte, body string) string {
	b := binary.BigEndian.AppendUint32(nil, uint32(4+len(body)))
	if kind != 0 {
		b = append([]byte{kind}, b...)
	}
	return string(b) + body
}

const pgStartup = "\x00\x03\x00\x00user\x00x\x00\x00"

// However a conversation is cut into pieces, it is seen when all is answered.
func TestPgConversation(t *testing.T) {
	startup, query := pgMessage(0, pgStartup), pgMessage('Q', "SELECT 1\x00")
	ready := func(status string) string { return pgMessage('Z', status) }
	sync := pgMessage('P', "x") + pgMessage('B', "") + pgMessage('E', "aaaa") + pgMessage('S', "")
	for _, tt := range []struct {
		up, down    string
		idle, known bool
	}{
		{startup, pgMessage('R', "\x00\x00\x00\x00") + ready("I"), true, true},
		{startup + query, ready("I"), false, true},
		{startup + query, ready("I") + pgMessage('D', ready("I")) + ready("T"), false, true},
		{startup + query, ready("I") + pgMessage('C', "SELECT") + ready("I"), true, true},
		{startup + query, ready("I") + ready("I") + pgMessage('A', "notification"), true, true},
		{startup + query, ready("I") + ready("E"), false, true},
		{startup + sync + sync + query, ready("I") + ready("I") + ready("I"), false, true},
		{startup + sync + sync + query, ready("I") + ready("I") + ready("I") + ready("I"), true, true},
		{startup + pgMessage('d', strings.Repeat("x", 300)), ready("I"), true, true},
		{pgMessage(0, "\x04\xd2\x16\x2f") + startup, "N" + ready("I"), true, true},
		{pgMessage(0, "\x04\xd2\x16\x2f") + "\x16\x03\x01", "S" + ready("I"), false, false},
		{"GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", false, false},
		{"q", "+OK\r\n", false, false},
	} {
		for size := 1; size <= len(tt.up)+len(tt.down); size++ {
			var c pgConversation
			c.begin(true)
			for piece := range slices.Chunk([]byte(tt.up), size) {
				c.sent(piece)
			}
			for piece := range slices.Chunk([]byte(tt.down), size) {
				c.received(piece)
			}
			if idle, known := c.idle(); idle != tt.idle || known != tt.known {
				t.Errorf("%q, %q by %d: idle %v, known %v; %+v", tt.up, tt.down, size, idle, known, c)
			}
		}
	}
}

// What ends a connection, or what another one has asked, waits for nothing.
func TestPgConversation_NeedsNoSlot(t *testing.T) {
	for _, tt := range []struct {
		typed bool
		next  string
		want  bool
	}{
		{false, pgMessage(0, "\x04\xd2\x16\x2e........"), true},
		{false, pgMessage(0, pgStartup)[:16], false},
		{true, pgMessage('X', ""), true},
		{true, pgMessage('X', "") + "Q", false},
		{true, pgMessage('Q', "SELECT 1\x00"), false},
		{true, "\x00\x00\x00\x10\x04\xd2\x16\x2e........", false},
	} {
		var c pgConversation
		if c.begin(!tt.typed); c.needsNoSlot([]byte(tt.next)) != tt.want {
			t.Errorf("%+v", tt)
		}
	}
}

func FuzzPgConversation(f *testing.F) {
	f.Add([]byte(pgMessage(0, pgStartup)+pgMessage('Q', "x")), []byte(pgMessage('Z', "I")), uint8(3))
	f.Add([]byte(pgMessage(0, "\x04\xd2\x16\x2f")), []byte("N"), uint8(1))
	f.Fuzz(func(t *testing.T, up, down []byte, size uint8) {
		var whole, pieces pgConversation
		whole.begin(true)
		pieces.begin(true)
		whole.sent(up)
		whole.received(down)
		for piece := range slices.Chunk(up, int(size)+1) {
			pieces.sent(piece)
		}
		for piece := range slices.Chunk(down, int(size)+1) {
			pieces.received(piece)
		}
		i1, k1 := whole.idle()
		if i2, k2 := pieces.idle(); i1 != i2 || k1 != k2 {
			t.Errorf("whole %v %v, in pieces %v %v", i1, k1, i2, k2)
		}
	})
}
