package sock

import "testing"

func TestSegments_Add(t *testing.T) {
	type add struct {
		bytes, size int
		fits        bool
	}
	for name, adds := range map[string][]add{
		"equal":                       {{100, 100, true}, {100, 100, true}},
		"a shorter one is the last":   {{100, 100, true}, {60, 60, true}, {60, 60, false}},
		"no longer one":               {{100, 100, true}, {101, 101, false}},
		"several, the last is short":  {{250, 100, true}, {100, 100, false}},
		"several after one":           {{100, 100, true}, {250, 100, true}, {1, 1, false}},
		"several of another size":     {{100, 100, true}, {120, 60, false}},
		"empty ones stay alone":       {{0, 0, true}, {0, 0, false}},
		"none is added to an empty":   {{0, 0, true}, {100, 100, false}},
		"at most 64":                  {{6300, 100, true}, {100, 100, true}, {100, 100, false}},
		"no more than a datagram has": {{60000, 20000, true}, {20000, 20000, false}},
	} {
		t.Run(name, func(t *testing.T) {
			var s Segments
			for range 2 {
				count, bytes := 0, 0
				for i, a := range adds {
					if fits := s.Add(make([]byte, a.bytes), a.size); fits != a.fits {
						t.Fatalf("%d: fits is %v", i, fits)
					}
					if a.fits {
						count += (&Message{Data: make([]byte, a.bytes), Size: a.size}).Count()
						bytes += a.bytes
					}
				}
				if s.Count() != count || s.Bytes() != bytes {
					t.Errorf("%d datagrams with %d bytes, want %d with %d", s.Count(), s.Bytes(), count, bytes)
				}
				s.Clear()
			}
		})
	}
}
