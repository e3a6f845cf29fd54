package conn

import "shaperd.dev/shaperd/leaky"

// peak is the most of a number of late, by windows of half a second.
type peak struct {
	window leaky.Time    // number of the last one
	most   [peakSpan]int // the last ones, by their number modulo peakSpan
}

const (
	peakWindow = leaky.Second / 2
	peakSpan   = 4
)

// add records that the number is n at now.
func (p *peak) add(n int, now leaky.Time) {
	window := now / peakWindow
	for i := range min(window.Sub(p.window), peakSpan) {
		p.most[(window-i)%peakSpan] = 0
	}
	p.window = max(p.window, window)
	at := &p.most[p.window%peakSpan]
	*at = max(*at, n)
}

// recent returns the most of the last window and the one before, as of the last add.
func (p *peak) recent() int {
	return max(p.most[p.window%peakSpan], p.most[(p.window+peakSpan-1)%peakSpan])
}

// all returns the most of all windows, which span 1.5 to 2 seconds, as of the last add.
func (p *peak) all() (most int) {
	for _, n := range p.most {
		most = max(most, n)
	}
	return most
}
