//go:build race

package bpf

func init() { raceDetector = true }
