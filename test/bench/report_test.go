package main

import (
	"time"
)

// example returns a report with a cell of each kind.
func example() *report {
	stats := func(figures map[string][]float64) map[string]stat {
		all := map[string]stat{}
		for key, samples := range figures {
			all[key] = stat{samples}
		}
		return all
	}
	bins := func(each ...int) *series {
		s := &series{BinMillis: 1, Nominal: 10_000, Unit: "bytes"}
		for range 100 {
			s.Bins = append(s.Bins, each...)
		}
		return s
	}
	return &report{
		Began: time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC), Seconds: 300, Command: "bench -repeat 2",
		Machine:  machine{Kernel: "6.1.0", CPU: "Example CPU", CPUs: 2, Go: "go1.26"},
		Versions: map[string]string{subject: "shaperd 1", "nginx": "nginx 2"},
		Cells: []*cell{
			{
				Work: "W1", Name: "10 MB/s, 4 connections", Load: "connections that send", Headline: "sigma",
				Figures: []string{"error", "sigma", "w1", "gap50", "cpu"},
				Outcomes: []*outcome{
					{Program: subject, Series: bins(10_000), Figures: stats(map[string][]float64{
						"error": {-0.5, 0.5}, "sigma": {10, 10.2}, "w1": {1.5, 1.5}, "gap50": {1, 1}, "cpu": {4, 4},
					})},
					{Program: "haproxy", Peer: true, Series: bins(0, 0, 1_000_000), Figures: stats(map[string][]float64{
						"error": {-0.5, 0.5}, "sigma": {100, 400}, "w1": {30, 30}, "gap50": {1, 1}, "cpu": {2, 2},
					})},
					{Program: "nginx", Peer: true, Setting: "a quarter for each", Figures: stats(map[string][]float64{
						"error": {0, 0}, "sigma": {5, 5.1}, "w1": {1.2, 1.2}, "gap50": {1, 1}, "cpu": {4, 4},
					})},
					{Program: "toxiproxy", Peer: true, Cannot: "shares no rate"},
				},
			},
			{
				Work: "W6", Name: "a hog", Load: "a hog", Headline: "p50", Figures: []string{"p50", "p99", "worst", "failed", "inflight"},
				Outcomes: []*outcome{
					{Program: subject, Figures: stats(map[string][]float64{"p50": {120, 121}, "p99": {270, 271}, "worst": {300, 300}, "failed": {0, 0}, "inflight": {10, 10}})},
					{Program: "naive", Peer: true, Figures: stats(map[string][]float64{"p50": {2000, 2001}, "p99": {2100, 2101}, "worst": {2200, 2200}, "failed": {0, 2.5}, "inflight": {10, 10}})},
				},
			},
			{
				Work: "W99", Name: "of an unknown work", Headline: "ns", Figures: []string{"ns"},
				Outcomes: []*outcome{
					{Program: subject, Figures: stats(map[string][]float64{"ns": {40}})},
					{Program: "a library", Peer: true, Figures: stats(map[string][]float64{"ns": {80}})},
					{Program: ceiling, Figures: stats(map[string][]float64{"ns": {20}})},
				},
			},
		},
	}
}
