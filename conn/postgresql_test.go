package conn

import (
	"slices"
	"testing"
)

// However an answer is cut into pieces, its end is seen.
func TestReadyForQuery(t *testing.T) {
	for _, tt := range []struct {
		answer      string
		idle, known bool
	}{
		{"T....D....C....Z\x00\x00\x00\x05I", true, true},
		{"C....Z\x00\x00\x00\x05T", false, true},
		{"E....Z\x00\x00\x00\x05E", false, true},
		{"Z\x00\x00\x00\x05I", true, true},
		{"Z\x00\x00\x00\x05ID....", false, false},
		{"Z\x00\x00\x00\x05X", false, false},
		{"\x00\x00\x00\x05I", false, false},
		{"+OK\r\n", false, false},
	} {
		for size := range len(tt.answer) {
			var q readyForQuery
			for piece := range slices.Chunk([]byte(tt.answer), size+1) {
				q.see(piece)
			}
			if idle, known := q.idle(); idle != tt.idle || known != tt.known {
				t.Errorf("%q by %d: idle %v, known %v", tt.answer, size+1, idle, known)
			}
			q.begin()
			if idle, known := q.idle(); idle || known != tt.known {
				t.Errorf("%q by %d, after the next question: idle %v, known %v", tt.answer, size+1, idle, known)
			}
		}
	}
}
