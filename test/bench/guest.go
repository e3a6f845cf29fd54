package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// guestKernel is a kernel that has all qdiscs; the machine's own may have none.
const guestKernel = "6.12"

// guestLoads shape datagrams in a guest with emulated processors. They measure precision,
// not speed. One guest run serves all loads.
func guestLoads(short bool) (list []load) {
	rates, tests, programs := []int{10, 100}, "^TestCompareQdiscs$", []string{subject, "htb", "tbf", "fq maxrate"}
	if short {
		rates, tests, programs = rates[:1], "^TestCompareQdiscs$/^10$/^1$/^(shaperd|fq_maxrate)$", []string{subject, "fq maxrate"}
	}
	var all map[int]map[string][]sample
	for _, rate := range rates {
		list = append(list, load{
			name:        fmt.Sprintf("%d Mbit/s in a guest", rate),
			description: "datagrams of 1400 B that a router shapes to a rate of frames, in Linux " + guestKernel + " on emulated processors", headline: "sigma", repeat: 1,
			figures:  []string{"error", "sigma", "w10", "w100", "gap50", "gap99", "gapmax"},
			programs: programs,
			custom: func(ctx context.Context, _ *bench) (_ map[string][]sample, err error) {
				if all == nil {
					var text string
					text, err = goTest(ctx, "./test/vm", "-v", "-run=^TestKernels$/^"+guestKernel+"$", "-vm.run="+tests)
					if err == nil {
						all, err = parseGuest(text)
					}
				}
				if err == nil && len(all[rate][subject]) == 0 {
					err = errors.New("no figures in the guest's output")
				}
				return all[rate], err
			},
		})
	}
	return list
}

// parseGuest reads the lines of TestCompareQdiscs, "bench: 10 Mbit/s, fq maxrate:
// error=0.1 ...", by rate and program.
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
			x, parseErr := strconv.ParseFloat(value, 64)
			err = errors.Join(err, parseErr)
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
