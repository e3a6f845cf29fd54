package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// guestKernel is the one that has all the queues; the machine's own may have none of them.
const guestKernel = "6.12"

// guestLoads have a guest, whose processors are emulated, hold datagrams to a rate. It
// says how exact they are, and not how fast. One guest measures for all loads.
func guestLoads(short bool) (list []load) {
	rates, tests, programs := []int{10, 100}, "^TestBeside$", []string{subject, "htb", "tbf", "fq maxrate"}
	if short {
		rates, tests, programs = rates[:1], "^TestBeside$/^10$/^1$/^(shaperd|fq_maxrate)$", []string{subject, "fq maxrate"}
	}
	var all map[int]map[string][]sample
	for _, rate := range rates {
		list = append(list, load{
			name:  fmt.Sprintf("%d Mbit/s in a guest", rate),
			about: "datagrams of 1400 B that a router holds to a rate of frames, in Linux " + guestKernel + " on emulated processors", headline: "sigma", repeat: 1,
			figures:  []string{"error", "sigma", "w10", "w100", "gap50", "gap99", "gapmax"},
			programs: programs,
			own: func(ctx context.Context, _ *bench) (_ map[string][]sample, err error) {
				if all == nil {
					var text string
					text, err = goTest(ctx, "./test/vm", "-v", "-run=^TestKernels$/^"+guestKernel+"$", "-vm.run="+tests)
					if err == nil {
						all, err = parseGuest(text)
					}
				}
				if err == nil && len(all[rate][subject]) == 0 {
					err = errors.New("the guest wrote no figures")
				}
				return all[rate], err
			},
		})
	}
	return list
}

// parseGuest reads the lines of TestBeside, "bench: 10 Mbit/s, fq maxrate: error=0.1 ...",
// by rate and program.
func parseGuest(text string) (map[int]map[string][]sample, error) {
	all := map[int]map[string][]sample{}
	for line := range strings.Lines(text) {
		_, rest, ok := strings.Cut(line, "bench: ")
		head, rest, ok2 := strings.Cut(rest, ": ")
		rate, program, ok3 := strings.Cut(head, " Mbit/s, ")
		if !ok || !ok2 || !ok3 {
			continue
		}
		mbits, err := strconv.Atoi(rate)
		s := sample{figures: map[string]float64{}}
		for _, field := range strings.Fields(rest) {
			key, value, _ := strings.Cut(field, "=")
			x, fault := strconv.ParseFloat(value, 64)
			err = errors.Join(err, fault)
			s.figures[key] = x
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", strings.TrimSpace(line), err)
		}
		if all[mbits] == nil {
			all[mbits] = map[string][]sample{}
		}
		all[mbits][program] = append(all[mbits][program], s)
	}
	return all, nil
}
