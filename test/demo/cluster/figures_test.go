package main

import (
	"encoding/xml"
	"errors"
	"io"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

const ms = time.Millisecond

// segments returns arrivals from a gateway, 1000 bytes each, at a rate in bytes a second.
func segments(gateway int, from, to time.Duration, bytes float64) (list []lab.Arrival) {
	gap := time.Duration(1000 / bytes * float64(time.Second))
	for at := from; at < to; at += gap {
		list = append(list, lab.Arrival{
			At: at, From: netip.AddrPortFrom(gatewayAddr(gateway), 4000), To: atDownstream,
			Flags: lab.ACK, Seq: uint32(at / time.Microsecond), Payload: 1000,
		})
	}
	return list
}

// TestMeasure has a hot spot that is followed after 40 ms, one that gets too little, and 80 ms at
// twice the rate.
func TestMeasure(t *testing.T) {
	p := phase{"", 0, 4 * time.Second}
	var list []lab.Arrival
	list = append(list, segments(hotAt(0), 40*ms, 2*time.Second, leftByOthers)...)
	list = append(list, segments(hotAt(visit), 2*time.Second, 3*time.Second, 0.8*leftByOthers)...)
	list = append(list, segments(hotAt(-visit), 3920*ms, 4*time.Second, 2*rate)...)
	list = append(list, segments(0, 5*time.Second, 6*time.Second, 5*rate)...) // in no phase
	f := measure(newFlow(list), p)
	if want := 0.08 * rate; math.Abs(f.excess-want) > 3000 || (f.excessTime()-80*ms).Abs() > ms/2 {
		t.Errorf("the excess is %.0f bytes, %v, want %.0f", f.excess, f.excessTime(), want)
	}
	if want := (1.96*leftByOthers + 0.8*leftByOthers + 0.16*rate) / (4 * rate); math.Abs(f.use-want) > 0.001 {
		t.Errorf("the use is %.4f, want %.4f", f.use, want)
	}
	if n, median := f.followed(); n != 1 || (median-85*ms).Abs() > ms {
		t.Errorf("%d moves were followed, after %v; want 1, after 40 ms and nine tenths of 50 ms", n, median)
	}
}

func TestFollow_IsNever(t *testing.T) {
	newFlow := func(list []lab.Arrival) []lab.Event { return lab.Bytes(list) }
	for name, events := range map[string][]lab.Event{
		"nothing":  nil,
		"too late": newFlow(segments(0, visit, 2*visit, rate)),
		"before":   newFlow(segments(0, -time.Second, 0, rate)),
	} {
		if got := follow(events, 0); got != never {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestSchedule checks that the faults meet what they are to meet.
func TestSchedule(t *testing.T) {
	if phases[0].end > killAt || phases[1].start > killAt || phases[1].end < restartAt || phases[2].start > cutAt || phases[2].end < mendAt {
		t.Errorf("the faults are not in their phases: %v", phases)
	}
	visited := map[int]bool{}
	for i, p := range phases {
		if len(p.moves()) < gateways || i > 0 && p.start != phases[i-1].end || p.start%visit != 0 {
			t.Errorf("%s: moves at %v", p.name, p.moves())
		}
	}
	for at := cutAt; at < mendAt; at += visit {
		visited[hotAt(at)] = true
	}
	if len(visited) < 2 || !visited[cutOff] {
		t.Errorf("while %s is cut off, the hot spot visits %v", gatewayName(cutOff), visited)
	}
}

// example returns an outcome that passes the checks.
func example() outcome {
	o := outcome{program: &programs[0], phases: phases[:], flow: newFlow(segments(0, 0, time.Second, rate))}
	for range phases {
		o.figures = append(o.figures, figures{excess: 0.006 * rate, use: 0.96, follows: []time.Duration{150 * ms, 200 * ms, never}})
	}
	return o
}

func TestCheck(t *testing.T) {
	if err := check(io.Discard, example()); err != nil {
		t.Errorf("all checks passed, but: %v", err)
	}
	for want, modify := range map[string]func(*outcome){
		"undisturbed: never more":       func(o *outcome) { o.figures[0].excess = 0.03 * rate },
		"a gateway cut off: never more": func(o *outcome) { o.figures[2].excess = 0.03 * rate },
		"rate is used: 80 %":            func(o *outcome) { o.figures[0].use = 0.8 },
		"followed: in 2,000 ms":         func(o *outcome) { o.figures[0].follows = []time.Duration{10 * ms, never, never} },
	} {
		o := example()
		modify(&o)
		err := check(io.Discard, o)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), ";") {
			t.Errorf("%s: %v", want, err)
		}
	}
}

func TestTable(t *testing.T) {
	var b strings.Builder
	o := example()
	o.figures[1].follows = []time.Duration{never, never}
	o.figures[2].excess = 1.25 * rate
	printTable(&b, []outcome{o})
	for _, want := range []string{"shaperd  undisturbed             6 ms       60,000     96 %    200 ms, 2 of 3\n", "never, 0 of 2\n", " 1,250 ms   12,500,000 "} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in\n%s", want, b.String())
		}
	}
}

func TestPictureIsXML(t *testing.T) {
	empty := example()
	empty.flow = flow{}
	for _, list := range [][]outcome{{example(), example()}, {empty}} {
		picture := draw(list)
		d := xml.NewDecoder(strings.NewReader(picture))
		for {
			if _, err := d.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%v in %s", err, picture)
			}
		}
		if !strings.Contains(picture, "shaperd: at most 60 kB beyond the rate") {
			t.Error("the picture does not say what the worst excess is")
		}
	}
}
