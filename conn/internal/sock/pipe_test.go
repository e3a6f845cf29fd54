package sock

import (
	"sync/atomic"
	"testing"
)

// A pool that had all pipes at once leaves some to the others when these are empty again.
func TestPipePool_LeavesPipes(t *testing.T) {
	const most = 8
	var open atomic.Int64
	a, b := PipePool{Open: &open, Max: most, Size: 1 << 16}, PipePool{Open: &open, Max: most, Size: 1 << 16}
	var taken []*Pipe
	for p := a.Take(); p != nil; p = a.Take() {
		taken = append(taken, p)
	}
	if len(taken) != most || b.Take() != nil || open.Load() != most {
		t.Fatalf("%d pipes were taken, %d are open, want %d", len(taken), open.Load(), most)
	}
	for _, p := range taken {
		a.Put(p)
	}
	p := b.Take()
	if p == nil {
		t.Fatal("the other pool gets no pipe")
	}
	b.Put(p)
	if a.InUse() != 0 || b.InUse() != 0 {
		t.Errorf("%d and %d are in use", a.InUse(), b.InUse())
	}
	a.Close()
	b.Close()
	if n := open.Load(); n != 0 {
		t.Errorf("%d are open at the end", n)
	}
}
