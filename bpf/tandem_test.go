package bpf

import (
	"encoding/binary"
	"fmt"
	"math/big"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// sizedDatagram returns a datagram of n bytes.
func sizedDatagram(source, port uint16, n int) []byte {
	b := make([]byte, 14+20+8+n)
	b[12] = 0x08
	b[14], b[22], b[23] = 0x45, 64, ipUDP
	binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
	copy(b[26:], []byte{10, 0, byte(source >> 8), byte(source), 10, 9, 0, 99})
	binary.BigEndian.PutUint16(b[34:], port)
	binary.BigEndian.PutUint16(b[36:], 53)
	binary.BigEndian.PutUint16(b[38:], uint16(8+n))
	return b
}

// sent is a departed packet.
type sent struct {
	at    uint64 // ticks
	bytes int64
}

// sigma returns the bytes that leave beyond rate × time in the worst interval.
func sigma(all []sent, rate int64) float64 {
	slices.SortFunc(all, func(a, b sent) int { return int(int64(a.at - b.at)) })
	var sum, low, worst big.Int // bits × ticks a second
	for i, p := range all {
		if i > 0 {
			sum.Sub(&sum, new(big.Int).Mul(big.NewInt(rate), big.NewInt(int64(p.at-all[i-1].at))))
		}
		if sum.Cmp(&low) < 0 {
			low.Set(&sum)
		}
		sum.Add(&sum, new(big.Int).Mul(big.NewInt(8*p.bytes), big.NewInt(64e9)))
		if over := new(big.Int).Sub(&sum, &low); over.Cmp(&worst) > 0 {
			worst.Set(over)
		}
	}
	f, _ := new(big.Rat).SetFrac(&worst, big.NewInt(8*64e9)).Float64()
	return f
}

func tandemLimits(narrow shaper.Limit) []shaper.Limit {
	narrow.Name, narrow.Key, narrow.MaxDelay = "source", shaper.KeySource, 200*time.Millisecond
	return attachHere(shaper.Limit{Name: "all", Rate: 80e6, MaxDelay: 200 * time.Millisecond}, narrow)
}

// TestTandem delays packets by the limits of their sources, so that they would bunch up at the
// limit of all. Up to 1.84 MB used to leave at once.
func TestTandem(t *testing.T) {
	t.Parallel()
	b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1})
	var left []sent
	send := func(source uint16, n int, now uint64) bool {
		action, d, _ := b.run(t, &sample{data: sizedDatagram(source, 1234, n)}, now, (*bench).tc)
		if action == tcNext {
			left = append(left, sent{d.Depart, int64(n)})
		}
		return action == tcNext
	}
	check := func(t *testing.T, limit uint32) {
		t.Helper()
		got := sigma(left, 80e6)
		worst, allowed := b.takeMaxExcess(limit) // of all
		t.Logf("%d packets left, %.0f bytes beyond the rate; the monitor measured %v of %v", len(left), got, worst.Duration(), allowed.Duration())
		if got > 15_000 {
			t.Errorf("%.0f bytes beyond the rate", got)
		}
		if n := b.violations(0) + b.violations(1); n > 0 {
			t.Errorf("%d violations", n)
		}
	}
	for i, tt := range []struct {
		name   string
		narrow shaper.Limit
		ahead  float64 // bytes a second sent ahead, to delay the next packet
	}{
		{"80 kbit/s", shaper.Limit{Rate: 80e3}, 1e4},
		{"10 Mbit/s", shaper.Limit{Rate: 10e6}, 1.25e6},
		{"100 packets/s", shaper.Limit{Packets: perSecond(100)}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b.loadLimits(t, tandemLimits(tt.narrow), nil)
			left = nil
			now := uint64(i+1) * uint64(time.Hour)
			end := now + uint64(195*time.Millisecond)
			for source := uint16(i) << 12; now < end; source++ {
				used := 1400
				ahead := tt.ahead * float64(end-now) / 1e9
				for ; ahead >= 1; ahead -= 1400 {
					send(source, int(min(ahead, 1400)), now)
					used += int(min(ahead, 1400))
				}
				if tt.ahead == 0 {
					for range (end - now) / uint64(10*time.Millisecond) {
						send(source, 1, now)
						used++
					}
				}
				send(source, 1400, now)
				now += uint64(used) * 100
			}
			check(t, 1)
		})
	}
	t.Run("bursts", func(t *testing.T) {
		b.loadLimits(t, tandemLimits(shaper.Limit{Rate: 10e6}), nil)
		left = nil
		rnd := rand.New(rand.NewPCG(7, 7))
		type arrival struct {
			at     uint64
			source uint16
		}
		var all []arrival
		for source := range uint16(40) {
			for at := 10 * uint64(time.Hour); at < 10*uint64(time.Hour)+uint64(500*time.Millisecond); {
				at += uint64(rnd.ExpFloat64() * 60e3 / (10e6 / 40) * 1e9)
				for k := range uint64(43) {
					all = append(all, arrival{at + k*112e3, source})
				}
			}
		}
		slices.SortFunc(all, func(a, b arrival) int { return int(int64(a.at - b.at)) })
		for _, a := range all {
			send(a.source, 1400, a.at)
		}
		if len(left) < len(all)*7/10 {
			t.Errorf("%d of %d left", len(left), len(all))
		}
		check(t, 1)
	})
}

// TestCalendar_Concurrent books slots of one calendar from all CPUs at once, for packets that other
// limits delay by up to 100 ms: no booking is lost in a race.
func TestCalendar_Concurrent(t *testing.T) {
	b := newVariant(t, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1}, map[string]any{kernelVarTestSources: uint32(500)})
	b.loadLimits(t, attachHere(
		shaper.Limit{Name: "all", Packets: perSecond(200_000), MaxDelay: 100 * time.Millisecond},
		shaper.Limit{Name: "source", Key: shaper.KeySource, Packets: perSecond(500), MaxDelay: 100 * time.Millisecond},
	), nil)
	admitted := func() float64 {
		s, err := b.readState(1)
		if err != nil {
			t.Fatal(err)
		}
		return float64(s.Admitted[0][1] + s.Admitted[1][1])
	}
	var end atomic.Bool
	var sending sync.WaitGroup
	start := monotonic()
	for range max(runtime.NumCPU(), 2) {
		sending.Go(func() {
			for !end.Load() {
				if _, err := b.ShaperdTc.Run(&ebpf.RunOptions{Data: datagram(1), Repeat: 1000}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	// The processors may be busy with something else for a while, but not all the time.
	busiest := 0.0 // of the rate
	for begun := time.Now(); time.Since(begun) < time.Second || busiest < 1./3 && time.Since(begun) < 20*time.Second; {
		was, from := admitted(), monotonic()
		time.Sleep(100 * time.Millisecond)
		busiest = max(busiest, (admitted()-was)/(200_000*(monotonic()-from).Duration().Seconds()))
	}
	end.Store(true)
	sending.Wait()
	took := (monotonic() - start).Duration() + 100*time.Millisecond
	taken := admitted()
	most := 200_000 * (took + time.Millisecond).Seconds()
	worst, allowed := b.takeMaxExcess(1)
	t.Logf("%.0f of %.0f, at most %.2f of the rate; the monitor measured %v of %v", taken, most, busiest, worst.Duration(), allowed.Duration())
	if taken > most || busiest < 1./3 || b.violations(0)+b.violations(1) > 0 {
		t.Errorf("%.0f packets in %v, at most %.0f; %d violations", taken, took, most, b.violations(0)+b.violations(1))
	}
}

// TestCalendar_MigrationKeepsBacklog changes a limit from a bucket to a calendar, to other rates and back,
// while packets arrive: the backlog is kept, with the charges made during the change.
func TestCalendar_MigrationKeepsBacklog(t *testing.T) {
	t.Parallel()
	b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1})
	// There is no TCP traffic, but that limit is migrated after the other.
	limits := func(rate uint64, more ...shaper.Limit) []shaper.Limit {
		return attachHere(append(more,
			shaper.Limit{Name: "all", Match: shaper.Match{Protocol: shaper.UDP}, Rate: rate, MaxDelay: time.Second},
			shaper.Limit{Name: "z", Match: shaper.Match{Protocol: shaper.TCP}, Rate: rate, MaxDelay: time.Second})...)
	}
	source := shaper.Limit{Name: "source", Key: shaper.KeySource, Rate: 1e9, MaxDelay: time.Second}
	now := uint64(time.Hour)
	n := 0
	send := func() uint64 { // each of another source, whose limit never delays
		_, d, _ := b.run(t, &sample{data: sizedDatagram(uint16(n), 1, 1000)}, now, (*bench).tc)
		n++
		return d.Depart/64 - now
	}
	for i, step := range []struct {
		limits []shaper.Limit
		rate   uint64
		meets  bool // packets arrive during the migration
	}{
		{limits(8e5), 8e5, false},
		{limits(8e5, source), 8e5, true},
		{limits(16e5, source), 16e5, true},
		{limits(17e5, source), 17e5, true},
		{limits(17e5), 17e5, true},
		{limits(8e5), 8e5, false},
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			p, err := shaper.New(1024).Compile(step.limits, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
			if err != nil {
				t.Fatal(err)
			}
			numbers, err := b.assignNumbers(p, []shaper.Attachment{{Name: "here"}}, nil)
			if err != nil {
				t.Fatal(err)
			}
			calls := 0
			if err := b.installPolicy(p, numbers, func() leaky.Time {
				if calls++; calls > 1 && step.meets {
					for range 3 {
						send()
					}
				}
				return leaky.Time(now) * 64
			}); err != nil {
				t.Fatal(err)
			}
			if step.meets && calls < 2 {
				t.Fatal("no packet arrived during the migration")
			}
			for range 5 {
				unit := 1000 * 8e9 / step.rate // each change may add part of a slot, never remove one
				want := uint64(n) * unit
				if got := send(); got+1_000_000 < want || got > want+unit {
					t.Fatalf("packet %d leaves %v later, want %v", n, time.Duration(got), time.Duration(want))
				}
			}
		})
	}
}

// TestCalendar_BecomesShared shares a limit that had a calendar: its bucket, whose time is behind that of the calendar,
// begins without its backlog.
func TestCalendar_BecomesShared(t *testing.T) {
	b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1})
	boot := uint64(leaky.FromDuration(time.Hour))
	b.kernel.setShares(&shareChange{lease: kernelLease{End: uint64(leaky.Never), AloneAt: uint64(leaky.Never), Cold: kernelShare{Parts: shaper.Whole / 2}}}, leaky.Time(boot), boot)
	now := uint64(2 * time.Hour)
	for _, shared := range []bool{false, true} {
		limits := tandemLimits(shaper.Limit{Rate: 1e9})
		limits[0].Shared = shared
		p, err := shaper.New(1024).Compile(limits, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		numbers, err := b.assignNumbers(p, []shaper.Attachment{{Name: "here"}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.installPolicy(p, numbers, func() leaky.Time { return leaky.Time(now) * 64 }); err != nil {
			t.Fatal(err)
		}
		for i := range uint64(10) {
			_, d, _ := b.run(t, &sample{data: sizedDatagram(uint16(i), 1, 1000)}, now, (*bench).tc)
			each := uint64(100_000) // ns, at 80 Mbit/s
			if shared {
				each *= 2
			}
			wait := d.Depart/64 - now
			if d.Verdict == uint32(shaper.Refuse) || wait+each < i*each || wait > (i+1)*each {
				t.Errorf("shared = %v: packet %d: %+v, after %v", shared, i, d, time.Duration(wait))
			}
		}
	}
}
